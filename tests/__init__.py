"""The tests; `tests.nightly` holds trials that are commands of their own."""
