"""The program: its graph, mesh and placements, the reshard operators, and its text."""
