"""Losses in the summed form that `normalize` produces: if rows are sharded, the sum over rows is partial."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from passes.ir import ir
from passes.ir.operators import name_of
from passes.ir.spec import Spec
from passes.rules.base import Rule, RuleMaker, emit_of, from_text, tensor_operands
from passes.trace.builder import Builder

aten = torch.ops.aten
SUM = 2  # aten's code for reduction="sum"
LINEAR_CROSS_ENTROPY = "ct::linear_cross_entropy"  # emitter in `passes/memory/chunked.py`
LINEAR_CROSS_ENTROPIES = "ct::linear_cross_entropies"  # one loss a token; emitter in `passes/memory/chunked_tokens.py`
LINEAR_DIVERGENCES = "ct::linear_divergences"  # of two heads; emitter in `passes/memory/chunked_divergence.py`
CROSS_ENTROPIES = (LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPIES)
IN_CHUNKS = (*CROSS_ENTROPIES, LINEAR_DIVERGENCES)


def cross_entropy_loss(node: fx.Node) -> Rule:
    """Make the rule of a summed cross-entropy of logits[n, c] and class ids[n]: c cannot be sharded.

    Padded rows get the ignored label. Raises CompileError for any other form of the loss.
    """
    logits, target = tensor_operands(node)[:2]
    reduction = node.args[3] if len(node.args) > 3 else 1
    if reduction != SUM or ir.example(target).dim() != 1 or len(tensor_operands(node)) > 2:
        raise ir.CompileError("shard", node, "cross_entropy_loss other than a plain sum reached the rules")
    rule = from_text("nc, n -> ; sum n; whole c")(node)
    return replace(rule, pad_safe={0: 0.0}, emit=emit_cross_entropy)  # rows of -inf would give gradients of NaN


def emit_cross_entropy(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Compute the local sum, with the ignored class id in padded rows."""
    ignore_index = node.args[4] if len(node.args) > 4 else -100
    target = builder.fill_padding(operands[1], specs[1], float(ignore_index))  # type: ignore[arg-type]
    return builder.call(node.target, (operands[0], target, *node.args[2:]))


def linear_cross_entropy(node: fx.Node) -> Rule:
    """Make the rule of hidden[n, d], weight[c, d], labels[n], bias[c] -> cross-entropy, summed or [n].

    The logits are hidden weight^T + bias.
    """
    name = name_of(node)
    result = "; sum n c" if name == LINEAR_CROSS_ENTROPY else "n; sum c"
    rule = from_text(f"nd, cd, n, c -> {result}; whole d")(node)
    return replace(rule, pad_out=lambda fills: 0.0, emit=emit_of(name))  # padding has the ignored label


def linear_divergences(node: fx.Node) -> Rule:
    """Make the rule of hidden[n, d], weight[c, d], theirs[n, e], their_weight[c, e] -> divergences[n].

    Padding tokens have finite divergences, of any value.
    """
    rule = from_text("nd, cd, ne, ce -> n; sum c; whole d e")(node)
    return replace(rule, pad_safe={0: 0.0, 2: 0.0}, emit=emit_of(LINEAR_DIVERGENCES))


RULES: dict[str, RuleMaker] = {
    "cross_entropy_loss": cross_entropy_loss,
    **dict.fromkeys(CROSS_ENTROPIES, linear_cross_entropy),
    LINEAR_DIVERGENCES: linear_divergences,
}
