"""Command-line tools: parse flags, build the objects, call the library."""
