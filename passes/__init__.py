"""The compiler: graph passes over a captured training program (torch and itself only)."""
