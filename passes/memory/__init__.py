"""What the forward keeps, computes again or moves to the host."""
