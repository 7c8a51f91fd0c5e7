"""A plain model as a graph, nothing of it lost."""
