"""Small models of libraries, each with a short builder."""
