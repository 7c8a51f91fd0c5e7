"""Options: their fields, defaults and errors."""
