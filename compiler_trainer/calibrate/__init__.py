"""Measurement of the machine as a cluster to predict for."""
