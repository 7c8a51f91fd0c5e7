"""Check before the first step that all ranks hold the same program and values, instead of hanging on a difference."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.step.ranks import gather
from passes.ir import ir
from passes.ir.printer import print_program
from passes.ir.spec import Value

SHOWN = 20  # lines of difference


def agree(name: str, program: ir.Program) -> None:
    """Compare a program's text on all ranks; raise RuntimeError with the first lines that differ from rank 0's."""
    text = print_program(program)
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests = gather(digest)
    if len(set(digests)) == 1:
        return
    texts = gather(text)
    differing = next(rank for rank, d in enumerate(digests) if d != digests[0])
    lines = difference(texts[0], texts[differing], "rank 0", f"rank {differing}")
    raise RuntimeError(f"{name}: ranks disagree on the program\n{lines}")


def difference(first: str, second: str, first_name: str, second_name: str) -> str:
    """Return the first lines in which two program texts differ."""
    lines = difflib.unified_diff(first.splitlines(), second.splitlines(), first_name, second_name, n=1, lineterm="")
    return "\n".join(list(lines)[:SHOWN])


def agreed(values: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    """Yield initial values; at the end compare the full tensors among them on all ranks, which must all call this.

    Raises UserError naming the first tensor that differs, as if each rank draws its own.
    """
    sums: dict[str, int] = {}
    for name, value in values:
        if isinstance(value, Tensor) and not value.is_meta:
            sums[name] = checksum(value)
        yield name, value
    digests = gather(hashlib.sha256(repr(sums).encode()).hexdigest())
    if len(set(digests)) > 1:
        number = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        of_ranks = gather(sums)
        name = next((n for n, value in of_ranks[0].items() if of_ranks[number].get(n) != value), "model")
        fix = "build the model from the same seed on all ranks, as after torch.manual_seed(0)"
        raise UserError(name, f"has another initial value on rank {number} than on rank 0; {fix}")


def checksum(value: Tensor) -> int:
    """Return the sum of a tensor's bits, as integers, so that it does not depend on the order."""
    integer = {1: torch.uint8, 2: torch.int16}.get(value.element_size(), torch.int32)
    return int(value.detach().contiguous().flatten().view(integer).sum(dtype=torch.int64))
