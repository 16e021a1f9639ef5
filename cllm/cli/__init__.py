"""The command line: an optional extra."""
