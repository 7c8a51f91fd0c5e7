"""Capture `F.grouped_mm` in any dtype: PyTorch's shape function accepts only bf16, and its CPU kernel no fp64.

transformers calls its own operator instead, whose backward in 5.17 loops over the groups' row counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, fx

from passes.ops import routed
from passes.torch_private import grouped_products_as


def any_dtype() -> AbstractContextManager[None]:
    """Record grouped matmuls (rows of a group by its matrix) as `ct::grouped_mm` inside the block."""
    return grouped_products_as(_grouped_mm)


def replace_grouped_mm(graph: fx.Graph) -> None:
    """Replace the operator of transformers by `ct::grouped_mm`, with the same operands."""
    for node in graph.nodes:
        if str(node.target) == "transformers.grouped_mm_fallback.default":
            node.target = routed.grouped_mm


def _grouped_mm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(rows: Tensor, weight: Tensor, offs: Tensor | None = None, *args: object, **kwargs: object) -> Tensor:
        plain = all(option is None for option in (*args, *kwargs.values())) and rows.dtype == weight.dtype
        if offs is None or not plain or (rows.dim(), weight.dim()) != (2, 3):
            return original(rows, weight, offs, *args, **kwargs)
        return routed.grouped_mm(rows, weight, offs)

    return call
