"""Random models, meshes and options, trained against eager PyTorch."""
