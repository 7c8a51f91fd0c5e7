"""Find the samples of a global batch that a process computes, so that it reads only their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.step.step import Step
from passes.program import ir


def own_rows(step: Step, ranks: Sequence[int]) -> NDArray[np.int64]:
    """Return the numbers of the samples that the given ranks need, ascending."""
    inputs = [given for each in (*step.train.values(), *step.evaluation.values()) for given in each.finished.inputs]
    entries = [given for given in inputs if given.kind == "batch"]
    size = entries[0].spec.shape[0]
    of_part = sorted({row for given in entries for rank in ranks for row in rows_of(given, step, rank)})
    return np.concatenate([np.array(of_part, np.int64) + part * size for part in range(step.microbatches)])


def rows_of(given: ir.Input, step: Step, rank: int) -> Iterator[int]:
    """Yield the samples of a microbatch that a rank needs of one input."""
    (rows,) = given.spec.dims[0]
    for start, _, count in rows.runs(step.mesh, step.mesh.coordinates(rank)):
        yield from range(start, start + count)
