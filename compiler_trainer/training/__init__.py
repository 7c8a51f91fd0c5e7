"""The training loop and its output."""
