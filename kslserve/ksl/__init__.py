"""Model files: the only code that knows a file layout."""
