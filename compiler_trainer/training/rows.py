"""Which rows of a global batch a process computes, so that it reads the tokens of no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.step.step import Step
from passes.program import ir


def own_rows(step: Step, ranks: Sequence[int]) -> NDArray[np.int64]:
    """The rows of a global batch that some ranks are given, ascending."""
    inputs = [given for each in (*step.train.values(), *step.evaluation.values()) for given in each.finished.inputs]
    entries = [given for given in inputs if given.kind == "batch"]
    size = entries[0].spec.shape[0]
    of_part = sorted({row for given in entries for rank in ranks for row in rows_of(given, step, rank)})
    return np.concatenate([np.array(of_part, np.int64) + part * size for part in range(step.microbatches)])


def rows_of(given: ir.Input, step: Step, rank: int) -> Iterator[int]:
    """The rows of a microbatch's entry that a rank is given."""
    (rows,) = given.spec.dims[0]
    for start, _, count in rows.runs(step.mesh, step.mesh.coordinates(rank)):
        yield from range(start, start + count)
