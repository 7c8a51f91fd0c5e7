"""The tasks of a pipelined step: the part of the program that ranks of one stage run at a time.

F0, B0   the forward and the backward of stage 0       I0, W0   a backward in two: of inputs, then of weights
A0       gathers the parameters of stage 0             G0, R0, U0   the update of pipeline rank 0
"""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
GATHER = "A"
SHARE, REDUCE, UPDATE = "G", "R", "U"  # exchange gradient terms, compute the norm, update
OF_RANKS = (SHARE, REDUCE, UPDATE)
SQUARE = "square"  # the square of the gradients' norm


class Task(NamedTuple):
    """A kind of work, and the pipeline stage, or for an update the pipeline rank, that does it."""

    stage: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}"


def square_of(rank: int) -> str:
    """Return the name of the running sum of squared norms that a pipeline rank sends to the next."""
    return f"{SQUARE}@{rank}"


def term_of(name: str, rank: int) -> str:
    """Return the name of a pipeline rank's term of a parameter's gradient."""
    return f"gradient.{name}@{rank}"
