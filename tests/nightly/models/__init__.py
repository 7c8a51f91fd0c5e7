"""Models that nobody here wrote, trained for two steps on several meshes beside plain PyTorch."""
