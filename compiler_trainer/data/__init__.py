"""From text to batches: files -> spans -> tokens in a cache -> packed sequences -> mixture -> loader."""
