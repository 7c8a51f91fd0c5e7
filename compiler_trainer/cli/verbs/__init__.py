"""The verbs, one per file: their arguments and their output."""
