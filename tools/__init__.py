"""Tools beside the trainer: benchmarks."""
