"""The operators of attention: a new one is a record in a file of its own, and its place in `RECORDS`.

Whatever knows operators of attention asks here: rules, the layout of a sequence, costs, recomputation, the compiler,
recording. Code outside adds one with `add_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx

from passes.context import interval, sdpa
from passes.context.attention import AttentionKernel, AttentionOp
from passes.context.context import emit
from passes.program.operators import key_of
from passes.program.torch_private import OpOverload
from passes.rules import RULES

RECORDS = (sdpa.RECORD, interval.RECORD)
OPERATORS: dict[OpOverload, AttentionOp] = {}
KERNELS: dict[OpOverload, AttentionKernel] = {}  # by forward and by backward


def add_attention(record: AttentionOp) -> None:
    """Let all passes know an operator of attention."""
    OPERATORS[record.op] = record
    RULES[key_of(record.op)] = lambda node: replace(record.rule(node), emit=partial(emit, record))
    for kernel in record.kernels:
        KERNELS.update((op, kernel) for op in (kernel.forward, kernel.backward) if op is not None)


def kernel_of(node: fx.Node) -> AttentionKernel | None:
    """The kernel of attention that a node calls, forward or backward, if it does."""
    return KERNELS.get(node.target)  # type: ignore[arg-type]


def is_backward(node: fx.Node) -> bool:
    """Whether a node computes gradients of attention."""
    return (kernel := kernel_of(node)) is not None and node.target is kernel.backward


def formula_of(op: OpOverload) -> Callable[..., int] | None:
    """FLOPs of a kernel of attention, by the shapes of what it takes and returns; None for another operator."""
    kernel = KERNELS.get(op)
    return None if kernel is None else kernel.flops[op is kernel.backward]


def compiled_for(device: str) -> dict[OpOverload, Callable[..., Any]]:
    """What operators of attention are compiled as for a type of device, where that is not a call of them."""
    kernels = (kernel for kernel in KERNELS.values() if device in kernel.compiled)
    return {
        op: fn for k in kernels for op, fn in zip((k.forward, k.backward), k.compiled[device], strict=True) if op
    }


def sources_for(device: str) -> str:
    """The texts of the files that say what operators of attention are compiled as, and of which operators."""
    found = ((op.name(), inspect.getsourcefile(fn)) for op, fn in compiled_for(device).items())
    return "".join(f"{name}\n{Path(str(file)).read_text()}" for name, file in found)


for _record in RECORDS:
    add_attention(_record)
