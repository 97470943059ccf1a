"""Values that cross package borders. Imports nothing but the standard library and `errors`."""
