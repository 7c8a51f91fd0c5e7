"""Attention in which each query sees an interval of keys: the operators.

    out = interval_attention(q, k, v, first, last, terms, sinks, scale, score)  over a full sequence, before placement
    out, lse = attend(q, k, v, first, last, runs, terms, scale, score)          on a rank

    q[b, (g r), s, e], k[b, g, t, e], v[b, g, t, f]
    first, last   i64[b, s] or both i64[1, s]: the query sees keys at positions first <= p < last
    runs          i64[c]: keys lie in c runs of t / c, run i at positions runs[i], runs[i] + 1, ...; None: one run at 0
    terms, score  a function of the scaled scores, applied before unseen keys are hidden: an expression of the score
                  `s`, the key's position `j` and terms `t0`, `t1`, ... [b or 1, h or 1, s or 1, 1], as wide as lse;
                  "tanh(s / 50.0) * 50.0", "s + t0 * (j - t1)"; "" for none
    sinks         [b or 1, h or 1, s or 1, 1], as wide as lse: the score of one more key, whose value is zero (gpt-oss);
                  an empty list for none
    out           [b, (g r), s, f], zero for a query that sees nothing
    lse           [b, (g r), s] in fp32 or wider, -inf for such a query

The kernels are in `passes/context`. They know no sinks: `with_sink` adds one to their results, from which
`attend_backward` then computes the gradients of queries, keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import CodeType

import torch
from torch import Tensor

FUNCTIONS = {name: getattr(torch, name) for name in ("tanh", "neg", "abs", "exp", "sigmoid", "relu")}
library = torch.library.Library("ct", "FRAGMENT")
_COMMON = "Tensor first, Tensor last, Tensor? runs, Tensor[] terms, float scale, str score"
library.define(f"attend(Tensor q, Tensor k, Tensor v, {_COMMON}) -> (Tensor, Tensor)")
library.define(
    "attend_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_COMMON}) -> (Tensor, Tensor, Tensor)"
)
library.define(
    "interval_attention(Tensor q, Tensor k, Tensor v, Tensor first, Tensor last, Tensor[] terms, Tensor[] sinks, "
    "float scale, str score) -> Tensor"
)
interval_attention = torch.ops.ct.interval_attention.default
attend, attend_backward = torch.ops.ct.attend.default, torch.ops.ct.attend_backward.default


def evaluate(score: str, s: Tensor, j: Tensor, terms: Sequence[Tensor]) -> Tensor:
    """Apply a score function to scores [b, h, s, t], positions of keys and terms."""
    names = FUNCTIONS | {"s": s, "j": j.to(s.dtype)} | {f"t{i}": term for i, term in enumerate(terms)}
    return eval(_compiled(score), {"__builtins__": {}}, names).expand_as(s)


@functools.cache
def _compiled(score: str) -> CodeType:
    return compile(score, "<score>", "eval")


@torch.library.impl(library, "interval_attention", "CompositeImplicitAutograd")
def _interval_attention(q, k, v, first, last, terms, sinks, scale, score) -> Tensor:
    if sinks:
        return _WithSink.apply(q, k, v, first, last, *sinks, terms, scale, score)  # type: ignore[no-any-return]
    return attend(q, k, v, first, last, None, terms, scale, score)[0]


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of attention with one more key of score `sink` and value zero; `out` is as wide as lse."""
    total = torch.logaddexp(lse, sink.squeeze(-1))
    return out * (lse - total).exp().unsqueeze(-1), total


def sink_gradient(gradient: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the gradient of a sink from that of the result, and both results of `with_sink`."""
    weight = (sink.squeeze(-1) - lse).exp()
    return -(weight * (gradient.to(lse.dtype) * out).sum(-1)).unsqueeze(-1).sum_to_size(sink.shape)


class _WithSink(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, first, last, sink, terms, scale, score):
        options = first, last, None, terms, scale, score
        out, lse = attend(q, k, v, *options)
        out, lse = with_sink(out.to(lse.dtype), lse, sink)
        ctx.save_for_backward(q, k, v, out.to(q.dtype), lse, sink)
        ctx.options = options
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse, sink = ctx.saved_tensors
        gradients = attend_backward(gradient.contiguous(), q, k, v, out, lse, *ctx.options)
        return *gradients, None, None, sink_gradient(gradient, out, lse, sink), None, None, None


@torch.library.register_fake("ct::attend")
def _(q: Tensor, k: Tensor, v: Tensor, *options):
    kind = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=kind)


@torch.library.register_fake("ct::attend_backward")
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *options):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup(ctx, inputs: tuple, output: tuple) -> None:
    q, k, v, first, last, runs, terms, scale, score = inputs
    ctx.save_for_backward(q, k, v, *output, first, last, runs, *terms)
    ctx.scale_and_score = scale, score


def _differentiate(ctx, gradient: Tensor, _: Tensor) -> tuple:
    (*tensors,) = ctx.saved_tensors
    gradients = attend_backward(gradient, *tensors[:8], tensors[8:], *ctx.scale_and_score)
    return *gradients, None, None, None, [None] * len(tensors[8:]), None, None


torch.library.register_autograd("ct::attend", _differentiate, setup_context=_setup)
