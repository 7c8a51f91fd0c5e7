"""Where what a run reads and writes lies: folders of arrays that are kept, object stores, copies of what is there."""
