"""Attention of local blocks with its log-sum-exp, by device, for ring attention.

q[b, (g r), s, e], k[b, g, t, e], v[b, g, t, f]; a mask is additive, in the dtype of q, broadcast over [b, (g r), s, t].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.torch_private import gradients_inside

aten = torch.ops.aten


Part = tuple[Tensor, Tensor]  # a result and its log-sum-exp, in fp32 or wider


class Block(NamedTuple):
    """A kernel's options; `change` is a function of the scores, applied before the mask."""

    causal: bool = False
    scale: float | None = None
    mask: Tensor | None = None
    change: Callable[[Tensor], Tensor] | None = None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results are merged and gradients added: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(a: Part | None, b: Part) -> Part:
    """Merge attention over two sets of keys; a row that saw nothing yet has a log-sum-exp of -inf."""
    if a is None:
        return b
    lse = torch.logaddexp(a[1], b[1])
    base = torch.where(lse > -math.inf, lse, 0.0)
    return sum((out * (part - base).exp().unsqueeze(-1) for out, part in (a, b)), start=torch.zeros_like(a[0])), lse


def forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return (out[b, h, s, f], lse[b, h, s] in fp32 or wider); a row that sees nothing has zeros and -inf."""
    run, _ = kernel_for(q, v, block)
    out, lse = run(q, k, v, block)
    if block.mask is not None:
        sees = (block.mask > -math.inf).any(-1)
        lse = torch.where(sees, lse, -math.inf)
        out = torch.where(sees.unsqueeze(-1), out, 0.0)
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's share of the gradients of q, k and v, given the result over all blocks."""
    _, run = kernel_for(q, v, block)
    return run(gradient, q, k, v, out, torch.where(lse > -math.inf, lse, 0.0), block)


def kernel_for(q: Tensor, v: Tensor, block: Block) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return forward and backward for the device: flash attention if possible, otherwise plain operators."""
    width = max(q.shape[-1], v.shape[-1])
    if block.change is not None:
        return _math, _math_backward
    if q.device.type == "cpu":
        return _flash_cpu, _flash_cpu_backward
    half = q.dtype in (torch.bfloat16, torch.float16)
    if q.device.type == "cuda" and half and block.mask is None and width % 8 == 0 and width <= 256:
        return _flash_cuda, _flash_cuda_backward
    return _math, _math_backward


def is_plain(q: Tensor, v: Tensor) -> bool:
    """Return True if attention without a mask uses plain operators here, which hold the scores of their whole input."""
    return kernel_for(q, v, Block())[0] is _math


def pad_to_widest(*tensors: Tensor) -> list[Tensor]:
    """Pad heads of queries, keys and values to the widest: trailing zeros add nothing to scores or results."""
    return [pad_to_width(x, max(y.shape[-1] for y in tensors)) for x in tensors]


def pad_to_width(x: Tensor, width: int) -> Tensor:
    """Pad heads with zeros to a width."""
    return x if x.shape[-1] == width else F.pad(x, [0, width - x.shape[-1]])


def scale_of(q: Tensor, scale: float | None) -> float:
    """Return the factor of the scores, by default that of the queries' width; needed when these get padded."""
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    scale = scale_of(q, block.scale)
    out, lse = kernel(*pad_to_widest(q, k, v), 0.0, block.causal, attn_mask=block.mask, scale=scale)
    return out.narrow(-1, 0, v.shape[-1]).contiguous(), lse.contiguous()


