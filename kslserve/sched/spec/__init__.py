"""Speculation: drafts that one wave verifies together, so that fewer waves read the weights."""
