"""One optimizer step: compilation, start-up and execution."""
