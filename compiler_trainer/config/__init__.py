"""The options of a run: their fields, defaults and errors."""
