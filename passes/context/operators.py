"""The registry of attention operators. To add one, write a file with its `RECORD` and list it in `RECORDS`.

An operator is what a model calls; its kernels are pairs of a forward and a backward operator that run on a device.
Rules, sequence layout, costs, recomputation, the compiler and CUDA graphs find both here. External code adds an
operator with `add_attention`.
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
from passes.ir.operators import key_of
from passes.rules import RULES
from passes.torch_private import OpOverload

RECORDS = (sdpa.RECORD, interval.RECORD)
OPERATORS: dict[OpOverload, AttentionOp] = {}
KERNELS: dict[OpOverload, AttentionKernel] = {}  # each kernel by its forward, and again by its backward


def add_attention(record: AttentionOp) -> None:
    """Register an attention operator by its `record`, with its sharding rule and its kernels, for all passes."""
    OPERATORS[record.op] = record
    RULES[key_of(record.op)] = lambda node: replace(record.rule(node), emit=partial(emit, record))
    for kernel in record.kernels:
        KERNELS.update((op, kernel) for op in (kernel.forward, kernel.backward) if op is not None)


def kernel_of(node: fx.Node) -> AttentionKernel | None:
    """Return the attention kernel that a node calls, forward or backward; None if it calls none."""
    return KERNELS.get(node.target)  # type: ignore[arg-type]


def is_backward(node: fx.Node) -> bool:
    """Return True if a node computes gradients of attention."""
    return (kernel := kernel_of(node)) is not None and node.target is kernel.backward


def formula_of(op: OpOverload) -> Callable[..., int] | None:
    """Return the function from shapes to an attention kernel's FLOPs; None if `op` is no attention kernel."""
    kernel = KERNELS.get(op)
    return None if kernel is None else kernel.flops[op is kernel.backward]  # (forward, backward)


def compiled_for(device: str) -> dict[OpOverload, Callable[..., Any]]:
    """Return the functions that replace attention kernels in compiled code for a device type, by operator."""
    kernels = (kernel for kernel in KERNELS.values() if device in kernel.compiled)
    return {op: fn for k in kernels for op, fn in zip((k.forward, k.backward), k.compiled[device], strict=True) if op}


def sources_for(device: str) -> str:
    """Return the names of the kernels of `compiled_for` and the source of their files, as one text for a cache key."""
    files = ((op.name(), inspect.getsourcefile(fn)) for op, fn in compiled_for(device).items())
    return "".join(f"{name}\n{Path(str(file)).read_text()}" for name, file in files)


for _record in RECORDS:
    add_attention(_record)
