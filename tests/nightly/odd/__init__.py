"""Odd input, hundreds of times: `python -m tests.nightly.odd`."""
