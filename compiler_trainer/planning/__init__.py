"""Runs that train nothing: compiled and predicted."""
