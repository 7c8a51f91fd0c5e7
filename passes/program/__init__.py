"""What a program is: its graph, mesh and placements, the operators at which they change, and its text."""
