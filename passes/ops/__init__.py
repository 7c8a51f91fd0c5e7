"""Operators of our own: changes of placement, rows by expert, rings, copies to the host, attention by interval."""
