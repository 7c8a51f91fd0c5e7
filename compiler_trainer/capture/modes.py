"""Detect code of a model that asks in which mode it is, training or evaluation, while the model is captured.

A capture has one mode, so such a model needs another one for evaluation. Modules of PyTorch ask, too, but what follows
shows in the graph: random numbers or changed buffers. So does dropout, in whoever's code.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

OF_TORCH = str(Path(torch.__file__).parent)


@contextmanager
def places_that_ask() -> Iterator[set[str]]:
    """Collect the places, FILE:LINE, of other code that reads `training` of any module inside the block."""
    places: set[str] = set()

    def read(module: nn.Module) -> bool:
        caller = sys._getframe(1)
        path, line = caller.f_code.co_filename, caller.f_lineno
        if not path.startswith(OF_TORCH) and "dropout" not in linecache.getline(path, line):
            places.add(f"{path}:{line}")
        return module.__dict__["training"]

    def write(module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value

    nn.Module.training = property(read, write)  # type: ignore[assignment]
    try:
        yield places
    finally:
        del nn.Module.training
