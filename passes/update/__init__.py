"""Passes that turn gradients into new parameters."""
