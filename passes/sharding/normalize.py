"""Rewrite a captured graph into operators that have rules, before placements are decided.

    cross_entropy_loss(x, y)      ->  cross_entropy_loss(x, y, reduction=sum) / (y != -100).sum()
    mean(x, [1])                  ->  sum(x, [1]) / 128
    linear(x, w, b)               ->  linear(x, w) + b

A sum can be partial, a mean cannot: the sum is divided once, by the logical count, after its reduction. If the
vocabulary may be sharded, cross-entropy becomes a max, a sum of exponentials and a look-up of one logit a row, so the
logits are never gathered. Operators without a rule are decomposed level by level; the operands of those that remain
without one are gathered, which the shard pass reports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from passes.context.attention import AttentionOp, heads_repeated
from passes.context.operators import OPERATORS
from passes.ir import ir
from passes.ir.mesh import WEIGHT_AXES, Mesh
from passes.ir.operators import argument, is_operator, is_random, name_of
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.rules import has_rule, tensor_operands
from passes.sharding import draws as drawing
from passes.sharding import norms
from passes.sharding.pieces import rejoin
from passes.sharding.random import dropout
from passes.torch_private import decomposition, tree_iter, tree_map_only
from passes.trace.editor import Editor, inline, replace_by

aten = torch.ops.aten
KEEPS_ORDER = frozenset(
    "unsqueeze squeeze view reshape _unsafe_view expand slice to _to_copy alias detach clone".split()
)
ALONG_A_DIM = frozenset(
    "softmax _softmax log_softmax _log_softmax sort topk flip cumsum cumprod cummax cummin logcumsumexp "
    "index_select gather scatter scatter_add transpose".split()
)
NONE, MEAN, SUM = 0, 1, 2  # aten's codes for `reduction`


def mean(x: Tensor, dim=None, keepdim: bool = False, *, dtype=None) -> Tensor:
    """Compute a mean as a sum over the logical count."""
    dims = range(x.dim()) if dim is None or dim == [] or not x.dim() else [dim] if isinstance(dim, int) else dim
    dims = list(dims)
    return x.sum(dims, keepdim, dtype=dtype) / math.prod(x.shape[d] for d in dims)


def linear_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute a linear layer whose bias is added after the sum is complete."""
    return F.linear(x, weight) + bias


