"""Operators that rearrange, repeat, cut or join entries."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile
from typing import Any

import torch
from torch import fx

from passes.ir import ir
from passes.ir.operators import argument, name_of
from passes.ir.spec import Spec
from passes.rules.base import (
    Names,
    Rule,
    RuleMaker,
    aligned,
    numbered,
    of_dims,
    result_shapes,
    same_fill,
    tensor_operands,
    zero_if_zero,
)
from passes.trace.builder import Builder

aten = torch.ops.aten
# fields of the rule of an operator whose result has the operand's own entries
REARRANGED: dict[str, Any] = {"linear": frozenset([frozenset([0])]), "pad_out": same_fill, "moves": True}


def split_shapes(a: Sequence[int], b: Sequence[int]) -> tuple[list[Names], list[Names], dict[str, int]]:
    """Return the dims of two shapes of equal count in common factors, major to minor, and the factors' sizes.

    Between two places at which a dim of each shape ends, factors are common up to an end that does not divide the other
    shape's next; from there on each shape has factors of its own, named with `!`, which cannot be sharded.
    """
    sizes: dict[str, int] = {}
    ends = [list(accumulate(shape, operator.mul, initial=1)) for shape in (a, b)]  # 1, a[0], a[0] * a[1], ...
    factors: tuple[dict[int, str], ...] = ({}, {})  # of each shape: start -> name
    for low, high in pairwise(sorted({*ends[0]} & {*ends[1]})):
        cuts = sorted({end for shape in ends for end in shape if low <= end <= high})
        common = [*takewhile(lambda cut: all(next(e for e in shape if e >= cut) % cut == 0 for shape in ends), cuts)]
        for shape, names, tag in zip(ends, factors, "xy"):
            for start, end in pairwise([*common, *(cut for cut in cuts if cut > common[-1] and cut in shape)]):
                names[start] = f"f{start}" if end <= common[-1] else f"{tag}{start}!"
                sizes[names[start]] = end // start
    dims, out_dims = (
        [tuple(name for at, name in names.items() if start <= at < end) for start, end in pairwise(shape)]
        for shape, names in zip(ends, factors)
    )
    return dims, out_dims, sizes


def reshape(node: fx.Node) -> Rule:
    """Make the rule of view, reshape, flatten, squeeze, unsqueeze: the same entries in the same order."""
    (x,), (out,) = tensor_operands(node), result_shapes(node)
    if ir.example(x).dtype != ir.example(node).dtype:
        return reinterpretation(node)
    dims, out_dims, sizes = split_shapes(ir.example(x).shape, out)
    return Rule(
        (tuple(dims),),
        (tuple(out_dims),),
        sizes,
        whole=frozenset(name for name in sizes if name.endswith("!")),
        emit=emit_reshape,
        **REARRANGED,
    )


def reinterpretation(node: fx.Node) -> Rule:
    """Make the rule of a view of the same bits in another dtype: if its width differs, the last dim is whole."""
    (x,), (out,) = tensor_operands(node), result_shapes(node)
    names = result = numbered(ir.example(x).shape, ones=True)
    if names and ir.example(x).shape[-1] != out[-1]:
        result = (*names[:-1], ("o",))
    whole = frozenset({*names[-1], "o"}) if result != names else frozenset()
    return of_dims(node, [names], [result], whole=whole, pad_safe={0: 0.0}, pad_out=zero_if_positive_zero)


def zero_if_positive_zero(fills: Sequence[float | None]) -> float | None:
    """Return 0 if the operand's padding is 0 and not -0, whose bits are not all zero; otherwise None."""
    return 0.0 if fills[0] == 0.0 and math.copysign(1.0, fills[0]) > 0 else None


