"""LSTM, GRU and plain recurrent networks over a sequence: only the batch dim can be sharded.

They stay one operator until gradients are traced; `passes/autograd/joint.py` then unrolls them over time.
"""

from __future__ import annotations

from torch import fx

from passes.ir import ir
from passes.ir.operators import name_of
from passes.rules.base import Names, Rule, RuleMaker, opaque, result_shapes, tensor_operands

RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")


def recurrent(node: fx.Node) -> Rule:
    """Make the rule of x[t, b, i] (or x[b, t, i]), states[l, b, h] and weights -> y[t, b, o] and states.

    Packed sequences cannot be sharded at all.
    """
    if node.target._overloadname != "input":  # type: ignore[union-attr]
        return opaque(node)
    states = 2 if name_of(node) == "lstm" else 1
    shapes = [tuple(ir.example(n).shape) for n in tensor_operands(node)]
    outs = result_shapes(node)
    batch_dims = [0 if node.args[-1] else 1, *[1] * states]  # the dim of the batch, in operands and results
    sizes = {"b": shapes[0][batch_dims[0]]}

    def name_dims(tag: str, group: list[tuple[int, ...]]) -> tuple[tuple[Names, ...], ...]:
        dims = []
        for k, shape in enumerate(group):
            batch = batch_dims[k] if k < len(batch_dims) else -1
            dims.append(tuple(("b",) if d == batch else (f"{tag}{k}.{d}",) for d in range(len(shape))))
            sizes.update({f"{tag}{k}.{d}": n for d, n in enumerate(shape) if d != batch})
        return tuple(dims)

    operands, results = name_dims("i", shapes), name_dims("o", outs)
    return Rule(operands, results, sizes, whole=frozenset(sizes) - {"b"})


def rules() -> dict[str, RuleMaker]:
    """Return operator name -> rule, for recurrent networks."""
    return dict.fromkeys(RECURRENT, recurrent)
