"""Capture recurrences of transformers' models as operators: its functions loop over chunks, so graphs would grow.

Each of its models has such functions of its own, with the interfaces of fla, mamba-ssm and causal-conv1d. The operators
(`passes/ops/linear_attention.py`) compute the same, and run on shards of a sequence. Checked with transformers 5.23.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops.linear_attention import causal_conv1d, linear_attention

Function = Callable[..., Any]
THEIRS = ("initial_state", "initial_states", "output_final_state", "return_final_states", "cu_seqlens", "z")


@contextmanager
def recurrences_as_operators(starts: Tensor | None = None) -> Iterator[None]:
    """Compute recurrences of models of transformers by our operators inside the block.

    They restart where `starts`, bool [b, t], is True, whatever the model knows of documents.
    """
    documents = {} if starts is None else {"seq_idx": starts}
    loaded = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    with ExitStack() as stack:
        for module in loaded:
            for name, ours in FUNCTIONS.items():
                if (theirs := vars(module).get(name)) is not None:
                    stack.enter_context(patch.object(module, name, replaced(theirs, ours, documents)))
        yield


def replaced(theirs: Function, ours: Function, documents: dict[str, Any]) -> Function:
    """Return our function with `documents` as its option, but theirs for calls with options that ours has not."""

    @wraps(theirs)
    def call(*args: Any, **options: Any) -> Any:
        is_theirs = any(options.get(name) is not None and options[name] is not False for name in THEIRS)
        return theirs(*args, **options) if is_theirs else ours(*args, **options | documents)

    return call


def wide(x: Tensor) -> Tensor:
    """Return a tensor in fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def starts_of(seq_idx: Tensor | None) -> Tensor | None:
    """Return where documents start, bool [b, t], given the number of each token's document, or just that."""
    if seq_idx is None or seq_idx.dtype is torch.bool:
        return seq_idx
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], [1, 0], value=True)


def unit(x: Tensor) -> Tensor:
    """Return vectors of length one, as fla divides them."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    seq_idx: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the gated delta rule's results [b, t, h, v], and no state.

    Takes query and key [b, t, g, k], value [b, t, h, v], g [b, t, h] or (KDA) [b, t, h, k], and beta [b, t, h].
    """
    groups = value.shape[2] // key.shape[2]
    q, k, v, decay, beta = (wide(x) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    q, k = (x if groups == 1 else x.repeat_interleave(groups, 2) for x in (q * q.shape[-1] ** -0.5, k))
    return linear_attention(q, k, v, decay, beta, starts_of(seq_idx)).to(query.dtype), None


def mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    seq_idx: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Return Mamba 2's results [b, t, h, p].

    Takes hidden_states [b, t, h, p], dt [b, t, h], A [h], B and C [b, t, g, n], D and dt_bias [h].
    """
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = wide((F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit))
    x, groups = wide(hidden_states), hidden_states.shape[2] // B.shape[2]
    k, q = (wide(y).repeat_interleave(groups, 2) for y in (B, C))
    out = linear_attention(q, k, x * dt[..., None], A.to(dt.dtype) * dt, None, starts_of(seq_idx))
    return out if D is None else out + D[:, None] * x


def convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Return the causal convolution [b, d, t] of hidden_states [b, d, t] with weight [d, w], and its activation."""
    out = causal_conv1d(hidden_states.to(weight.dtype), weight, bias, starts_of(seq_idx))
    if activation is not None:
        out = import_module("transformers.activations").ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


FUNCTIONS: dict[str, Function] = {  # by their names in transformers
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "causal_conv1d_fn": convolution,
}
