"""Storage: folders of arrays on disk, object stores, and local copies of remote files."""
