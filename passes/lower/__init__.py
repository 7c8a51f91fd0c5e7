"""The finished program cut into bodies, each compiled once, and what runs their calls."""
