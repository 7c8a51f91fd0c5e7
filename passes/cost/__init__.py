"""The cost of a program: bytes sent, FLOPs, memory, and time."""
