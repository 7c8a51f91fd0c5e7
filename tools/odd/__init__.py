"""Odd input, hundreds of times: `python -m tools.odd`."""
