"""Random models, meshes and options, compared with training in eager PyTorch."""
