"""Tools for developing and measuring the trainer."""
