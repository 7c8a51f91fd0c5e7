"""How far a program has come from the captured model to what ranks run; `check/verify.py` says what each may hold.

    captured -> normalized -> placed -> local -> joint -> step -> bucketed -> explicit -> ordered -> segmented

An evaluation goes from local to explicit: it has no backward.
"""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """A stage; a later one is greater."""

    CAPTURED = 0  # the model and its loss on one device, as `torch.export` left them
    NORMALIZED = 1  # of operators that rules speak of
    PLACED = 2  # inputs say where they live
    LOCAL = 3  # what one rank runs: reshard operators change placements
    JOINT = 4  # forward and backward: every parameter has a gradient
    STEP = 5  # which an update or an accumulator has consumed
    BUCKETED = 6  # collectives stand where they are sent, those that travel together as one
    EXPLICIT = 7  # reshard operators are functional collectives and plain arithmetic
    ORDERED = 8  # operators stand in the order in which they run, and say what they are to the layers
    SEGMENTED = 9  # calls of bodies, each compiled once

    def __str__(self) -> str:
        return self.name.lower()
