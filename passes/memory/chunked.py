"""Head and cross-entropy as one operator that takes tokens in chunks: only one chunk's logits exist at a time.

    total = ct::linear_cross_entropy(hidden[n, d], weight[c, d], labels[n], bias[c])     summed over trainable tokens
becomes, with a rank's own tokens and, if an axis shards the vocabulary, its own classes,
    total, dhidden, dweight, dbias = local::linear_cross_entropy(hidden, weight, labels, ids, bias)

If a sum is scaled afterwards, its gradient is scaled by the same factor. So gradients are computed with the loss, while
a chunk's logits exist: nothing is computed twice and the backward is a multiplication (Liger, arXiv 2410.10989). Ranks
that share the classes gather one number per token in each chunk; each rank has one term of the sum. The chunks' terms
of the weight's gradient are added in fp32 or wider. The operator stays one node until the program is finished.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, register_flop_formula

from passes.ir import ir
from passes.ir.layout import entries
from passes.ir.spec import Factor, Spec
from passes.ops import reshard
from passes.rules.base import EMITTERS
from passes.rules.losses import LINEAR_CROSS_ENTROPY
from passes.trace.builder import Builder
from passes.trace.functions import define, remember

Chunk = Callable[..., Any]
Step = tuple[Tensor, Callable[[Tensor], Tensor]]  # a result, and a function from its gradient to the operand's


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses are computed and gradients added: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def cast(x: Tensor, name: str) -> Step:
    """Apply the step `to float32`."""
    return x.to(getattr(torch, name)), lambda gradient: gradient.to(x.dtype)


def multiply(x: Tensor, number: str) -> Step:
    """Apply the step `mul 0.5`."""
    return x * float(number), lambda gradient: gradient * float(number)


def divide(x: Tensor, number: str) -> Step:
    """Apply the step `div 30.0`."""
    return x / float(number), lambda gradient: gradient / float(number)


def tanh(x: Tensor, _: str) -> Step:
    """Apply the step `tanh`."""
    y = x.tanh()
    return y, lambda gradient: gradient * (1 - y * y)


STEPS: dict[str, Callable[[Tensor, str], Step]] = {"to": cast, "mul": multiply, "div": divide, "tanh": tanh}


# ---- the computation of a rank -----------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """The steps `between` projection and loss, the `ignored` label, and the number of `chunks`.

    The ranks of `axes`, given with their sizes, share the classes; with `padded`, padding classes have the id -1.
    `classes` is the number of all, needed where labels are.
    """

    between: tuple[str, ...]
    ignored: int
    chunks: int
    axes: tuple[tuple[str, int], ...] = ()
    padded: bool = False
    classes: int = 0

    def run(
        self, chunk: Chunk, hidden: Tensor, weight: Tensor, labels: Tensor, ids: Tensor, *bias: Tensor
    ) -> list[Tensor]:
        """Return a rank's term of the sum and its gradients.

        Hidden[n, d], weight[c, d], labels i64[n], ids i64[c], bias[c]. The term is a scalar in fp32 or wider, as are
        the gradients of weight and bias; that of hidden has its dtype. `chunk` is called for each chunk, which has its
        own memory, so that all calls are equal.
        """
        dtype = loss_dtype(hidden.dtype, self.between)
        sums = [torch.zeros((), dtype=dtype, device=hidden.device)]
        sums += [torch.zeros_like(operand, dtype=dtype) for operand in (weight, *bias)]
        along_hidden, total, *along_others = add_up(chunk, self.split(hidden, labels), sums, ids, weight, *bias)
        return [total, along_hidden, *along_others]

    def split(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Split tensors into chunks, each with its own memory, and return those of each chunk."""
        size = -(-len(tensors[0]) // self.chunks)
        return [*zip(*([part.clone() for part in tensor.split(size)] for tensor in tensors))]

    def chunk(self, x: Tensor, y: Tensor, *sums_and_operands: Tensor) -> list[Tensor]:
        """Return the gradient of x[m, d], and the running sums of losses and of gradients of weight and bias."""
        count = len(sums_and_operands) // 2
        sums, (ids, weight, *bias) = sums_and_operands[:count], sums_and_operands[count:]
        value, undo = self.values(x, ids, weight, *bias)
        lse = self.lse_over_ranks(value.logsumexp(1), y)
        counts, hit = self.match_labels(y, ids)
        loss = torch.where(counts, lse, 0.0).sum() / self.shares - torch.where(hit, value, 0.0).sum()
        along, *terms = self.along(self.slope(value, lse, counts, hit), undo, x, weight, *bias)
        return [along, *(before + term for before, term in zip(sums, (loss, *terms), strict=True))]

    @property
    def shares(self) -> int:
        """The number of ranks that have the same lse."""
        return math.prod(parts for _, parts in self.axes)

    def values(
        self, x: Tensor, ids: Tensor, weight: Tensor, *bias: Tensor
    ) -> tuple[Tensor, list[Callable[[Tensor], Tensor]]]:
        """Return the loss's input, [m, c] in fp32 or wider, and the functions that map its gradient back."""
        logits = torch.addmm(*bias, x, weight.t()) if bias else x.mm(weight.t())
        value, undo = self.apply_steps(logits)
        if self.padded:
            value = torch.where(ids >= 0, value, -math.inf)
        return value, undo

    def match_labels(self, y: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return True for each trainable token, [m], and for the class that is each one's label, [m, c]."""
        counts = y != self.ignored
        return counts, (y.unsqueeze(1) == ids) & counts.unsqueeze(1)

    def slope(self, value: Tensor, lse: Tensor, counts: Tensor, hit: Tensor) -> Tensor:
        """Return the gradient of each token's loss with respect to its input, [m, c]."""
        slope = torch.where(counts.unsqueeze(1), (value - lse.unsqueeze(1)).exp(), 0.0)
        return slope - hit.to(value.dtype)

    def along(
        self, slope: Tensor, undo: list[Callable[[Tensor], Tensor]], x: Tensor, weight: Tensor, *bias: Tensor
    ) -> list[Tensor]:
        """Return the gradients of x, weight and bias, from that of the loss's input."""
        dtype = slope.dtype
        for back in reversed(undo):
            slope = back(slope)
        return [slope.mm(weight), slope.t().mm(x), *(slope.sum(0, dtype=dtype) for _ in bias)]

    def apply_steps(self, logits: Tensor) -> tuple[Tensor, list[Callable[[Tensor], Tensor]]]:
        """Return the loss's input in fp32 or wider, and the functions that map its gradient back, in order."""
        value, undo = logits, []
        for step in (*self.between, f"to {name_of_dtype(loss_dtype(logits.dtype, self.between))}"):
            name, _, argument = step.partition(" ")
            value, back = STEPS[name](value, argument)
            undo.append(back)
        return value, undo

    def lse_over_ranks(self, lse: Tensor, y: Tensor | None = None) -> Tensor:
        """Return log sum exp[m] over the classes of all ranks, from that over the rank's own.

        It is NaN where the label y[m] is no class, and not the ignored one.
        """
        for axis, parts in self.axes:
            gathered = reshard.all_gather(lse.unsqueeze(0), 0, axis, parts, parts, lse.dtype, None)
            lse = gathered.logsumexp(0)
        return lse if y is None else torch.where((y == self.ignored) | (y >= 0) & (y < self.classes), lse, math.nan)


def add_up(chunk: Chunk, parts: Iterable[Iterable[Tensor]], sums: list[Tensor], *operands: Tensor) -> list[Tensor]:
    """Return the joined first results of `chunk`, which is called for each part, and the sums that it continues."""
    joined = []
    for tensors in parts:
        first, *sums = chunk(*tensors, *sums, *operands)
        joined.append(first)
    return [torch.cat(joined), *sums]


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def loss_dtype(dtype: torch.dtype, between: tuple[str, ...]) -> torch.dtype:
    """Return the dtype of the loss if logits are made in `dtype`."""
    casts = [step.partition(" ")[2] for step in between if step.startswith("to ")]
    return wide_dtype(getattr(torch, casts[-1]) if casts else dtype)


# ---- the operator of the global program --------------------------------------------------------------

library = torch.library.Library("ct", "FRAGMENT")
SCHEMA = "(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, str[] between, int ignored, int chunks) -> Tensor"


def define_global(name: str, schema: str, reference: Callable[..., Tensor]) -> Any:
    """Define the operator `name`, which `Shard` replaces; the verifier runs `reference`, in plain PyTorch."""
    unqualified = name.removeprefix("ct::")
    library.define(unqualified + schema)
    library.impl(unqualified, reference, "CompositeImplicitAutograd")
    return getattr(torch.ops.ct, unqualified).default


def losses(
    reduction: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    between: Sequence[str],
    ignored: int,
    chunks: int,
) -> Tensor:
    """Return the cross-entropies, from all logits at once."""
    value, _ = Head(tuple(between), ignored, chunks).apply_steps(F.linear(hidden, weight, bias))
    return F.cross_entropy(value, labels, ignore_index=ignored, reduction=reduction)


linear_cross_entropy = define_global(LINEAR_CROSS_ENTROPY, SCHEMA, partial(losses, "sum"))


# ---- the operators of a rank -------------------------------------------------------------------------


def local_operator(head: Head, biased: bool) -> Any:
    """Define `local::linear_cross_entropy(hidden, weight, labels, ids[, bias]) -> (sum, dhidden, dweight[, dbias])`."""
    counts = (4 + biased, 3 + biased), (6 + 2 * biased, 3 + biased)
    op = in_chunks("linear_cross_entropy", head.run, head.chunk, *counts)

    def setup(ctx: Any, inputs: tuple, output: tuple) -> None:
        hidden, weight, _, _, *bias = inputs
        ctx.save_for_backward(*output[1:])
        ctx.dtypes = [x.dtype for x in (hidden, weight, *bias)]

    def differentiate(ctx: Any, gradient: Tensor, *_: Any) -> tuple:
        hidden, weight, *bias = ((gradient * g).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes))
        return hidden, weight, None, None, *bias

    torch.library.register_autograd(op.name().replace(".default", ""), differentiate, setup_context=setup)
    count(op, flops)
    return op


def in_chunks(name: str, run: Chunk, chunk: Chunk, counts: tuple[int, int], chunk_counts: tuple[int, int]) -> Any:
    """Define an operator that calls another one for each chunk; `counts` are numbers of tensors and results."""
    part = define("local", f"{name}_chunk", chunk, *chunk_counts)
    remember(part, chunk, communicates=True)
    body = partial(run, part)
    op = define("local", name, body, *counts)
    remember(op, body, communicates=True)
    return op


def count(op: Any, formula: Callable[..., int]) -> None:
    """Register an operator's FLOPs formula."""
    if op.overloadpacket not in flop_registry:
        register_flop_formula(op.overloadpacket)(formula)


def flops(hidden: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of the head's forward; those of its gradients are counted once the operator is written out."""
    return 2 * math.prod(hidden) * weight[0]


def class_ids(
    builder: Builder, factor: Factor, device: torch.device
) -> tuple[fx.Node, tuple[tuple[str, int], ...], bool]:
    """Insert a rank's class ids, i64[c], -1 for padding, from the dim of classes.

    Return them, the axes whose ranks share the classes, with sizes, and True if some classes are padding.
    """
    padded, at = factor.padded(builder.mesh), builder.at(factor)

    def ids(*places: Tensor) -> Tensor:
        index, valid = entries(factor, builder.mesh, dict(zip(at, places)), device)
        return torch.where(valid, index, -1) if padded else index

    axes = tuple((axis, builder.mesh[axis]) for axis in factor.axes)
    return builder.trace(ids, *at.values()), axes, padded


def emit(
    kind: type[Head],
    local: Callable[..., Any],
    builder: Builder,
    node: fx.Node,
    operands: list[fx.Node],
    specs: list[Spec],
    results: list[Spec],
) -> fx.Node:
    """Insert a head's `local` operator and return its first result; padding tokens get the ignored label."""
    hidden, weight, labels, *bias = operands
    between, ignored, chunks = node.args[4:]
    labels = builder.fill_padding(labels, specs[2], float(ignored))  # type: ignore[arg-type]
    (factor,) = specs[1].dims[0]
    numbers, axes, padded = class_ids(builder, factor, ir.example(weight).device)
    key = kind(tuple(between), ignored, chunks, axes, padded, factor.size), bool(bias)  # type: ignore[arg-type]
    if key not in builder.operators:
        builder.operators[key] = local(*key)
    outputs = builder.call(builder.operators[key], (hidden, weight, labels, numbers, *bias))
    return builder.call(operator.getitem, (outputs, 0))


EMITTERS[LINEAR_CROSS_ENTROPY] = partial(emit, Head, local_operator)
