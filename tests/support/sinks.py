"""Causal attention with a learned sink for each head: an operator unknown to all passes, described by its record."""

from __future__ import annotations

import torch
from torch import Tensor

from passes.context.attention import AttentionKernel, AttentionOp, attention_rule
from passes.context.context import gather
from passes.ir import ir
from passes.ir.layout import entries

# ---- the operator -----------------------------------------------------------------------------------


def weights_of(q: Tensor, k: Tensor, sink: Tensor, places: Tensor | None) -> Tensor:
    """Return the attention weights of queries at `places`; the sink's share is dropped."""
    row = torch.arange(q.shape[2], device=q.device) if places is None else places
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(row[:, None] < torch.arange(k.shape[2], device=q.device), -torch.inf)
    beside = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


def forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, places: Tensor | None = None) -> Tensor:
    return weights_of(q, k, sink, places) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor, places: Tensor | None = None):
    groups, weights = q.shape[1] // k.shape[1], weights_of(q, k, sink, places)
    k_all, v_all = (x.repeat_interleave(groups, 1) for x in (k, v))
    along = gradient @ v_all.transpose(-1, -2)
    mean = (weights * along).sum(-1, keepdim=True)
    inner = weights * (along - mean) * q.shape[-1] ** -0.5
    taken = 1 - weights.sum(-1, keepdim=True)
    along_k, along_v = inner.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient
    of_heads = [x.unflatten(1, (-1, groups)).sum(2) for x in (along_k, along_v)]
    return inner @ k_all, *of_heads, -(taken * mean).sum((0, 2, 3))


library = torch.library.Library("sinks", "DEF")
library.define("attention(Tensor q, Tensor k, Tensor v, Tensor sink, Tensor? places=None) -> Tensor")
library.define(
    "attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor sink, Tensor? places=None) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
library.impl("attention", forward, "CPU")
library.impl("attention_backward", backward, "CPU")
attention, attention_backward = torch.ops.sinks.attention.default, torch.ops.sinks.attention_backward.default


@torch.library.register_fake("sinks::attention")
def _(q, k, v, sink, places=None):
    return q.new_empty((*q.shape[:3], v.shape[-1]))


@torch.library.register_fake("sinks::attention_backward")
def _(gradient, q, k, v, sink, places=None):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, sink))


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


torch.library.register_autograd(
    "sinks::attention", lambda ctx, g: (*attention_backward(g, *ctx.saved_tensors), None), setup_context=_setup
)


# ---- its record -------------------------------------------------------------------------------------


def local(builder, node, operands, runs):
    return builder.call(attention, tuple(operands))


def gathered(builder, node, operands, specs, runs):
    """Return gathered keys and values, and the positions of the rank's queries among them."""
    q, k, v, sink = operands
    factor, at = specs[0].dims[-2][0], builder.at(specs[0].dims[-2][0])
    device = ir.example(q).device
    places = builder.trace(lambda *given: entries(factor, builder.mesh, dict(zip(at, given)), device)[0], *at.values())
    return builder.call(attention, (q, *(gather(builder, x, s) for x, s in zip((k, v), specs[1:3])), sink, places))


RECORD = AttentionOp(
    attention,
    rule=lambda node: attention_rule(node, "h"),
    local=local,
    kernels=(AttentionKernel(attention, attention_backward, compiled={"cpu": (forward, backward)}),),
    causal=lambda node: True,
    gathered=gathered,
)
