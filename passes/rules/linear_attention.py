"""Linear attention and short convolutions over a sequence that `cp` shards (`passes/ops/linear_attention.py`).

A rank holds one or more runs of adjacent tokens. A run changes the state to A S + B, whatever the state before it is,
so ranks gather A and B of all runs, go from run to run themselves, and take the states before their own. For a
convolution they gather the last inputs of all runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.layout import to_natural_order, to_rank_order
from passes.ir.mesh import BLOCKS, SEQUENCE_AXIS
from passes.ir.order import Order
from passes.ir.spec import Spec
from passes.ops import linear_attention as ops
from passes.ops import reshard
from passes.rules.base import Rule, RuleMaker, of_dims, parse_dims
from passes.trace.builder import Builder

OF_ATTENTION = {"q": "bthk", "k": "bthk", "v": "bthv", "decay": "bthk", "beta": "bth", "starts": "bt"}
OF_CONVOLUTION = {"x": "bdt", "weight": "dw", "bias": "d", "starts": "bt"}
HARMLESS = ("k", "v", "decay", "beta", "x", "starts")  # operands with zeros as padding: such tokens change nothing


def rule(node: fx.Node, dims: dict[str, str], result: str, whole: str, emit: Any) -> Rule:
    """Make a rule from the dims of each argument, absent ones left out; only `cp` may shard t."""
    present = {name: x for name, x in zip(dims, node.args, strict=False) if isinstance(x, fx.Node)}
    operands = [parse_dims(dims[name], 0)[: ir.example(x).dim()] for name, x in present.items()]
    return of_dims(
        node,
        operands,
        [parse_dims(result, 0)],
        whole=frozenset(whole),
        only={"t": frozenset({SEQUENCE_AXIS})},
        pad_safe={i: 0.0 for i, name in enumerate(present) if name in HARMLESS},
        emit=emit,
    )


def attention(node: fx.Node) -> Rule:
    """Make the rule of `linear_attention`: rows, heads and columns of the state are independent."""
    return rule(node, OF_ATTENTION, "bthv", "k", emit_attention)


def convolution(node: fx.Node) -> Rule:
    """Make the rule of `causal_conv1d`: rows and channels are independent."""
    return rule(node, OF_CONVOLUTION, "bdt", "w", emit_convolution)


# ---- runs of tokens ------------------------------------------------------------------------------------


class Runs(NamedTuple):
    """The runs of adjacent tokens that each of `ranks` holds, equally many on each, in the order of the sequence."""

    ranks: int
    order: Order

    @property
    def all(self) -> int:
        """The number of all ranks' runs."""
        return self.ranks * self.order.chunks

    def in_sequence(self, x: Tensor, dim: int, table: Sequence[Tensor]) -> Tensor:
        """Return all runs' entries, gathered along `dim`, in the order of the sequence."""
        return x if self.order.is_plain else to_natural_order(x, dim, self.ranks, x.shape[dim], *table)

    def of_rank(self, x: Tensor, dim: int, axis_index: Tensor, table: Sequence[Tensor]) -> Tensor:
        """Return the rank's entries of all runs' in the order of the sequence."""
        x = x if self.order.is_plain else to_rank_order(x, dim, self.ranks, *table)
        return x.unflatten(dim, (self.ranks, -1)).index_select(dim, axis_index.view(1)).squeeze(dim)


def runs_of(builder: Builder, spec: Spec, dim: int) -> Runs | None:
    """Return the runs of a sequence along `dim`; None if the rank has all of it."""
    factors = spec.dims[dim]
    if not factors or SEQUENCE_AXIS not in factors[0].axes:
        return None
    return Runs(builder.mesh[SEQUENCE_AXIS], factors[0].order)


def gathered(builder: Builder, x: fx.Node, dim: int, runs: Runs) -> fx.Node:
    """Gather the entries of all runs along `dim`, rank after rank."""
    args = (x, dim, SEQUENCE_AXIS, runs.ranks, runs.all, ir.example(x).dtype, None)
    return builder.call(reshard.all_gather, args)


def located(builder: Builder, runs: Runs) -> list[fx.Node]:
    """Return the inputs that tell which runs the rank holds: its coordinate, and a table of blocks."""
    table = [builder.coordinates[BLOCKS]] if runs.order.table else []
    return [builder.coordinates[SEQUENCE_AXIS], *table]


