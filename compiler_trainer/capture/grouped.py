"""Capture `F.grouped_mm` in any dtype: PyTorch's shape function takes bf16 only, its CPU kernel no fp64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from passes.program import routed
from passes.program.torch_private import grouped_products_as


def any_dtype() -> AbstractContextManager[None]:
    """While on, a product of rows with a matrix for each group of them is recorded as `ct::grouped_mm`."""
    return grouped_products_as(_grouped_mm)


def _grouped_mm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(rows: Tensor, weight: Tensor, offs: Tensor | None = None, *rest: object, **named: object) -> Tensor:
        plain = all(option is None for option in (*rest, *named.values())) and rows.dtype == weight.dtype
        if offs is None or not plain or (rows.dim(), weight.dim()) != (2, 3):
            return original(rows, weight, offs, *rest, **named)
        return routed.grouped_mm(rows, weight, offs)

    return call
