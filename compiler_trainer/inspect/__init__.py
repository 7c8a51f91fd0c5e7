"""Look into a run."""
