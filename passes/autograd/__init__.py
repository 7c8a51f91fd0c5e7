"""Forward and backward in one graph."""
