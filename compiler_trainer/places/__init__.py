"""The places that a run reads from and writes to: cached folders of arrays, object stores, and local copies."""
