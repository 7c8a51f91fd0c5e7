"""Attention of a sequence that the ranks share."""
