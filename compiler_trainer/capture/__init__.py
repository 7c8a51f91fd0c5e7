"""Capture a plain model as a graph without losing anything."""
