"""What there is to know of an operator of attention: one record, which every pass reads.

An operator takes queries, keys and values first, and gives a row for each query:

    q[b, (g r), s, e], k[b, g, t, e], v[b, g, t, f], ...  ->  [b, (g r), s, f]       r heads of queries for one of keys

`passes/context/operators.py` lists the records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from passes.context.call import AttentionCall
from passes.program import ir
from passes.program.builder import Builder
from passes.program.mesh import SEQUENCE_AXIS
from passes.program.spec import Spec
from passes.program.torch_private import OpOverload
from passes.rules.base import Names, Rule, RuleMaker, bind_sizes, tensor_operands

CONTEXT = frozenset({SEQUENCE_AXIS})
Nodes = list[fx.Node]
Specs = list[Spec]


def products(q: tuple, k: tuple, v: tuple, *rest: Any, **named: Any) -> int:
    """FLOPs of both products over all pairs, of the operands' shapes."""
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def products_behind(gradient: tuple, q: tuple, k: tuple, v: tuple, *rest: Any, **named: Any) -> int:
    """The same of a backward: scores once more, and the gradients of scores, values, queries and keys."""
    return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


@dataclass(frozen=True)
class AttentionKernel:
    """An operator that computes attention, as graphs have it, and the one that computes its gradients.

    forward     takes queries, keys and values first
    backward    takes the gradient of the result, then these; None where PyTorch differentiates by other operators
    flops       of the shapes of what the operators take: of forward and backward
    compiled    type of device -> what forward and backward are compiled as there; otherwise they are called
    on_host     why a CUDA graph cannot record it where it is called, empty if it can
    """

    forward: OpOverload
    backward: OpOverload | None = None
    flops: tuple[Callable[..., int], Callable[..., int]] = (products, products_behind)
    compiled: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=dict)
    on_host: str = ""


def call_of(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs) -> AttentionCall:
    """The call as its rank sees it, if nothing is known of what its queries see."""
    q, k, v = (tuple(ir.example(x).shape) for x in operands[:3])
    dtype, ranks, order = ir.example(operands[0]).dtype, builder.mesh[SEQUENCE_AXIS], specs[1].order
    where = {"stride": builder.mesh.stride(SEQUENCE_AXIS), "balance": builder.balance}
    return AttentionCall(q, k, v, dtype, ranks, zigzag=order.zigzag, in_blocks=bool(order.table), **where)


@dataclass(frozen=True)
class AttentionOp:
    """An operator of attention.

    op          as models call it, on whole sequences
    rule        its dims as factors (`attention_rule`)
    local       what a rank runs on all keys of its queries: (builder, node, operands, runs) -> result
    kernels     what computes it in the end; `op` itself where it is not decomposed
    written     how a call is written for the rule, None as it is
    dropping    a function of what drops weights, (weights, p) -> weights, and of the operator's arguments: the operator
                with dropout; None if it has no dropout
    causal      whether queries of a call see the keys up to their own
    bounds      first and last of the keys that queries of a call see: keys may then be in any order, for `runs` says
                where they lie (`passes/program/attend.py`)
    call        what the method of context parallelism is chosen by
    gathered    the local form on the rank's own keys where they are to be gathered, None if there is none
    ring        the same where keys are to travel: (builder, node, operands, specs, call, method) -> result
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
        """The methods of context parallelism that it has a form for: heads are exchanged around any operator."""
        rings = ("ring", "hybrid") if self.ring else ()
        return (*rings, *(["all_gather"] if self.gathered else []), "ulysses")


def attention_rule(node: fx.Node, *others: str, **options: Any) -> Rule:
    """The rule of an attention whose `others` after values have the dims written, of b, h, s; one of size one has none.

    A sequence that attends to itself may be sharded on `cp`; where keys are others than queries, they are whole.
    """
    q, k, v, *rest = tensor_operands(node)
    (b, h, s, _), (_, g, t, _) = (tuple(ir.example(x).shape) for x in (q, k))
    lead: Names = ("b",) if b != 1 else ()
    heads: Names = ("g", "r") if h != g else ("g",)
    query, key = ("s", "s") if s == t else ("q", "k")
    queries, keys = (lead, heads, (query,)), (lead, ("g",), (key,))
    dims = [(*queries, ("e",)), (*keys, ("e",)), (*keys, ("f",))]
    sizes = bind_sizes(dims, [list(ir.example(x).shape) for x in (q, k, v)])
    names = {"b": lead, "h": heads, "s": (query,), "1": ()}
    return Rule(
        (*dims, *(dims_of(x, [names[letter] for letter in text]) for x, text in zip(rest, others, strict=True))),
        ((*queries, ("f",)),),
        sizes,
        **{"whole": frozenset({"k", "e", "f"}), "only": {query: CONTEXT}} | options,
    )


def dims_of(x: fx.Node, names: Sequence[Names]) -> tuple[Names, ...]:
    """The dims of an operand that has the last of `names`, each whole or one entry for all."""
    shape = ir.example(x).shape
    return tuple(() if n == 1 else name for n, name in zip(shape, names[len(names) - len(shape) :], strict=True))


def heads_repeated(op: OpOverload) -> Callable[..., Tensor]:
    """The operator with each head of keys and values repeated for its group of heads of queries."""

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        groups = q.shape[-3] // k.shape[-3]
        same = {name: False for name in options if name == "enable_gqa"}
        return op(q, repeat_heads(k, groups), repeat_heads(v, groups), *rest, **options | same)

    return run


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """[..., g, t, d] -> [..., g * groups, t, d]."""
    *lead, heads, rows, width = x.shape
    return x.unsqueeze(-3).expand(*lead, heads, groups, rows, width).flatten(-4, -3)