def linear_of_vector(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer with one output, which has no dim."""
    return x.matmul(weight) if bias is None else x.matmul(weight) + bias


def convolution_bias(x: Tensor, weight: Tensor, bias: Tensor, *options: Any) -> Tensor:
    """Compute a convolution whose bias is added after the sum is complete."""
    return aten.convolution.default(x, weight, None, *options) + norms.per_channel(bias, x)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    """Compute addmm with the bias added after the sum is complete."""
    product = a @ b if alpha == 1 else alpha * (a @ b)
    if beta == 0:  # the bias may be uninitialized memory
        return product
    return product + (bias if beta == 1 else beta * bias)


def cross_entropy_summed(
    x: Tensor, y: Tensor, weight=None, reduction: int = MEAN, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Compute the mean cross-entropy over class ids as a sum and a count."""
    total = aten.cross_entropy_loss.default(x, y, None, SUM, ignore_index, label_smoothing)
    return total if reduction == SUM else total / (y != ignore_index).sum()


def cross_entropy_split(
    x: Tensor, y: Tensor, weight=None, reduction: int = MEAN, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Compute the cross-entropy of logits[n, c] from a max, a sum and one look-up a row; classes stay sharded."""
    keep = y != ignore_index
    highest = x.detach().amax(-1, keepdim=True)
    lse = (x - highest).exp().sum(-1).log() + highest.squeeze(-1)
    target = x.gather(-1, torch.where(keep, y, 0).unsqueeze(-1)).squeeze(-1)
    total = torch.where(keep, lse - target, 0.0).sum()
    return total if reduction == SUM else total / keep.sum()


def cross_entropy_general(
    x: Tensor, y: Tensor, weight=None, reduction: int = MEAN, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Compute cross-entropy of logits[n, c, ...] with class weights, smoothing, or probabilities y[n, c, ...]."""
    dim = min(x.dim() - 1, 1)
    logs, classes = x.log_softmax(dim), x.shape[dim]
    weights = None if weight is None else weight.view(-1, *[1] * (x.dim() - 1 - dim)).expand(x.shape)
    weighted = logs if weights is None else logs * weights
    if y.is_floating_point():
        losses = -(weighted * (y * (1 - label_smoothing) + label_smoothing / classes)).sum(dim)
        return losses if reduction == NONE else losses.sum() if reduction == SUM else losses.sum() / losses.numel()
    keep = y != ignore_index
    ids = torch.where(keep, y, 0).unsqueeze(dim)
    losses = (1 - label_smoothing) * weighted.gather(dim, ids).squeeze(dim)
    if label_smoothing:
        losses = losses + label_smoothing / classes * weighted.sum(dim)
    losses = torch.where(keep, -losses, 0.0)
    if reduction != MEAN:
        return losses if reduction == NONE else losses.sum()
    denominator = keep if weights is None else torch.where(keep, weights.gather(dim, ids).squeeze(dim), 0.0)
    return losses.sum() / denominator.sum()


def copied(over: Tensor, x: Tensor, non_blocking: bool = False) -> Tensor:
    """Return the value that `aten::copy`, which has no derivative, writes over the tensor `over`."""
    return x.to(over.dtype).expand(over.shape)


def slice_of_pairs(x: Tensor, part: Tensor, dim: int = 0, *at: Any) -> Tensor:
    """Overwrite a slice of complex numbers as pairs: `aten::slice_scatter` has a derivative only for real numbers."""
    over, written = (torch.view_as_real(value.resolve_conj()) for value in (x, part))
    return torch.view_as_complex(aten.slice_scatter.default(over, written, dim % x.dim(), *at))


def one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """Return int64 rows with one 1 each; the row of an id outside the classes is all zeros."""
    return (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).to(torch.int64)


def put_where(x: Tensor, indices: list[Tensor | None], value: Tensor, accumulate: bool = False) -> Tensor:
    """Write `value` where a mask of some dims is true: one number, or one for each entry of the dims after the mask."""
    ((at, mask),) = ((at, i) for at, i in enumerate(indices) if i is not None)
    after = x.dim() - at - mask.dim()
    value = value.reshape(()) if value.numel() == 1 else value
    return torch.where(mask.view(*mask.shape, *[1] * after), x + value if accumulate else value, x)


def repeat(x: Tensor, repeats: list[int]) -> Tensor:
    """Repeat every dim; the repeats are a major factor of its own. `repeats` may have more dims than x."""
    shape = (*[1] * (len(repeats) - x.dim()), *x.shape)
    pairs = [n for pair in zip(repeats, shape) for n in pair]
    sizes = [r * n for r, n in zip(repeats, shape)]
    result = x.reshape([n for size in shape for n in (1, size)]).expand(pairs).reshape(sizes)
    return result if result.is_contiguous() else result.clone(memory_format=torch.contiguous_format)


def mean_pool(x: Tensor, size: list[int]) -> Tensor:
    """Pool a full image into one pixel."""
    return x.mean(list(range(-len(size), 0)), keepdim=True)


def matmul_of_rows(x: Tensor, y: Tensor) -> Tensor:
    """Multiply each x[..., s, :, :] by the one matrix of y[..., 1, :, :] as rows; PyTorch would copy it for each s."""
    return (x.flatten(-3, -2) @ y.squeeze(-3)).unflatten(-2, x.shape[-3:-1])


def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply each matrix of weight[o, i, j] to x[..., i] and y[..., j]."""
    outs, inner, _ = weight.shape
    by_output = F.linear(x, weight.transpose(1, 2).reshape(-1, inner)).unflatten(-1, (outs, -1))
    product = (by_output * y.unsqueeze(-2)).sum(-1)
    return product if bias is None else product + bias


def circular_pad(x: Tensor, pad: list[int], mode: str, value: float | None = None) -> Tensor:
    """Pad each dim with its own end before it and its own beginning after it; a negative pad cuts off."""
    for d, (before, behind) in zip(range(x.dim() - 1, -1, -1), zip(pad[::2], pad[1::2])):
        mid = x.narrow(d, max(-before, 0), x.shape[d] + min(before, 0) + min(behind, 0))
        end, beginning = mid.narrow(d, mid.shape[d] - max(before, 0), max(before, 0)), mid.narrow(d, 0, max(behind, 0))
        x = torch.cat([part for part in (end, mid, beginning) if part.shape[d]], d) if before or behind else x
    return x


def index_own_rows(x: Tensor, indices: list[Tensor]) -> Tensor:
    """Compute x[rows, ids] with `rows` = 0, 1, 2, ... along dim 0 of the result: each row looks up its own ids."""
    rows, ids = indices
    n, *tail = torch.broadcast_shapes(rows.shape, ids.shape)
    if ids.dim() <= len(tail) or ids.shape[0] != n:
        return aten.index.Tensor(x, [None, ids.reshape(tail)])
    ids = torch.where(ids < 0, ids + x.shape[1], ids).expand(n, *tail).reshape(n, -1, *[1] * (x.dim() - 2))
    return x.gather(1, ids.expand(-1, -1, *x.shape[2:])).reshape(n, *tail, *x.shape[2:])


def gather_strided(offset: int, x: Tensor, size: list[int], stride: list[int], *_: Any, **__: Any) -> Tensor:
    """Gather entries of dense memory by their position from `offset` (as_strided); leading dims both share are kept."""
    base, shared = in_memory_order(x), 0
    while shared < min(len(size), base.dim()):
        reach = offset + 1 + sum((n - 1) * step for n, step in zip(size[shared + 1 :], stride[shared + 1 :]))
        is_shared = size[shared] == base.shape[shared] and (size[shared] == 1 or stride[shared] == base.stride(shared))
        if not is_shared or reach > base.stride(shared):
            break
        shared += 1
    flat, remaining = base.reshape(*base.shape[:shared], -1), len(size) - shared
    if not remaining:
        return flat.select(-1, offset)
    at = torch.full((), offset, device=x.device)
    for d, (n, step) in enumerate(zip(size[shared:], stride[shared:])):
        at = at + torch.arange(n, device=x.device).view(n, *[1] * (remaining - 1 - d)) * step
    return aten.index.Tensor(flat, [None] * shared + [at])


def entry_in_one_dim(op: Any, example: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator with a dim on tensors of no dims, as tensors of one entry; `example` has the results' shapes."""
    args, kwargs = tree_map_only(Tensor, lambda x: x if x.dim() else x.view(1), (args, kwargs))
    results, examples = op(*args, **kwargs), iter(tree_iter(example))
    return tree_map_only(Tensor, lambda x: x.reshape(next(examples).shape), results)


def in_memory_order(x: Tensor) -> Tensor:
    """Permute x so that its strides decrease."""
    return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))


