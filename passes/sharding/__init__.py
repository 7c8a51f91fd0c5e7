"""Where each tensor lives on the mesh, and the local program that every rank runs."""
