"""Matmuls, one line each: `m k, k n -> m n; sum k` reads as in einsum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from passes.ir import ir
from passes.rules.base import (
    Rule,
    RuleMaker,
    aligned,
    from_text,
    numbered,
    of_dims,
    result_shapes,
    tensor_operands,
    zero_if_zero,
)

aten = torch.ops.aten
MULTIPLE = 16  # CUDA's float8 kernel takes matrices whose inner dim and columns are multiples of it
TABLE = {
    "addmm": "mn, mk, kn -> mn; whole k",  # the bias must be added once; normalize splits it off
    "bmm": "bmk, bkn -> bmn; sum k; linear 0; linear 1",
    "dot": "k, k -> ; sum k; linear 0; linear 1",
    "mm": "mk, kn -> mn; sum k; linear 0; linear 1",
    "mv": "mk, k -> m; sum k; linear 0; linear 1",
    "outer": "m, n -> mn; linear 0; linear 1",
}


def linear(node: fx.Node) -> Rule:
    """Make the rule of x[..., k] @ w[n, k].T; with a bias, k cannot be sharded (normalize splits the bias off)."""
    biased = len(tensor_operands(node)) == 3
    return from_text("...k, nk, n -> ...n; whole k" if biased else "...k, nk -> ...n; sum k; linear 0; linear 1")(node)


def scaled_product(node: fx.Node) -> Rule:
    """Make the rule of a float8 matmul; each matrix has one scale, or one a row (column), shared by shards along k."""
    by_row = ir.example(tensor_operands(node)[2]).dim() > 0
    rule = from_text("mk, kn, mi, jn -> mn; sum k" if by_row else "mk, kn, , -> mn; sum k")(node)
    return replace(rule, local=multiply_float8)


def multiply_float8(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *options: Any) -> Tensor:
    """Multiply float8 matrices a[m, k] and b[k, n] as CUDA's kernel requires: it takes b with contiguous columns.

    It also requires that k and n are multiples of 16; a rank's share of another size is padded by zeros.
    """
    n = b.shape[1]
    a, b_rows = pad_float8(a, 1, MULTIPLE), pad_float8(b.t(), MULTIPLE, MULTIPLE)
    if b_scale.dim() and len(b_rows) > n:
        b_scale = F.pad(b_scale, (0, len(b_rows) - n))
    product = aten._scaled_mm.default(a, b_rows.t(), a_scale, b_scale, *options)
    return product if len(b_rows) == n else product[:, :n].contiguous()


def pad_float8(x: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    """Return a contiguous float8 matrix, with rows and columns of zeros added up to multiples."""
    rows, columns = -x.shape[0] % row_multiple, -x.shape[1] % column_multiple
    x = x.contiguous()
    return F.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(x.dtype) if rows or columns else x


def matmul(node: fx.Node) -> Rule:
    """Make the rule of matmul with broadcast leading dims."""
    a, b = (tuple(ir.example(n).shape) for n in tensor_operands(node))
    (out,) = result_shapes(node)
    rows, cols = ([("m",)] if len(a) > 1 else []), ([("n",)] if len(b) > 1 else [])
    lead = numbered(out[: len(out) - len(rows) - len(cols)])
    left, right = (*aligned(a[:-2], lead), *rows, ("k",)), (*aligned(b[:-2], lead), ("k",), *cols)
    return of_dims(
        node,
        [left, right],
        [(*lead, *rows, *cols)],
        reduced={"k": "sum"},
        linear=frozenset([frozenset([0]), frozenset([1])]),
        pad_out=zero_if_zero,
    )


def distances(node: fx.Node) -> Rule:
    """Make the rule of cdist of x[..., m, k] and y[..., n, k], with broadcast leading dims."""
    lead = numbered(result_shapes(node)[0][:-2])
    left, right = (aligned(ir.example(n).shape[:-2], lead) for n in tensor_operands(node))
    operands = [(*left, ("m",), ("k",)), (*right, ("n",), ("k",))]
    return of_dims(node, operands, [(*lead, ("m",), ("n",))], whole=frozenset("k"))


RULES: dict[str, RuleMaker] = {name: from_text(text) for name, text in TABLE.items()} | {
    "_cdist_forward": distances,
    "linear": linear,
    "matmul": matmul,
    "_scaled_mm": scaled_product,
}