def arguments(node: fx.Node, tensors: Sequence[Any]) -> Iterator[Any]:
    """Yield the arguments of a call, with these tensors in the place of its own."""
    following = iter(tensors)
    for argument in node.args:
        yield next(following) if isinstance(argument, fx.Node) else argument


# ---- linear attention ----------------------------------------------------------------------------------


def emit_attention(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Insert the rank's share: two recurrences if ranks share a sequence, one to know what its runs do to a state."""
    runs = runs_of(builder, specs[0], 1)
    if runs is None:
        return builder.trace(lambda *tensors: ops.linear_attention(*arguments(node, tensors)), *operands)

    def chunks_of(*tensors: Tensor) -> tuple[Tensor | None, ...]:
        tokens = ops.Tokens.by_head(*arguments(node, tensors)).in_runs(runs.order.chunks)
        return tuple(ops.in_chunks(tokens))

    def effect(a: Tensor, b: Tensor) -> Tensor:
        """Return [A, B] of each run, [b, h, runs, k, k + v]."""
        matrix = torch.eye(b.shape[-2], dtype=b.dtype, device=b.device).expand(*b.shape[:3], -1, -1)
        first = torch.cat([matrix, b.new_zeros((*b.shape[:3], *b.shape[-2:]))], -1)
        terms = torch.cat([b.new_zeros((*b.shape[:-1], b.shape[-2])), b], -1)
        return ops.linear_recurrence(a, terms, first).select(-3, a.shape[-3])

    def finish(effects: Tensor, axis_index: Tensor, table: list[Tensor], *parts: Tensor | None) -> Tensor:
        chunks = ops.Chunks(*parts)  # type: ignore[arg-type]
        effects = runs.in_sequence(effects, 2, table)
        rows = effects.shape[-2]
        a, b = effects[..., :rows], effects[..., rows:]
        before = ops.linear_recurrence(a, b, torch.zeros_like(b[:, :, 0]))[:, :, :-1]
        before = runs.of_rank(before, 2, axis_index, table)
        states = ops.linear_recurrence(chunks.a, chunks.b, before)
        values = chunks.results(states[..., :-1, :, :])
        return values[..., :length, :].flatten(2, 3).transpose(1, 2).contiguous()

    length = ir.example(operands[0]).shape[1] // runs.order.chunks
    parts = builder.trace(chunks_of, *operands)
    effects = gathered(builder, builder.trace(effect, parts[0], parts[1]), 2, runs)
    axis_index, *table = located(builder, runs)
    return builder.trace(finish, effects, axis_index, table, *parts)


# ---- convolutions --------------------------------------------------------------------------------------


def emit_convolution(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Insert the rank's share, with the inputs before each of its runs."""
    runs = runs_of(builder, specs[0], 2)
    if runs is None:
        return builder.trace(lambda *tensors: ops.causal_conv1d(*arguments(node, tensors)), *operands)
    x, weight, bias, starts = arguments(node, operands)
    before = ir.example(weight).shape[-1] - 1
    pieces = runs.order.chunks
    length = ir.example(x).shape[-1] // pieces
    last = min(length, before)  # of each run
    axis_index, *table = located(builder, runs)

    def extended(piece: fx.Node) -> fx.Node:
        """Return the runs [..., runs, w - 1 + length] of x or of `starts`, each after the inputs before it."""
        lead = ir.example(piece).dim() - 1
        cut = builder.trace(lambda p: sendable(p).unflatten(-1, (pieces, -1)), piece)
        if not before:
            return cut
        ends = builder.trace(lambda c: c[..., length - last :].contiguous(), cut)
        ends = gathered(builder, ends, lead, runs)

        def joined(ends: Tensor, cut: Tensor, axis_index: Tensor, table: list[Tensor]) -> Tensor:
            sequence = F.pad(runs.in_sequence(ends, lead, table).flatten(-2), [before, 0])
            windows = sequence.unfold(-1, before, last)[..., : runs.all, :]
            return torch.cat([runs.of_rank(windows, lead, axis_index, table), cut], -1)

        return builder.trace(joined, ends, cut, axis_index, table)

    inputs = extended(x), None if starts is None else extended(starts)
    return builder.trace(lambda *args: ops.convolved(*args).flatten(-2), *inputs, weight, bias)


def sendable(x: Tensor) -> Tensor:
    """Return truth values as numbers."""
    return x.int() if x.dtype is torch.bool else x


RULES: dict[str, RuleMaker] = {"ct::linear_attention": attention, "ct::causal_conv1d": convolution}
