"""Tools to look into a run."""
