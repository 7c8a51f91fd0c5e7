"""Bisection of a failing run to a pass and a node."""
