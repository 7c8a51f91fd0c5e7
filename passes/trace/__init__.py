"""Graphs from Python functions: tracing, abstract evaluation, custom functions, and the insertion of nodes."""
