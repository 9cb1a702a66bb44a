"""Ways for code that does not know this package to use it."""
