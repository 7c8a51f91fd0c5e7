"""LSTM, GRU and plain recurrent networks over a sequence: only the batch dim can be sharded.

They stay one operator until gradients are traced; `passes/autograd/joint.py` then unrolls them over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from passes.ir.operators import name_of
from passes.rules.base import Names, Rule, RuleMaker, of_dims, opaque

RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")


def recurrent(node: fx.Node) -> Rule:
    """Make the rule of x[t, b, i] (or x[b, t, i]), states[l, b, h] and weights -> y[t, b, o] and states.

    Packed sequences cannot be sharded at all.
    """
    if node.target._overloadname != "input":  # type: ignore[union-attr]
        return opaque(node)
    states = 2 if name_of(node) == "lstm" else 1
    batch_dims = dict(enumerate([0 if node.args[-1] else 1, *[1] * states]))  # number of the operand or result -> dim

    def with_batch(group: Sequence[Sequence[Names]]) -> list[list[Names]]:
        pairs = enumerate(group)
        return [[("b",) if d == batch_dims.get(k) else names for d, names in enumerate(dims)] for k, dims in pairs]

    whole = opaque(node)
    rule = of_dims(node, with_batch(whole.operands), with_batch(whole.results))
    return replace(rule, whole=frozenset(rule.sizes) - {"b"})


RULES: dict[str, RuleMaker] = dict.fromkeys(RECURRENT, recurrent)
