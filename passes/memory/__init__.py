"""Passes that keep, recompute or offload forward values."""
