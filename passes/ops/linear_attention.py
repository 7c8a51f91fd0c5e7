"""Recurrences along a sequence: linear attention with decay (gated delta rule, KDA, Mamba 2), and short convolutions.

    out = linear_attention(q, k, v, decay, beta, starts)    over a full sequence, before placement
    out = causal_conv1d(x, weight, bias, starts)            the same
    s = linear_recurrence(a, b, first)                      on a rank

`linear_attention` keeps a matrix for each head, S[k, v], which each token reads after it has changed it:

    S_t = exp(decay_t) S_{t-1} + k_t u_t^T         decay[b, t, h] <= 0; or [b, t, h, k], one for each row of S
    u_t = v_t                                      without `beta`: Mamba 2, gated linear attention (arXiv:2312.06635)
    u_t = beta_t (v_t - (exp(decay_t) S_{t-1})^T k_t)    gated delta rule (arXiv:2412.06464), KDA (arXiv:2510.26692)
    out_t = S_t^T q_t

    q, k [b, t, h, k], v [b, t, h, v], beta [b, t, h], all in fp32 or fp64 -> out [b, t, h, v]
    starts   bool [b, t], True where a document starts: the state, or the input before it, counts as zero there

Tokens are taken in chunks, within which all is matmuls (WY representation, arXiv:2406.06484): a chunk changes the
state to A S + B. `linear_recurrence` goes from chunk to chunk, so a graph has as many operators for any length:

    s[0] = first, s[i + 1] = a[i] s[i] + b[i]      a [..., n, k, k], or a number for each row [..., n, k or 1, 1]
                                                   b [..., n, k, v], first [..., k, v] -> s [..., n + 1, k, v]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = -100.0  # of a decay: e^-100 of a state is nothing, and sums of larger ones lose the digits of small ones
# tokens; decays of each row of a state are kept for all pairs of tokens in a chunk, k times as many
CHUNK, CHUNK_BY_ROW = 64, 16

library = torch.library.Library("ct", "FRAGMENT")
library.define(
    "linear_attention(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, Tensor? starts) -> Tensor"
)
library.define("causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? starts) -> Tensor")
library.define("linear_recurrence(Tensor a, Tensor b, Tensor first) -> Tensor")
linear_attention, causal_conv1d = torch.ops.ct.linear_attention.default, torch.ops.ct.causal_conv1d.default
linear_recurrence = torch.ops.ct.linear_recurrence.default


# ---- from chunk to chunk -------------------------------------------------------------------------------


def changed(a: Tensor, s: Tensor) -> Tensor:
    """Return a s; `a` is a matrix, or has a number for each row of `s`."""
    return a * s if a.shape[-1] == 1 else a @ s


@torch.library.impl(library, "linear_recurrence", "CompositeExplicitAutograd")
def _linear_recurrence(a: Tensor, b: Tensor, first: Tensor) -> Tensor:
    states = [first]
    for a_i, b_i in zip(a.unbind(-3), b.unbind(-3), strict=True):
        states.append(changed(a_i, states[-1]) + b_i)
    return torch.stack(states, -3)


@torch.library.register_fake("ct::linear_recurrence")
def _(a: Tensor, b: Tensor, first: Tensor) -> Tensor:
    *lead, chunks, rows, columns = b.shape
    return b.new_empty((*lead, chunks + 1, rows, columns))


def _setup(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _differentiate(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients: those of the states are a recurrence from the last state to the first."""
    a, states = ctx.saved_tensors
    last = gradient.select(-3, gradient.shape[-3] - 1)
    earlier = gradient.narrow(-3, 0, gradient.shape[-3] - 1).flip(-3)
    backward = a if a.shape[-1] == 1 else a.transpose(-1, -2)
    of_states = linear_recurrence(backward.flip(-3), earlier, last).flip(-3)
    of_b, before = of_states.narrow(-3, 1, a.shape[-3]), states.narrow(-3, 0, a.shape[-3])
    of_a = (of_b * before).sum(-1, keepdim=True) if a.shape[-1] == 1 else of_b @ before.transpose(-1, -2)
    return of_a.sum_to_size(a.shape), of_b, of_states.select(-3, 0)


torch.library.register_autograd("ct::linear_recurrence", _differentiate, setup_context=_setup)


# ---- within chunks -------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """Operands of `linear_attention` by head: q, k [b, h, t, k], v [b, h, t, v], decay [b, h, t, k or 1], ...

    beta is [b, h, t, 1], starts [b, 1, t]. In runs, t is [runs, t / runs] in all.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None
    starts: Tensor | None

    @staticmethod
    def by_head(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, starts: Tensor | None
    ) -> Tokens:
        """Return the operands as the operator takes them, by head."""
        decay = decay.unsqueeze(-1) if decay.dim() == 3 else decay
        q, k, v, decay = (x.transpose(1, 2) for x in (q, k, v, decay))
        beta = None if beta is None else beta.unsqueeze(-1).transpose(1, 2)
        return Tokens(q, k, v, decay, beta, None if starts is None else starts.unsqueeze(1))

    def in_runs(self, runs: int) -> Tokens:
        """Return the tokens in runs of equal length."""
        return Tokens(*(None if x is None else x.unflatten(2, (runs, -1)) for x in self))  # type: ignore[arg-type]

    @property
    def chunk(self) -> int:
        """The number of tokens to take at a time."""
        return max(1, min(self.q.shape[-2], CHUNK if self.decay.shape[-1] == 1 else CHUNK_BY_ROW))


