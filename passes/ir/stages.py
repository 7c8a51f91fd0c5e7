"""The stages of a program from the captured model to the program of a rank; `check/verify.py` checks their promises.

    captured -> normalized -> placed -> local -> joint -> step -> bucketed -> explicit -> ordered -> segmented

An evaluation goes from local to explicit: it has no backward.
"""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """A stage; later ones are greater."""

    CAPTURED = 0  # the model and its loss on one device, as `torch.export` left them
    NORMALIZED = 1  # the same, written in operators that have rules
    PLACED = 2  # the same, with a placement for each input
    LOCAL = 3  # the program of one rank: reshard operators change placements
    JOINT = 4  # forward and backward: every parameter has a gradient
    STEP = 5  # an update or an accumulator has consumed the gradients
    BUCKETED = 6  # collectives are where they are sent, and merged into buckets
    EXPLICIT = 7  # reshard operators are functional collectives and plain arithmetic
    ORDERED = 8  # operators are in their order of execution, with their roles in layers
    SEGMENTED = 9  # calls of bodies, each compiled once

    def __str__(self) -> str:
        return self.name.lower()
