"""In which dtype each operator computes."""
