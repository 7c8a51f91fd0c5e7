"""Passes that decide when values are sent, and in what pieces."""
