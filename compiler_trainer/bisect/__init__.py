"""Find the pass and the node at which a run goes wrong."""