def emit_reshape(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Reshape to the local shape of the result."""
    return builder.call(aten.reshape.default, (operands[0], list(results[0].local_shape(builder.mesh))))


def permute(node: fx.Node) -> Rule:
    """Make the rule of transpose, permute, movedim, t; calling it on a tensor of distinct sizes gives the order."""
    (x,) = tensor_operands(node)
    names = numbered(ir.example(x).shape)
    marks = torch.empty([i + 2 for i in range(len(names))], device="meta")
    order = [n - 2 for n in node.target(marks, *node.args[1:], **node.kwargs).shape]  # type: ignore[operator]
    return of_dims(node, [names], [[names[i] for i in order]], **REARRANGED)


def expand(node: fx.Node) -> Rule:
    """Make the rule of expand: new leading dims and dims of size 1 are repeated; each rank repeats its own share."""
    (x,), (out,) = tensor_operands(node), result_shapes(node)
    dims = numbered(out)
    return of_dims(
        node,
        [aligned(ir.example(x).shape, dims)],
        [dims],
        linear=frozenset([frozenset([0])]),
        pad_out=same_fill,
        emit=emit_expand,
    )


def emit_expand(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Expand to the local shape of the result."""
    return builder.call(aten.expand.default, (operands[0], list(results[0].local_shape(builder.mesh))))


def cut(node: fx.Node) -> Rule:
    """Make the rule of slice, select, split, chunk, narrow: the dim cannot be sharded unless all of it is kept."""
    (x,) = tensor_operands(node)
    shape, outs = tuple(ir.example(x).shape), result_shapes(node)
    dim = argument(node, "dim") % len(shape)
    before, after = numbered(shape)[:dim], numbered(shape)[dim + 1 :]
    operand = (*before, ("c",), *after)
    if name_of(node) == "slice" and outs[0] == shape:
        return of_dims(node, [operand], [operand], resize=_keep_whole_slice, **REARRANGED)
    parts = [[(f"o{k}",)] if len(out) == len(shape) else [] for k, out in enumerate(outs)]
    return of_dims(
        node,
        [operand],
        [(*before, *part, *after) for part in parts],
        whole=frozenset({"c", *(name for part in parts for (name,) in part)}),
        linear=frozenset([frozenset([0])]),
        pad_out=same_fill,
    )


def _keep_whole_slice(args: tuple, shape: tuple[int, ...]) -> tuple:
    """Rewrite the bounds of a slice that keeps all of a dim, so that they hold for any local size."""
    return (*args[:2], 0, 2**63 - 1, *args[4:]) if len(args) > 2 else args


def join(node: fx.Node) -> Rule:
    """Make the rule of cat and stack: the joined dim cannot be sharded."""
    operands, (out,) = tensor_operands(node), result_shapes(node)
    dim = argument(node, "dim") % len(out)
    before, after = numbered(out)[:dim], numbered(out)[dim + 1 :]
    parts = [[(f"c{k}",)] if ir.example(x).dim() == len(out) else [] for k, x in enumerate(operands)]
    return of_dims(
        node,
        [(*before, *part, *after) for part in parts],
        [(*before, ("j",), *after)],
        whole=frozenset({"j", *(name for part in parts for (name,) in part)}),
        linear=frozenset([frozenset(range(len(operands)))]),
        pad_out=same_fill,
    )


# All scores of a padded row may be -inf (a mask that is cast or added twice). Their softmax, NaN, would reach the
# weights as NaN times zero.
SOFTMAX = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax"})


def along_dim(node: fx.Node) -> Rule:
    """Make the rule of operators along a dim (cumsum, softmax, sort, roll, fft, ...): it cannot be sharded."""
    operands = tensor_operands(node)
    shape = tuple(ir.example(operands[0]).shape)
    dims = argument(node, "dim", argument(node, "dims"))
    scan_dims = {d % len(shape) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
    scan_dims = scan_dims or set(range(len(shape)))  # roll without dims uses all of them
    names = numbered(shape, ones=True)
    results = [
        [names[i] if n == shape[i] else (f"o{k}.{i}",) for i, n in enumerate(out)]
        for k, out in enumerate(result_shapes(node))
    ]
    rule = of_dims(node, [names for _ in operands], results, pad_safe={0: 0.0} if name_of(node) in SOFTMAX else {})
    return replace(rule, whole=frozenset(rule.sizes) - {f"d{i}" for i in range(len(shape)) if i not in scan_dims})


def diagonal(node: fx.Node) -> Rule:
    """Make the rule of a diagonal of two dims, which cannot be sharded, as a last dim."""
    (x,), arguments = tensor_operands(node), (*node.args[1:], *(0, 0, 1)[len(node.args) - 1 :])
    names = numbered(ir.example(x).shape, ones=True)
    pair = {d % len(names) for d in arguments[1:]}  # type: ignore[operator]
    return of_dims(
        node,
        [names],
        [(*(n for d, n in enumerate(names) if d not in pair), ("o",))],
        whole=frozenset({f"d{d}" for d in pair} | {"o"}),
        linear=frozenset([frozenset([0])]),
        pad_out=same_fill,
    )


def as_pairs(node: fx.Node) -> Rule:
    """Make the rule of view_as_complex and view_as_real, which remove or add a last dim of size 2."""
    (x,), (out,) = tensor_operands(node), result_shapes(node)
    names = numbered(min(ir.example(x).shape, out, key=len))
    dims, results = (names if n == len(names) else (*names, ("pair",)) for n in (ir.example(x).dim(), len(out)))
    first = frozenset([frozenset([0])])
    return of_dims(node, [dims], [results], whole=frozenset({"pair"}), linear=first, pad_out=zero_if_zero)


ALONG_DIM = """cumsum cumprod softmax _softmax log_softmax _log_softmax sort flip roll topk
logcumsumexp cummax cummin _fft_c2c _fft_c2r _fft_r2c"""
RULES: dict[str, RuleMaker] = {
    **dict.fromkeys("view reshape _unsafe_view flatten unflatten squeeze unsqueeze".split(), reshape),
    **dict.fromkeys("transpose permute t movedim moveaxis swapaxes mT numpy_T".split(), permute),
    "expand": expand,
    **dict.fromkeys("view_as_complex view_as_real".split(), as_pairs),
    **dict.fromkeys("slice select split split_with_sizes unbind".split(), cut),
    "diagonal": diagonal,
    **dict.fromkeys("cat stack".split(), join),
    **dict.fromkeys(ALONG_DIM.split(), along_dim),
}
