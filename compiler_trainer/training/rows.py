"""Find the samples of a global batch that a process computes, so that it reads only their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.step.step import Step
from passes.program import ir


def own_rows(step: Step, ranks: Sequence[int]) -> NDArray[np.int64]:
    """Return the numbers of the samples that the given ranks need, ascending."""
    inputs = [e for compiled in (*step.train.values(), *step.evaluation.values()) for e in compiled.finished.inputs]
    entries = [e for e in inputs if e.kind == "batch"]
    size = entries[0].spec.shape[0]
    part_rows = sorted({row for e in entries for rank in ranks for row in rows_of(e, step, rank)})
    return np.concatenate([np.array(part_rows, np.int64) + part * size for part in range(step.microbatches)])


def rows_of(entry: ir.Input, step: Step, rank: int) -> Iterator[int]:
    """Yield the samples of a microbatch that a rank needs of one input."""
    (rows,) = entry.spec.dims[0]
    for start, _, count in rows.runs(step.mesh, step.mesh.coordinates(rank)):
        yield from range(start, start + count)
