"""Keep the model author's memory hints: calls of `torch.utils.checkpoint` become marks on operators.

`torch.export` follows a non-reentrant call and drops it; it records a reentrant one as `detach`, which would lose
gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.fx import traceback as fx_traceback

from compiler_trainer.capture.records import CHECKPOINT
from passes.torch_private import checkpoints_inside


def checkpoints_as_marks() -> AbstractContextManager[None]:
    """Mark operators traced inside a checkpointed call with its number; of nested calls, the outermost counts."""
    numbers, is_inside = itertools.count(), False

    @contextmanager
    def region() -> Iterator[None]:
        nonlocal is_inside
        if is_inside:
            yield
            return
        is_inside = True
        try:
            mark = {CHECKPOINT: f"checkpoint.{next(numbers)}"}
            with fx_traceback.preserve_node_meta(), fx_traceback.annotate(mark):
                yield
        finally:
            is_inside = False

    return checkpoints_inside(region)
