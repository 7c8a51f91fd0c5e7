"""Imports without a look for garbage: modules are none, and the search takes a sixth of their time."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unwatched() -> Iterator[None]:
    """No search for garbage inside; later ones leave out what is there by then, if anything was imported."""
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()  # not again at each point of a sweep, whose rest would never be freed
        gc.enable()
