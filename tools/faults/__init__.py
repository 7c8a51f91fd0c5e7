"""One-line faults planted in the passes, to see which checks notice them."""
