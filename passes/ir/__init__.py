"""The program: its graph, the records of its nodes, mesh and placements, and its text."""
