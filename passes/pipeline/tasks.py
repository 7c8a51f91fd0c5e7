"""What tasks of a pipelined step are called, and what they carry to each other."""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"  # of a backward in two: of inputs, then of weights
GATHER = "A"  # of a step: parameters gathered once
SHARE, REDUCE, UPDATE = "G", "R", "U"  # of an update
OF_RANKS = (SHARE, REDUCE, UPDATE)
AT = "@"  # between a name and the number of a stage or rank
SQUARE = "square"  # of gradients: what their norm is made of


class Task(NamedTuple):
    """What is done: forward `F` and backward `B` of a stage, or that in two, `I` and `W`; what comes before and after.

    `A` gathers the parameters of a stage, `G`, `R` and `U` are the update of a rank.
    """

    stage: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}"


def square_of(rank: int) -> str:
    """What is carried from a pipeline rank to the next: the square of its gradients' norm and of those before it."""
    return f"{SQUARE}{AT}{rank}"


def task_in(name: str) -> Task:
    """The task by its name, `F3`, or that of a program called by it, `evaluate.F3`."""
    kind, stage = (task := name.rpartition(".")[2])[0], int(task[1:])
    return Task(stage, kind)


def copy_name(name: str, stage: int) -> str:
    """What a stage's copy of a parameter is called where the stages are one program."""
    return f"{name}{AT}{stage}"


def own_name(name: str) -> str:
    """What a copy is called in the programs of its own stage: the parameter's name."""
    return name.partition(AT)[0]


def term_of(name: str, rank: int) -> str:
    """What a pipeline rank's term of a parameter's gradient is called."""
    return f"gradient.{name}{AT}{rank}"