def concatenate_nonempty(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenate the parts that are not empty: caches start empty, and with fewer dims than the parts added later."""
    nonempty = [part for part in parts if part.numel()]
    # later views rely on contiguous memory
    return torch.cat(nonempty, dim) if len(nonempty) > 1 else nonempty[0].contiguous()


def empty_constant(like: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return an empty tensor as a constant."""
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def split_as_select(x: Tensor, size: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Split a dim into equal pieces by indexing a new dim, so that the entries within a piece may be sharded."""
    parts = x.shape[dim] // size
    return tuple(x.unflatten(dim, (parts, size)).select(dim % x.dim(), i) for i in range(parts))


def take_every_nth(x: Tensor, dim: int, start: int | None, end: int | None, step: int) -> Tensor:
    """Take every n-th entry of a dim by indexing a new dim of n: x[..., ::2] of alternating gates and values."""
    return x.unflatten(dim, (-1, step)).select(dim % x.dim() + 1, start or 0)


def _plain_cross_entropy(node: fx.Node) -> bool:
    logits, target, *options = node.args
    return (
        ir.example(logits).dim() == 2
        and ir.example(target).dim() == 1
        and (not options or options[0] is None)
        and (len(options) < 2 or options[1] in (MEAN, SUM))
        and (len(options) < 4 or options[3] == 0.0)
    )


def _writes_by_mask(node: fx.Node) -> bool:
    """Return True if an index_put goes by a mask; raise Refused if its values depend on the number of true entries."""
    x, indices, value = (fx.map_arg(argument, ir.example) for argument in node.args[:3])
    present = [(at, i) for at, i in enumerate(indices) if i is not None]
    if not any(i.dtype is torch.bool for _, i in present):
        return False
    at, mask = present[0]
    if len(present) > 1 or value.numel() > 1 and value.dim() > x.dim() - at - mask.dim():
        raise ir.Refused(
            "normalize",
            node,
            f"{node.target} writes a value per true entry of a mask, whose number the data decides; use torch.where",
        )
    return True


def _partly_empty(node: fx.Node) -> bool:
    """Return True if some parts, but not all, are empty."""
    empty = [ir.example(part).numel() == 0 for part in node.args[0]]
    return any(empty) and not all(empty)


def _looks_up_own_rows(node: fx.Node) -> bool:
    """Return True if an index is each row's own number, with another index along the next dim."""
    x, indices = node.args
    if len(indices) != 2 or None in indices or len(rows := ir.example(x).shape) < 2 or rows[0] == 1:
        return False
    (n, *tail), is_row_number = ir.example(indices[0]).shape or (0,), counts_up(indices[0])
    return is_row_number and n == rows[0] and len(tail) + 1 >= ir.example(indices[1]).dim() and math.prod(tail) == 1


def counts_up(node: fx.Node) -> bool:
    """Return True if a node's entries, in order, are 0, 1, 2, ..."""
    while name_of(node) in KEEPS_ORDER:
        source = tensor_operands(node)[0]
        if ir.example(node).numel() != ir.example(source).numel():
            return False
        node = source
    return name_of(node) == "arange" and (argument(node, "start", 0), argument(node, "step", 1)) == (0, 1)


def _is_empty(node: fx.Node) -> bool:
    """Return True if an operator with tensor operands computes a tensor without entries."""
    result = ir.value(node)
    return isinstance(result, Tensor) and result.numel() == 0 and bool(tensor_operands(node))


def _is_equal_split(node: fx.Node) -> bool:
    x, size, *dim = node.args
    return isinstance(size, int) and ir.example(x).shape[dim[0] if dim else 0] % size == 0


def _takes_every_nth(node: fx.Node) -> bool:
    """Return True if a slice takes every n-th entry of a dim whose size n divides."""
    x, dim, start, _, step = (*node.args, *(0, 0, None, 1)[len(node.args) - 1 :])
    size = ir.example(x).shape[dim]
    return step > 1 and size % step == 0 and 0 <= (start or 0) < step and ir.example(node).shape[dim] * step == size


def _repeats_matrix(node: fx.Node) -> bool:
    """Return True if a matmul multiplies several matrices by the same one."""
    x, y = (ir.example(n).shape for n in node.args)
    return len(x) == len(y) > 2 and y[-3] == 1 < x[-3]


def _divides_by_zero(node: fx.Node) -> bool:
    """Return True if a norm of a row of zeros (as in padding) would be infinite or NaN."""
    eps = argument(node, "eps")
    return eps is not None and eps <= 0


def attention_written(node: fx.Node, record: AttentionOp, parts: int) -> Any:
    """Return the function to write an attention call as: as its record says, with key heads repeated for `parts`."""
    q, k = (ir.example(n) for n in node.args[:2])
    too_few = q.dim() > 2 and k.shape[-3] < min(parts, q.shape[-3])
    written = record.written(node)
    return heads_repeated(written or record.op) if too_few else written


# always written as these functions
REPLACED = {
    "_native_batch_norm_legit": norms.batch_norm_of_batch,
    "_native_batch_norm_legit_functional": norms.batch_norm_functional,
    "_native_batch_norm_legit_no_training": norms.batch_norm_given,
    "addmm": addmm,
    "batch_norm": norms.batch_norm,
    "bilinear": bilinear,
    "copy": copied,
    "mean": mean,
    "native_batch_norm": norms.batch_norm_functional,
    "repeat": repeat,
}

# written as these functions if they would divide by zero in padding
SAFE_NORMS = {"group_norm": norms.group_norm, "layer_norm": norms.layer_norm, "rms_norm": norms.rms_norm}


def strided(node: fx.Node) -> Any:
    """Return the function to write an `as_strided` as, which reads the tensor that its views lead to; raise Refused.

    An offset counts from the start of memory; without one, the tensor's own counts.
    """
    x = ir.example(node.args[0])  # type: ignore[arg-type]
    offset = argument(node, "storage_offset")
    size, stride = node.args[1:3]
    while name_of(node.args[0]) in VIEWS and ir.is_tensor(node.args[0].args[0]):  # type: ignore[union-attr]
        node.args = (node.args[0].args[0], *node.args[1:])  # type: ignore[union-attr]
    base = ir.example(node.args[0])  # type: ignore[arg-type]
    start = (x.storage_offset() if offset is None else offset) - base.storage_offset()
    last = start + sum((n - 1) * step for n, step in zip(size, stride))  # type: ignore[arg-type]
    is_inside = 0 <= start <= last < base.numel() <= ENTRIES and in_memory_order(base).is_contiguous()
    if is_inside:  # PyTorch gives no gradient to entries in the gaps of a view
        entries = torch.zeros(base.numel(), dtype=torch.bool)
        entries.as_strided(x.shape, x.stride(), x.storage_offset() - base.storage_offset()).fill_(True)
        is_inside = bool(entries.as_strided(size, stride, start).all())  # type: ignore[arg-type]
    if not is_inside:
        problem = "as_strided reads entries of memory that are not those of its operand"
        raise ir.Refused("normalize", node, f"{problem}; use slices and indices instead")
    return partial(gather_strided, start)


ENTRIES = 2**28  # most of a tensor that is read by its strides
VIEWS = frozenset(
    "alias detach view _unsafe_view slice select narrow transpose permute t squeeze unsqueeze expand".split()
)


def replacement(node: fx.Node, mesh: Mesh) -> Any:
    """Return the function to write the node as; None if its rule takes it unchanged."""
    name = name_of(node)
    if _is_empty(node):
        return partial(empty_constant, ir.example(node))
    split_vocabulary = any(axis in mesh.axes for axis in WEIGHT_AXES)
    if name in ALONG_A_DIM and not ir.example(node.args[0]).dim():
        return partial(entry_in_one_dim, node.target, ir.value(node))
    if name == "split" and mesh["tp"] > 1 and _is_equal_split(node):
        return split_as_select
    if name == "slice" and mesh["tp"] > 1 and _takes_every_nth(node):
        return take_every_nth
    if node.target in OPERATORS:
        return attention_written(node, OPERATORS[node.target], mesh["tp"])
    if name == "pad" and node.args[2:] and node.args[2] == "circular":
        return circular_pad
    if name in ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d") and set(node.args[1]) == {1}:  # type: ignore[arg-type]
        return mean_pool
    if name in SAFE_NORMS and _divides_by_zero(node):
        return SAFE_NORMS[name]
    if name in REPLACED:
        return REPLACED[name]
    if name == "index" and _looks_up_own_rows(node):
        return index_own_rows
    if name == "as_strided":
        return strided(node)
    if name == "cat" and _partly_empty(node):
        return concatenate_nonempty
    if name == "one_hot" and node.args[1:] and node.args[1] > 0:  # type: ignore[operator]
        return one_hot
    if name == "slice_scatter" and ir.example(node).is_complex():
        return slice_of_pairs
    if name == "index_put" and _writes_by_mask(node):
        return put_where
    if name == "matmul" and _repeats_matrix(node):
        return matmul_of_rows
    if name == "linear" and ir.example(node.args[1]).dim() == 1:
        return linear_of_vector
    if name == "linear" and len(node.args) == 3 and node.args[2] is not None:
        return linear_bias
    if name == "convolution" and node.args[2] is not None:
        return convolution_bias
    if name == "cross_entropy_loss" and _plain_cross_entropy(node):
        is_sum = len(node.args) > 3 and node.args[3] == SUM
        return cross_entropy_split if split_vocabulary else None if is_sum else cross_entropy_summed
    if name == "cross_entropy_loss":
        return cross_entropy_general
    return None if has_rule(node) else decomposition(node.target)


def drops_entries(node: fx.Node) -> bool:
    """Return True if the node is a dropout that is on."""
    return is_dropout(node) and argument(node, "train") is not False and node.args[1] != 0  # None means True


def is_dropout(node: fx.Node) -> bool:
    """Return True if the node is a dropout, on or off."""
    return name_of(node) in ("dropout", "native_dropout")


def key_random(program: ir.Program, ctx: ir.Context) -> ir.Program:
    """Make random operators functions of a `seed` input and each entry's index; raise Refused for unknown ones."""
    sites = [node for node in program.calls() if is_dropout(node) or is_random(node)]
    for node in sites:
        if not is_dropout(node) and drawing.seeded_form(node) is None:
            raise ir.Refused(
                "normalize",
                node,
                f"{node.target} draws random numbers that would differ by mesh; "
                f"use dropout outside of it, draw them in the data, or use one of {', '.join(drawing.seeded_names())}",
            )
    seed = seed_input(program, ctx) if any(drops_entries(node) or not is_dropout(node) for node in sites) else None
    for site, node in enumerate(sites):
        draws = drops_entries(node) or not is_dropout(node)
        new = key_node(node, seed, site, ctx) if seed is not None and draws else None
        value = node.args[0] if new is None else new
        replace_by(node, (value,) if name_of(node) == "native_dropout" else value)
    if seed is None:
        return program
    return replace(program, inputs=(*program.inputs, ir.Input("seed", "scalar", Spec(()))))


def key_node(node: fx.Node, seed: fx.Node, site: int, ctx: ir.Context) -> fx.Node:
    """Insert a random operator's keyed form before it, and return the result."""
    edit = Editor.before(node, ctx)
    if is_dropout(node):
        return edit.trace(dropout, *node.args[:2], seed, site)
    return edit.graft(*edit.body(drawing.seeded_form(node), (seed, site, *node.args), node.kwargs))[1]


def seed_input(program: ir.Program, ctx: ir.Context) -> fx.Node:
    """Add a 0-d int64 placeholder for the seed."""
    with program.graph.inserting_after(program.placeholders()[-1]):
        seed = program.graph.placeholder("seed")
    with ctx.fake_mode:
        device = ir.example(program.placeholders()[0]).device
        ir.set_value(seed, torch.zeros((), dtype=torch.int64, device=device))
    return seed


@dataclass(frozen=True)
class Normalize(ir.Pass):
    """Write means, biases, losses and operators without a rule in operators that have one."""

    name = "normalize"
    takes = (Stage.CAPTURED,)
    gives = Stage.NORMALIZED

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        counts = {"cat": joined} if (joined := rejoin(program, ctx)) else {}
        program = key_random(program, ctx)
        final: set[fx.Node] = set()  # calls of an operator in its own definition
        queue = list(program.calls())
        while queue:
            node = queue.pop(0)
            if not is_operator(node) or node in final:
                continue
            fn = replacement(node, program.mesh)
            if fn is None:
                continue
            counts[name_of(node)] = counts.get(name_of(node), 0) + 1
            target, new = node.target, inline(node, fn, ctx)
            final |= {n for n in new if n.target is target}
            queue = new + queue
        program.graph.eliminate_dead_code()
        program.module.recompile()
        return program, ir.Report(counts)
