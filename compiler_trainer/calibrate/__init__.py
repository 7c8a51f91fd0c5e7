"""Measure the machine, as a cluster to predict for."""
