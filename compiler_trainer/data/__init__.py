"""Text to batches: files -> spans -> tokens in a cache -> packed rows -> mixture -> loader."""
