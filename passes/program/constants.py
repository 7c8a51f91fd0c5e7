"""Evaluate nodes that depend on constants alone, such as the mask of a sliding window."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from passes.program import ir
from passes.program.operators import is_random

LARGEST = 2**28  # most entries of a tensor computed at compile time


def constant(node: fx.Node) -> Tensor | None:
    """Return the node's value; None if it depends on an input or a random number, or is too large."""
    needed: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current.op != "call_function" or is_random(current):
            return None
        if ir.is_tensor(current) and ir.example(current).numel() > LARGEST:
            return None
        needed[current] = None
        stack += [n for n in current.all_input_nodes if n not in needed]
    values: dict[fx.Node, object] = {}
    with torch.no_grad():
        for step in node.graph.nodes:
            if step in needed:
                args, kwargs = fx.map_arg((step.args, step.kwargs), values.__getitem__)
                values[step] = step.target(*args, **kwargs)
    return values[node]  # type: ignore[return-value]