class Chunks(NamedTuple):
    """Chunks of a sequence as functions of the state S before each: it becomes a S + b.

    Results of its c tokens are read S + within (added - erased S). Shapes: a [..., n, k, k] (with `erased`) or
    [..., n, k or 1, 1], b [..., n, k, v], read and erased [..., n, c, k], within [..., n, c, c], added [..., n, c, v].
    """

    a: Tensor
    b: Tensor
    read: Tensor
    within: Tensor
    added: Tensor
    erased: Tensor | None

    def results(self, states: Tensor) -> Tensor:
        """Return the tokens' results [..., (n c), v] for the states before each chunk [..., n, k, v]."""
        added = self.added if self.erased is None else self.added - self.erased @ states
        return (self.read @ states + self.within @ added).flatten(-3, -2)


def in_chunks(tokens: Tokens) -> Chunks:
    """Return the chunks of a sequence, or of each of its runs. Tokens that fill a last chunk change nothing."""
    size, starts = tokens.chunk, tokens.starts
    q, k, v, decay = (cut(x, -2, size) for x in tokens[:4])
    ages = decay.clamp(min=LEAST).cumsum(-2)  # [..., n, c, k or 1]: the log of the decay since the chunk's start
    order = torch.arange(size, device=q.device)
    sees = order[:, None] >= order  # [..., c, c]: of a token, those up to itself, in its document
    if starts is not None:
        document = cut(starts, -1, size).cumsum(-1)  # 0: the one that goes on from the chunk before
        sees = sees & (document[..., :, None] == document[..., None, :])
    between = (ages[..., :, None, :] - ages[..., None, :, :]).where(sees[..., None], -torch.inf).exp()
    age, last = ages.exp(), ages[..., -1:, :]
    to_end, whole = (last - ages).exp(), last.exp().transpose(-1, -2)  # [..., c, k or 1], [..., k or 1, 1]
    if starts is not None:
        goes_on, ends = document == 0, document == document[..., -1:]
        age, to_end = age * goes_on[..., None], to_end * ends[..., None]
        whole = whole * goes_on[..., -1:, None]
    read, remaining, within = q * age, k * to_end, products(q, k, between)
    if tokens.beta is None:
        return Chunks(whole, remaining.mT @ v, read, within, v, None)
    rates = cut(tokens.beta, -2, size)
    system = products(k * rates, k, between)  # its diagonal counts as ones
    right = torch.cat([v * rates, k * rates * age], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    added, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return Chunks(identity * whole - remaining.mT @ erased, remaining.mT @ added, read, within, added, erased)


def products(x: Tensor, y: Tensor, between: Tensor) -> Tensor:
    """Return the products of x and y [..., c, k] under decays [..., c, c, k or 1], as [..., c, c]."""
    if between.shape[-1] == 1:
        return x @ y.mT * between.squeeze(-1)
    return (x[..., :, None, :] * y[..., None, :, :] * between).sum(-1)


def cut(x: Tensor, dim: int, size: int) -> Tensor:
    """Return a dim t as [n, size], with zeros at the end."""
    return F.pad(x, [0, 0] * (-1 - dim) + [0, -x.shape[dim] % size]).unflatten(dim, (-1, size))


@torch.library.impl(library, "linear_attention", "CompositeImplicitAutograd")
def _linear_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, starts: Tensor | None
) -> Tensor:
    chunks = in_chunks(Tokens.by_head(q, k, v, decay, beta, starts))
    states = linear_recurrence(chunks.a, chunks.b, torch.zeros_like(chunks.b[..., 0, :, :]))
    return chunks.results(states[..., :-1, :, :])[..., : v.shape[1], :].transpose(1, 2).contiguous()


# ---- convolutions --------------------------------------------------------------------------------------


@torch.library.impl(library, "causal_conv1d", "CompositeImplicitAutograd")
def _causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None) -> Tensor:
    width = weight.shape[-1]
    before = [width - 1, 0]
    return convolved(F.pad(x, before), None if starts is None else F.pad(starts, before), weight, bias)


def convolved(x: Tensor, starts: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the sums of the last w inputs of each token, [..., t], given w - 1 inputs before the first.

    Args:
        x: the inputs, [b, d, ..., w - 1 + t].
        starts: where documents start, [b, ..., w - 1 + t]; None: nowhere.
        weight: of each channel, [d, w], the last one for the token itself.
        bias: of each channel, [d]; None: none.
    """
    width, kind = weight.shape[-1], torch.promote_types(x.dtype, torch.float32)
    size = x.shape[-1] - width + 1
    by_channel = [-1, *[1] * (x.dim() - 2)]
    document = None if starts is None else starts.cumsum(-1).unsqueeze(1)
    total = None if bias is None else bias.to(kind).view(by_channel)
    for place in range(width):
        term = x[..., place : place + size].to(kind) * weight[:, place].to(kind).view(by_channel)
        if document is not None:
            term = term * (document[..., place : place + size] == document[..., width - 1 :])
        total = term if total is None else total + term
    return total.to(x.dtype)  # type: ignore[union-attr]
