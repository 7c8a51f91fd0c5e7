"""Facts about this machine, and the features that work on it."""
