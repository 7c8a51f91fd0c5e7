"""Capture `F.grouped_mm` in any dtype: PyTorch's shape function takes bf16 only, its CPU kernel no fp64.

transformers calls an operator of its own in its place, whose backward in 5.17 loops over numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, fx

from passes.program import routed
from passes.program.torch_private import grouped_products_as


def any_dtype() -> AbstractContextManager[None]:
    """While on, a product of rows with a matrix for each group of them is recorded as `ct::grouped_mm`."""
    return grouped_products_as(_grouped_mm)


def with_one_product(graph: fx.Graph) -> None:
    """Let the operator of transformers be `ct::grouped_mm`, of the same operands."""
    for node in graph.nodes:
        if str(node.target) == "transformers.grouped_mm_fallback.default":
            node.target = routed.grouped_mm


def _grouped_mm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(rows: Tensor, weight: Tensor, offs: Tensor | None = None, *rest: object, **named: object) -> Tensor:
        plain = all(option is None for option in (*rest, *named.values())) and rows.dtype == weight.dtype
        if offs is None or not plain or (rows.dim(), weight.dim()) != (2, 3):
            return original(rows, weight, offs, *rest, **named)
        return routed.grouped_mm(rows, weight, offs)

    return call
