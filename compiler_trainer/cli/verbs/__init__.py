"""A file a verb: its arguments, and what it prints."""
