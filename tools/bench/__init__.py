"""Benchmarks against stock PyTorch."""
