"""Models of other libraries, trained for two steps on several meshes and compared with plain PyTorch."""
