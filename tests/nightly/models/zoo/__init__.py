"""Small models of libraries, a short builder each."""
