"""Whether a program is what it says, and right: runner, verifier, simulator."""
