"""Operators over image dims: convolutions, pooling, padding, upsampling. Batch rows and channels can be sharded."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from passes.ir import ir
from passes.ir.spec import Spec
from passes.rules.base import (
    Names,
    Rule,
    RuleMaker,
    from_text,
    numbered,
    of_dims,
    result_shapes,
    same_fill,
    tensor_operands,
    zero_if_zero,
)
from passes.trace.builder import Builder

TABLE = {
    "col2im": "...(ck)l -> ...chw; whole k l h w; linear 0",
    "grid_sampler_2d": "nchw, nxyk -> ncxy; whole h w k",
    "grid_sampler_3d": "nchwd, nxyzk -> ncxyz; whole h w d k",
    "im2col": "...chw -> ...(ck)l; whole h w k l; linear 0",
}
# number of image dims -> (dims read, dims written, factors that cannot be sharded)
WINDOW = {1: ("...h", "...x", "h x"), 2: ("...hw", "...xy", "h w x y"), 3: ("...hwd", "...xyz", "h w d x y z")}
LINEAR = "{0} -> {1}; whole {2}; linear 0"
LINEAR_BY_OPERAND = "{0} -> {1}; whole {2}"  # linear too, but the backward takes the operand, for its shape
VALUES_AND_INDICES = "{0} -> {1}, {1}; whole {2}"
VALUES_BY_INDEX = "{0}, {0} -> {1}; whole {2}"
WINDOWED = {
    1: {
        LINEAR: "upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d",
        LINEAR_BY_OPERAND: "reflection_pad1d replication_pad1d",
    },
    2: {
        LINEAR: """upsample_bilinear2d upsample_bicubic2d upsample_nearest2d _upsample_bicubic2d_aa
            _upsample_bilinear2d_aa _upsample_nearest_exact2d""",
        LINEAR_BY_OPERAND: "avg_pool2d _adaptive_avg_pool2d reflection_pad2d replication_pad2d",
        VALUES_AND_INDICES: "adaptive_max_pool2d max_pool2d_with_indices",
        VALUES_BY_INDEX: "max_unpool2d",
    },
    3: {
        LINEAR: "upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d",
        LINEAR_BY_OPERAND: "avg_pool3d _adaptive_avg_pool3d reflection_pad3d replication_pad3d",
        VALUES_AND_INDICES: "adaptive_max_pool3d max_pool3d_with_indices",
        VALUES_BY_INDEX: "max_unpool3d",
    },
}


def convolution(node: fx.Node) -> Rule:
    """Make the rule of x[n, (g c), ...] * w[(g o), c, ...] -> [n, (g o), ...], or transposed with w[(g c), o, ...].

    g counts groups. With a bias, c cannot be sharded (normalize splits the bias off).
    """
    operands = tensor_operands(node)
    transposed, groups = node.args[6], node.args[8]
    (rows, channels, *image), kernel = (list(ir.example(n).shape) for n in operands[:2])
    ((_, outs, *outputs),) = result_shapes(node)
    sizes = {"n": rows, "g": groups, "c": channels // groups, "o": outs // groups}  # type: ignore[operator]
    spatial = (("h", image), ("k", kernel[2:]), ("x", outputs))
    sizes |= {f"{tag}{i}": n for tag, extent in spatial for i, n in enumerate(extent)}

    def dims(*names: str, tag: str) -> tuple[Names, ...]:
        dim_names = (*names, *(f"{tag}{i}" for i in range(len(image))))
        return tuple(tuple(f for f in dim if sizes.get(f, 0) > 1) for dim in (name.split() for name in dim_names))

    weight = dims("g c", "o", tag="k") if transposed else dims("g o", "c", tag="k")
    bias = [(dims("g o", tag="")[0],)] if len(operands) > 2 else []
    full = {f"{tag}{i}" for tag, extent in spatial for i in range(len(extent))}
    return Rule(
        (dims("n", "g c", tag="h"), weight, *bias),
        (dims("n", "g o", tag="x"),),
        {f: n for f, n in sizes.items() if n > 1},
        {"c": "sum"},
        whole=frozenset(full | ({"c"} if bias else set())),
        pad_out=zero_if_zero if not bias else lambda fills: None,
        resize=_local_groups,
    )


def _local_groups(args: tuple, shape: tuple[int, ...]) -> tuple:
    """Set the number of groups to that of the local shard."""
    x, weight = (ir.example(n).shape for n in args[:2])
    return (*args[:8], (shape if args[6] else x)[1] // weight[1])


def constant_pad(node: fx.Node) -> Rule:
    """Make the rule of adding or cutting entries at the ends of dims: those dims cannot be sharded."""
    (x,) = tensor_operands(node)
    shape, pad = tuple(ir.example(x).shape), node.args[1]
    value = node.args[2] if len(node.args) > 2 else 0
    changed = {len(shape) - 1 - i // 2 for i, n in enumerate(pad) if n}  # type: ignore[arg-type]
    names = numbered(shape, ones=True)
    return of_dims(
        node,
        [names],
        [[(f"o{d}",) if d in changed else n for d, n in enumerate(names)]],
        whole=frozenset(f"{tag}{d}" for d in changed for tag in "do"),
        linear=frozenset([frozenset([0])]) if value == 0 else frozenset(),
        pad_out=lambda fills: same_fill([*fills, float(value)]),  # type: ignore[arg-type]
    )


def windows(node: fx.Node) -> Rule:
    """Make the rule of Tensor.unfold: windows of a dim, which cannot be sharded, become a last dim."""
    (x,) = tensor_operands(node)
    names = numbered(ir.example(x).shape, ones=True)
    dim = node.args[1] % len(names)  # type: ignore[operator]
    return of_dims(
        node,
        [names],
        [(*(("o",) if d == dim else n for d, n in enumerate(names)), ("k",))],
        whole=frozenset({f"d{dim}", "o", "k"}),
        linear=frozenset([frozenset([0])]),
        pad_out=same_fill,
    )


def group_norm(node: fx.Node) -> Rule:
    """Make the rule of x[n, (g c), ...] normalized in each of g groups, weight and bias [(g c)]: g can be sharded."""
    x, *weights = tensor_operands(node)
    shape, groups = tuple(ir.example(x).shape), node.args[1]
    group_size = shape[1] // groups  # type: ignore[operator]
    sizes = {"n": shape[0], "g": groups, "c": group_size} | {f"h{i}": n for i, n in enumerate(shape[2:])}
    channels = tuple(f for f in "gc" if sizes[f] > 1)  # type: ignore[operator]
    dims = (("n",), channels, *((f"h{i}",) for i in range(len(shape) - 2)))
    return Rule(
        (dims, *((channels,) for _ in weights)),
        (dims,),
        sizes,  # type: ignore[arg-type]
        whole=frozenset(sizes) - {"n", "g"},
        resize=lambda args, local: (args[0], local[1] // group_size, *args[2:]),
    )


def emit_contiguous(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Call the operator on contiguous operands: its backward takes views of them."""
    contiguous = [x if ir.example(x).is_contiguous() else builder.trace(torch.clone, x) for x in operands]
    return builder.call(node.target, (*contiguous, *node.args[len(operands) :]), node.kwargs)


def require_contiguous(make: RuleMaker) -> RuleMaker:
    """Wrap a rule for an operator that takes contiguous operands only."""
    return lambda node: replace(make(node), emit=emit_contiguous)


RULES: dict[str, RuleMaker] = {name: from_text(text) for name, text in TABLE.items()} | {
    "constant_pad_nd": constant_pad,
    "convolution": convolution,
    "group_norm": group_norm,
    "unfold": windows,
}
for _n, _lines in WINDOWED.items():
    for _line, _names in _lines.items():
        _make = from_text(_line.format(*WINDOW[_n]))
        RULES |= dict.fromkeys(_names.split(), require_contiguous(_make) if _line is VALUES_BY_INDEX else _make)
