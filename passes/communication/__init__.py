"""When and in what pieces values travel."""
