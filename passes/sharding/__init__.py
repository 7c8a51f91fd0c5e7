"""Place tensors on the mesh, and build the local program that every rank runs."""
