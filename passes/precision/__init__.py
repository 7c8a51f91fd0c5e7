"""Passes that choose the dtype in which each operator computes."""
