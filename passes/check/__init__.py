"""Check that a program is consistent and correct: runner, verifier, simulator."""
