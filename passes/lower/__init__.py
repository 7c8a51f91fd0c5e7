"""The finished program: cut into bodies, each compiled once, and the code that runs their calls."""
