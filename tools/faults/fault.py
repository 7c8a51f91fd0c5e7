"""What a fault is."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fragment of a file of the passes that occurs there once, what stands there instead, and what that means."""

    name: str
    file: str
    old: str
    new: str
    means: str
