"""Operators that rearrange, repeat, cut or join entries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from passes.ir import ir
from passes.ir.operators import argument, name_of
from passes.ir.spec import Spec
from passes.rules.base import Names, Rule, RuleMaker, result_shapes, same_fill, tensor_operands, zero_if_zero
from passes.trace.builder import Builder

aten = torch.ops.aten


def split_shapes(a: Sequence[int], b: Sequence[int]) -> tuple[list[Names], list[Names], dict[str, int]]:
    """Return the dims of two shapes of equal count in common factors, major to minor, and the factors' sizes."""
    dims: tuple[list[list[str]], list[list[str]]] = ([[] for _ in a], [[] for _ in b])
    sizes: dict[str, int] = {}
    i = j = 0
    left, right = (a[0] if a else 1), (b[0] if b else 1)
    while i < len(a) and j < len(b):
        if left == 1 or right == 1:
            if left == 1:
                i += 1
                left = a[i] if i < len(a) else 1
            else:
                j += 1
                right = b[j] if j < len(b) else 1
            continue
        size = math.gcd(left, right)
        if size == min(left, right):
            name = f"f{len(sizes)}"
            sizes[name] = size
            dims[0][i].append(name)
            dims[1][j].append(name)
            left, right = left // size, right // size
            continue
        return _fused_tail(a, b, dims, sizes, i, j)
    return [tuple(d) for d in dims[0]], [tuple(d) for d in dims[1]], sizes


def _fused_tail(a, b, dims, sizes, i, j):
    """Give the remaining dims, which share no factors, separate factors that cannot be sharded."""
    for side, shape, start, tag in ((0, a, i, "x"), (1, b, j, "y")):
        for k in range(start, len(shape)):
            product = math.prod(sizes[n] for n in dims[side][k])
            if shape[k] // product > 1:
                sizes[f"{tag}{k}!"] = shape[k] // product
                dims[side][k].append(f"{tag}{k}!")
    return [tuple(d) for d in dims[0]], [tuple(d) for d in dims[1]], sizes


def _rearrangement(dims: Sequence[Names], out: Sequence[Names], sizes: dict[str, int], **options) -> Rule:
    full = frozenset(name for name in sizes if name.endswith("!"))
    return Rule(
        (tuple(dims),),
        (tuple(out),),
        sizes,
        whole=full | options.pop("whole", frozenset()),
        linear=frozenset([frozenset([0])]),
        pad_out=same_fill,
        moves=True,
        **options,
    )


def reshape(node: fx.Node) -> Rule:
    """Make the rule of view, reshape, flatten, squeeze, unsqueeze: the same entries in the same order."""
    (x,), (out,) = tensor_operands(node), result_shapes(node)
    if ir.example(x).dtype != ir.example(node).dtype:
        return reinterpretation(node)
    dims, out_dims, sizes = split_shapes(ir.example(x).shape, out)
    return _rearrangement(dims, out_dims, sizes, emit=emit_reshape)


def reinterpretation(node: fx.Node) -> Rule:
    """Make the rule of a view of the same bits in another dtype: if its width differs, the last dim is whole."""
    (x,), (out,) = tensor_operands(node), result_shapes(node)
    shape = tuple(ir.example(x).shape)
    names: list[Names] = [(f"d{i}",) for i in range(len(shape))]
    changed = len(shape) > 0 and shape[-1] != out[-1]
    result = [*names[:-1], ("o",)] if changed else names
    sizes = {f"d{i}": n for i, n in enumerate(shape)} | ({"o": out[-1]} if changed else {})
    whole = frozenset({f"d{len(shape) - 1}", "o"}) if changed else frozenset()
    return Rule((tuple(names),), (tuple(result),), sizes, whole=whole, pad_safe={0: 0.0}, pad_out=zero_if_positive_zero)


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
    shape = tuple(ir.example(x).shape)
    marks = torch.empty([i + 2 for i in range(len(shape))], device="meta")
    order = [n - 2 for n in node.target(marks, *node.args[1:], **node.kwargs).shape]  # type: ignore[operator]
    names: list[Names] = [(f"d{i}",) if n != 1 else () for i, n in enumerate(shape)]
    return _rearrangement(names, [names[i] for i in order], {f"d{i}": n for i, n in enumerate(shape) if n != 1})


def expand(node: fx.Node) -> Rule:
    """Make the rule of expand: new leading dims and dims of size 1 are repeated; each rank repeats its own share."""
    (x,), (out,) = tensor_operands(node), result_shapes(node)
    shape = tuple(ir.example(x).shape)
    lead = len(out) - len(shape)
    dims = [(f"d{lead + i}",) if n != 1 else () for i, n in enumerate(shape)]
    sizes = {f"d{i}": n for i, n in enumerate(out) if n != 1}
    rule = _rearrangement(dims, [(f"d{i}",) if n != 1 else () for i, n in enumerate(out)], sizes, emit=emit_expand)
    return Rule(**{**rule.__dict__, "moves": False})


