"""What this machine is, and what of ours works on it."""
