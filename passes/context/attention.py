"""The record of an attention operator, which every pass reads.

An operator takes queries, keys and values first, and returns one row for each query:

    q[b, (g r), s, e], k[b, g, t, e], v[b, g, t, f], ...  ->  [b, (g r), s, f]       r query heads share a key head

`passes/context/operators.py` lists the records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from passes.context.call import AttentionCall
from passes.ir import ir
from passes.ir.mesh import SEQUENCE_AXIS
from passes.ir.spec import Spec
from passes.rules.base import Names, Rule, RuleMaker, aligned, of_dims, tensor_operands
from passes.torch_private import OpOverload
from passes.trace.builder import Builder

CONTEXT = frozenset({SEQUENCE_AXIS})
Nodes = list[fx.Node]
Specs = list[Spec]


def attention_flops(q: tuple, k: tuple, v: tuple, *others: Any, **options: Any) -> int:
    """Return the FLOPs of both matmuls over all pairs of query and key, from the operands' shapes."""
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def attention_backward_flops(gradient: tuple, q: tuple, k: tuple, v: tuple, *others: Any, **options: Any) -> int:
    """Return the FLOPs of the backward: scores again, and gradients of scores, values, queries and keys."""
    return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


@dataclass(frozen=True)
class AttentionKernel:
    """An operator that computes attention, as it appears in graphs, and the operator that computes its gradients.

    Attributes:
        forward: takes queries, keys and values first
        backward: takes the gradient of the result, then the same; None if PyTorch differentiates it with other
            operators
        flops: of forward and backward: functions of the operands' shapes
        compiled: device type -> the functions that replace forward and backward in compiled code there; without an
            entry the operators are called
        on_host: the reason why a CUDA graph cannot record a call of the operator, empty if it can
    """

    forward: OpOverload
    backward: OpOverload | None = None
    flops: tuple[Callable[..., int], Callable[..., int]] = (attention_flops, attention_backward_flops)
    compiled: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=dict)
    on_host: str = ""


def call_of(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs) -> AttentionCall:
    """Return the call as its rank sees it, if nothing is known about its mask."""
    q, k, v = (tuple(ir.example(x).shape) for x in operands[:3])
    dtype, ranks, order = ir.example(operands[0]).dtype, builder.mesh[SEQUENCE_AXIS], specs[1].order
    topology = {"stride": builder.mesh.stride(SEQUENCE_AXIS), "balance": builder.balance}
    return AttentionCall(q, k, v, dtype, ranks, zigzag=order.zigzag, in_blocks=bool(order.table), **topology)


@dataclass(frozen=True)
class AttentionOp:
    """An attention operator.

    Attributes:
        op: the operator that models call, on full sequences
        rule: its dims as factors (`attention_rule`)
        local: the computation of a rank on all keys of its queries: (builder, node, operands, runs) -> result
        kernels: the operators that finally compute it; `op` itself if it is not decomposed
        written: a function that rewrites a call so that the rule applies, None if it applies to the call as it is
        dropping: the operator with dropout, None if it has none: a function of (weights, p) -> weights, which drops
            weights, and of the operator's arguments
        causal: returns True if queries of a call see only the keys up to their own position
        bounds: first and last key that each query of a call sees: keys may then be in any order, because `runs` gives
            their positions (`passes/ops/attend.py`)
        call: the facts by which the method of context parallelism is chosen
        gathered: the form that gathers the rank's keys and then attends locally, None if there is none
        ring: the form whose keys travel: (builder, node, operands, specs, call, method) -> result
    """

    op: OpOverload
    rule: RuleMaker
    local: Callable[[Builder, fx.Node, Nodes, fx.Node | None], fx.Node]
    kernels: tuple[AttentionKernel, ...]
    written: Callable[[fx.Node], Callable[..., Tensor] | None] = lambda node: None
    dropping: Callable[..., Tensor] | None = None
    causal: Callable[[fx.Node], bool] = lambda node: False
    bounds: Callable[[fx.Node], tuple[fx.Node, fx.Node]] | None = None
    call: Callable[[Builder, fx.Node, Nodes, Specs], AttentionCall] = call_of
    gathered: Callable[[Builder, fx.Node, Nodes, Specs, fx.Node | None], fx.Node] | None = None
    ring: Callable[[Builder, fx.Node, Nodes, Specs, AttentionCall, str], fx.Node] | None = None

    @property
    def forms(self) -> tuple[str, ...]:
        """The methods of context parallelism that it supports: Ulysses exchanges heads around any operator."""
        rings = ("ring", "hybrid") if self.ring else ()
        return (*rings, *(["all_gather"] if self.gathered else []), "ulysses")


def attention_rule(node: fx.Node, *others: str, **options: Any) -> Rule:
    """Return the rule of an attention operator.

    Dims of size 1 are not sharded. Self-attention may be sharded on `cp`; tokens on another axis are
    exchanged for heads. If there are other keys than queries, the keys stay unsharded.

    Args:
        node: the call of the operator.
        others: the dims of each operand after the values, spelled in b, h, s, t (keys, not sharded), or 1.
        options: other fields of the `Rule`.
    """
    q, k, _, *more_nodes = tensor_operands(node)
    (b, h, s, _), (_, g, t, _) = (tuple(ir.example(x).shape) for x in (q, k))
    lead: Names = ("b",) if b != 1 else ()
    heads: Names = ("g", "r") if h != g else ("g",)
    query, key = ("s", "s") if s == t else ("q", "k")
    queries, keys = (lead, heads, (query,)), (lead, ("g",), (key,))
    names: dict[str, Names] = {"b": lead, "h": heads, "s": (query,), "t": ("k",), "1": ()}
    more = [
        aligned(ir.example(x).shape, [names[letter] for letter in text])
        for x, text in zip(more_nodes, others, strict=True)
    ]
    return of_dims(
        node,
        [(*queries, ("e",)), (*keys, ("e",)), (*keys, ("f",)), *more],
        [(*queries, ("f",))],
        **{"whole": frozenset({"k", "e", "f"}), "only": {query: CONTEXT}, "exchange": ("g", "r")} | options,
    )


def heads_repeated(op: OpOverload) -> Callable[..., Tensor]:
    """Return the operator with each key and value head repeated for its group of query heads."""

    def run(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Tensor:
        groups = q.shape[-3] // k.shape[-3]
        gqa_off = {name: False for name in options if name == "enable_gqa"}
        return op(q, repeat_heads(k, groups), repeat_heads(v, groups), *others, **options | gqa_off)

    return run


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """Return [..., g, t, d] as [..., g * groups, t, d]."""
    *lead, heads, rows, width = x.shape
    return x.unsqueeze(-3).expand(*lead, heads, groups, rows, width).flatten(-4, -3)