def emit_expand(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Expand to the local shape of the result."""
    return builder.call(aten.expand.default, (operands[0], list(results[0].local_shape(builder.mesh))))


def cut(node: fx.Node) -> Rule:
    """Make the rule of slice, select, split, chunk, narrow: the dim cannot be sharded unless all of it is kept."""
    (x,) = tensor_operands(node)
    shape, outs = tuple(ir.example(x).shape), result_shapes(node)
    removed_dims = len(shape) - len(outs[0])
    dim = argument(node, "dim") % len(shape)
    names: list[Names] = [(f"d{i}",) if n != 1 or i == dim else () for i, n in enumerate(shape)]
    sizes = {f"d{i}": n for i, n in enumerate(shape) if names[i]}
    results, full = [], set()
    for k, out in enumerate(outs):
        if removed_dims:
            results.append(tuple(n for i, n in enumerate(names) if i != dim))
        elif out[dim] == shape[dim] and name_of(node) == "slice":
            return _rearrangement(names, names, sizes, resize=_keep_whole_slice)
        else:
            sizes[f"o{k}"] = out[dim]
            full.add(f"o{k}")
            results.append(tuple((f"o{k}",) if i == dim else n for i, n in enumerate(names)))
        full.add(f"d{dim}")
    return Rule(
        (tuple(names),),
        tuple(results),
        sizes,
        whole=frozenset(full),
        linear=frozenset([frozenset([0])]),
        pad_out=same_fill,
    )


def _keep_whole_slice(args: tuple, shape: tuple[int, ...]) -> tuple:
    """Rewrite the bounds of a slice that keeps all of a dim, so that they hold for any local size."""
    return (*args[:2], 0, 2**63 - 1, *args[4:]) if len(args) > 2 else args


def join(node: fx.Node) -> Rule:
    """Make the rule of cat and stack: the joined dim cannot be sharded."""
    operands, (out,) = tensor_operands(node), result_shapes(node)
    rank = len(out)
    dim = argument(node, "dim") % rank
    is_stack = ir.example(operands[0]).dim() < rank
    sizes = {f"d{i}": n for i, n in enumerate(out) if i != dim and n != 1} | {"j": out[dim]}
    names: list[Names] = [("j",) if i == dim else (f"d{i}",) if n != 1 else () for i, n in enumerate(out)]
    dims, full = [], {"j"}
    for k, operand in enumerate(operands):
        if is_stack:
            dims.append(tuple(n for i, n in enumerate(names) if i != dim))
            continue
        sizes[f"c{k}"] = ir.example(operand).shape[dim]
        full.add(f"c{k}")
        dims.append(tuple((f"c{k}",) if i == dim else n for i, n in enumerate(names)))
    return Rule(
        tuple(dims),
        (tuple(names),),
        sizes,
        whole=frozenset(full),
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
    names = tuple((f"d{i}",) for i in range(len(shape)))
    sizes = {f"d{i}": n for i, n in enumerate(shape)}
    results = []
    for k, out in enumerate(result_shapes(node)):
        changed = {i for i in range(len(shape)) if out[i] != shape[i]}
        sizes |= {f"o{k}.{i}": out[i] for i in changed}
        results.append(tuple((f"o{k}.{i}",) if i in changed else n for i, n in enumerate(names)))
    return Rule(
        tuple(names for _ in operands),
        tuple(results),
        sizes,
        whole=frozenset([f"d{i}" for i in scan_dims] + [n for n in sizes if n.startswith("o")]),
        pad_safe={0: 0.0} if name_of(node) in SOFTMAX else {},
    )


def diagonal(node: fx.Node) -> Rule:
    """Make the rule of a diagonal of two dims, which cannot be sharded, as a last dim."""
    (x,), (out,) = tensor_operands(node), result_shapes(node)
    shape, arguments = tuple(ir.example(x).shape), (*node.args[1:], *(0, 0, 1)[len(node.args) - 1 :])
    pair = {d % len(shape) for d in arguments[1:]}  # type: ignore[operator]
    names = tuple((f"d{d}",) for d in range(len(shape)))
    return Rule(
        (names,),
        ((*(n for d, n in enumerate(names) if d not in pair), ("o",)),),
        {f"d{d}": n for d, n in enumerate(shape)} | {"o": out[-1]},
        whole=frozenset({f"d{d}" for d in pair} | {"o"}),
        linear=frozenset([frozenset([0])]),
        pad_out=same_fill,
    )


def as_pairs(node: fx.Node) -> Rule:
    """Make the rule of view_as_complex and view_as_real, which remove or add a last dim of size 2."""
    (x,), (out,) = tensor_operands(node), result_shapes(node)
    shape = tuple(ir.example(x).shape)
    longer = max(shape, out, key=len)
    names: list[Names] = [(f"d{i}",) if n != 1 else () for i, n in enumerate(longer[:-1])]
    dims, results = (names if len(s) < len(longer) else [*names, ("pair",)] for s in (shape, out))
    sizes = {f"d{i}": n for i, n in enumerate(longer[:-1]) if n != 1} | {"pair": 2}
    first = frozenset([frozenset([0])])
    return Rule((tuple(dims),), (tuple(results),), sizes, whole=frozenset({"pair"}), linear=first, pad_out=zero_if_zero)


def rules() -> dict[str, RuleMaker]:
    """Return operator name -> rule, for views, cuts, joins and scans."""
    table: dict[str, RuleMaker] = {}
    table |= dict.fromkeys("view reshape _unsafe_view flatten unflatten squeeze unsqueeze".split(), reshape)
    table |= dict.fromkeys("transpose permute t movedim moveaxis swapaxes mT numpy_T".split(), permute)
    table |= dict.fromkeys("expand".split(), expand)
    table |= dict.fromkeys("view_as_complex view_as_real".split(), as_pairs)
    table |= dict.fromkeys("slice select split split_with_sizes unbind".split(), cut)
    table |= {"diagonal": diagonal}
    table |= dict.fromkeys("cat stack".split(), join)
    table |= dict.fromkeys(
        """cumsum cumprod softmax _softmax log_softmax _log_softmax sort flip roll topk
                              logcumsumexp cummax cummin _fft_c2c _fft_c2r _fft_r2c""".split(),
        along_dim,
    )
    return table
