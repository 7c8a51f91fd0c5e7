"""Passes that build forward and backward in one graph."""
