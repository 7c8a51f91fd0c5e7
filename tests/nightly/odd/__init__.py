"""Hundreds of commands with odd input: `python -m tests.nightly.odd`."""
