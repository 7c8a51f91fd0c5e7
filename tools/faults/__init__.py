"""One-line faults planted in the passes, and who sees them."""
