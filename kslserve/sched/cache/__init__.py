"""The prefix cache: checkpoints of computed state, found by tokens, kept by value."""