def _flash_cpu_backward(gradient, q, k, v, out, lse, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # as the forward kernel leaves it
    tensors, scale = pad_to_widest(gradient, q, k, v, out), scale_of(q, block.scale)
    gradients = kernel(*tensors, lse, 0.0, block.causal, attn_mask=block.mask, scale=scale)
    return _cut_to_widths(gradients, q, k, v)


def _flash_cuda(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    kernel = aten._scaled_dot_product_flash_attention.default
    out, lse, *_ = kernel(*pad_to_widest(q, k, v), 0.0, block.causal, scale=scale_of(q, block.scale))
    return out.narrow(-1, 0, v.shape[-1]).contiguous(), lse.contiguous()


def _flash_cuda_backward(gradient, q, k, v, out, lse, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    kernel = aten._scaled_dot_product_flash_attention_backward.default
    sizes = (None, None, q.shape[2], k.shape[2])
    random = [torch.zeros(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ())]  # nothing is dropped
    tensors, scale = pad_to_widest(gradient, q, k, v, out), scale_of(q, block.scale)
    return _cut_to_widths(kernel(*tensors, lse, *sizes, 0.0, block.causal, *random, scale=scale), q, k, v)


def _cut_to_widths(gradients: Sequence[Tensor], *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut gradients to the widths of their tensors."""
    pairs = zip(gradients, tensors, strict=True)
    return tuple(gradient.narrow(-1, 0, x.shape[-1]).contiguous() for gradient, x in pairs)  # type: ignore[return-value]


def _scaled_scores(q: Tensor, k: Tensor, block: Block) -> Tensor:
    """Return the scaled matmul of queries and keys in fp32 or wider, [b, g, r, s, t]."""
    b, h, s, e = q.shape
    scale = scale_of(q, block.scale)
    grouped = q.to(wide_dtype(q.dtype)).reshape(b, k.shape[1], h // k.shape[1], s, e)
    return grouped @ k.to(wide_dtype(q.dtype)).unsqueeze(2).transpose(-1, -2) * scale


def _apply_change(scores: Tensor, block: Block) -> Tensor:
    """Apply the block's score function."""
    if block.change is None:
        return scores
    return block.change(scores.flatten(1, 2)).view(scores.shape)


def _change_gradient(gradient: Tensor, scores: Tensor, block: Block) -> Tensor:
    """Return the gradient through the block's score function."""
    if block.change is None:
        return gradient
    with gradients_inside():
        leaf = scores.detach().requires_grad_()
        (score_gradient,) = torch.autograd.grad(_apply_change(leaf, block), leaf, gradient)
    return score_gradient


def _masked(scores: Tensor, block: Block) -> Tensor:
    """Return the scores, -inf where a query does not see a key."""
    b, g, r, s, t = scores.shape
    if block.causal:
        row, column = torch.arange(s, device=scores.device)[:, None], torch.arange(t, device=scores.device)
        scores = torch.where(row >= column, scores, -math.inf)
    if block.mask is not None:
        scores = scores + block.mask.expand(b, g * r, s, t).reshape(scores.shape)
    return scores


def _math(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    scores = _masked(_apply_change(_scaled_scores(q, k, block), block), block)
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse > -math.inf, lse, 0.0).unsqueeze(-1)).exp()
    out = weights @ v.to(weights.dtype).unsqueeze(2)
    b, h, s, _ = q.shape
    return out.view(b, h, s, v.shape[-1]).to(q.dtype), lse.view(b, h, s)


def _math_backward(gradient, q, k, v, out, lse, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    b, h, s, e = q.shape
    g, t, f = k.shape[1], k.shape[2], v.shape[-1]
    scale = scale_of(q, block.scale)
    kind = wide_dtype(q.dtype)
    grad_out, result = (x.to(kind).reshape(b, g, h // g, s, f) for x in (gradient, out))
    scores = _scaled_scores(q, k, block)
    weights = (_masked(_apply_change(scores, block), block) - lse.to(kind).reshape(b, g, h // g, s, 1)).exp()
    along_v = (weights.transpose(-1, -2) @ grad_out).sum(2)
    inner = weights * (grad_out @ v.to(kind).unsqueeze(2).transpose(-1, -2) - (grad_out * result).sum(-1, keepdim=True))
    inner = _change_gradient(inner, scores, block) * scale
    along_q = (inner @ k.to(kind).unsqueeze(2)).view(b, h, s, e)
    along_k = (inner.transpose(-1, -2) @ q.to(kind).reshape(b, g, h // g, s, e)).sum(2)
    return along_q.to(q.dtype), along_k.view(b, g, t, e).to(k.dtype), along_v.view(b, g, t, f).to(v.dtype)
