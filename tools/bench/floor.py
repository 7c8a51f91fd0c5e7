"""The floor of a step: the time of its matmuls and attention kernels alone, on their shapes.

All other work of a step is free at best, so floor / step shows how close to the optimum a step is.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, fx

from compiler_trainer.step.step import Step
from passes.cost.accounting import formula_of
from passes.ir import ir
from passes.torch_private import OpOverload
from passes.trace.abstract_eval import Layout

ROUNDS = 5

Pool = dict[Layout, Tensor]


def floor_s(step: Step) -> float:
    """Return the seconds of the matmuls and attention kernels of one optimizer step on a rank, in sequence."""
    pool: Pool = {}
    times = Counter(turn.program for turn in step.training[0])
    kernels = [
        kernel
        for name, compiled in step.train.items()
        for kernel in kernels_of(compiled.program, pool) * times[name]
    ]
    return statistics.median(seconds(kernels) for _ in range(ROUNDS))


def kernels_of(program: ir.Program, pool: Pool) -> list[Callable[[], object]]:
    """Return every matmul and attention kernel of a program, in order, on values from `pool` in operands' layouts."""
    value_of = partial(operand, pool)
    return [
        partial(node.target, *fx.map_arg(node.args, value_of), **fx.map_arg(node.kwargs, value_of))
        for node in program.calls()
        if isinstance(node.target, OpOverload) and formula_of(node.target)
    ]


def operand(pool: Pool, node: fx.Node) -> Tensor:
    """Return a value of a node's layout: random, or ones for integers."""
    layout = Layout.of(ir.example(node))
    if layout not in pool:
        pool[layout] = value = layout.empty()
        entries = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        random = torch.randn(entries.shape, device=value.device)
        entries.copy_(random if value.is_floating_point() else torch.ones_like(entries))
    return pool[layout]


def seconds(kernels: list[Callable[[], object]]) -> float:
    """Return the time of running all kernels once."""
    wait = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    with torch.no_grad():
        for kernel in kernels:
            kernel()
    wait()
    return time.perf_counter() - began
