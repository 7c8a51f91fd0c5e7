"""One optimizer step: compiled, started and run."""
