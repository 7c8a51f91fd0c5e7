"""Check before the first step that all ranks hold the same program, instead of hanging on a difference."""

from __future__ import annotations

import difflib
import hashlib

import torch.distributed as dist

from passes.ir import ir
from passes.ir.printer import print_program

SHOWN = 20  # lines of difference


def agree(name: str, program: ir.Program) -> None:
    """Compare a program's text on all ranks; raise RuntimeError with the first lines that differ from rank 0's."""
    text = print_program(program)
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    differing = next(rank for rank, d in enumerate(digests) if d != digests[0])
    lines = difference(texts[0], texts[differing], "rank 0", f"rank {differing}")
    raise RuntimeError(f"{name}: ranks disagree on the program\n{lines}")


def difference(first: str, second: str, first_name: str, second_name: str) -> str:
    """Return the first lines in which two program texts differ."""
    lines = difflib.unified_diff(first.splitlines(), second.splitlines(), first_name, second_name, n=1, lineterm="")
    return "\n".join(list(lines)[:SHOWN])
