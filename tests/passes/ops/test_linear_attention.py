"""Linear attention and short convolutions by value: against the recurrence token by token, and documents alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from passes.ops.linear_attention import causal_conv1d, linear_attention, linear_recurrence

generator = torch.Generator().manual_seed(3)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def token_by_token(q, k, v, decay, beta):
    """The formulas, as the operator's docstring has them."""
    state, out = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=k.dtype), []
    decay = decay if decay.dim() == 4 else decay[..., None]
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, :, None].exp()
        new = v[:, t] if beta is None else (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * new[:, :, None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1)


def operands(tokens: int, by_row: bool, delta: bool) -> list[torch.Tensor | None]:
    """Return operands of linear attention: 2 rows, 3 heads, states of 4 x 5."""
    q, k, v = real(2, tokens, 3, 4), F.normalize(real(2, tokens, 3, 4), dim=-1), real(2, tokens, 3, 5)
    decay = -real(2, tokens, 3, *[4] * by_row).square()
    return [x if x is None else x.detach().requires_grad_() for x in (q, k, v, decay, real(2, tokens, 3).sigmoid() if delta else None)]


def same(ours, theirs, inputs):
    """Compare values and gradients of two computations."""
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights, present = torch.randn(ours.shape, generator=generator, dtype=ours.dtype), [x for x in inputs if x is not None]
    for a, b in zip(torch.autograd.grad((ours * weights).sum(), present), torch.autograd.grad((theirs * weights).sum(), present)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tokens", [1, 15, 64, 150])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_chunks_compute_the_recurrence(tokens, by_row, delta):
    inputs = operands(tokens, by_row, delta)
    same(linear_attention(*inputs, None), token_by_token(*inputs), inputs)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_documents_are_as_alone(by_row, delta):
    """Documents end inside chunks, at their borders, and after one token."""
    inputs, borders = operands(150, by_row, delta), [0, 1, 30, 64, 70, 128, 150]
    starts = torch.zeros(2, 150, dtype=torch.bool)
    starts[:, borders[:-1]] = True
    alone = [token_by_token(*(x if x is None else x[:, a:b] for x in inputs)) for a, b in zip(borders, borders[1:])]
    same(linear_attention(*inputs, starts), torch.cat(alone, 1), inputs)


@pytest.mark.parametrize("delta", [False, True])
def test_a_decay_to_nothing_has_finite_gradients(delta):
    """A token that clears the state: other kernels compute the difference of two infinite ages."""
    inputs = operands(40, False, delta)
    with torch.no_grad():
        inputs[3][:, 17] = -1e30
    same(linear_attention(*inputs, None), token_by_token(*inputs), inputs)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("tokens", [2, 20])
def test_a_convolution_is_pytorchs(width, tokens):
    x, weight, bias = real(2, 3, tokens), real(3, width), real(3)
    theirs = F.conv1d(x, weight[:, None], bias, padding=width - 1, groups=3)[..., :tokens]
    same(causal_conv1d(x, weight, bias, None), theirs, [x, weight, bias])


def test_a_convolution_ends_at_documents():
    x, weight, starts = real(2, 3, 12), real(3, 4), torch.zeros(2, 12, dtype=torch.bool)
    starts[:, [0, 2, 3, 9]] = True
    alone = [causal_conv1d(x[..., a:b], weight, None, None) for a, b in ((0, 2), (2, 3), (3, 9), (9, 12))]
    same(causal_conv1d(x, weight, None, starts), torch.cat(alone, -1), [x, weight])


@pytest.mark.parametrize("shape", [(2, 6, 4, 4), (2, 6, 4, 1), (2, 6, 1, 1), (0, 4, 4)], ids=str)
def test_gradients_of_the_recurrence(shape):
    a, b = real(*shape), real(*shape[:-2], 4, 5)
    first = real(*shape[:-3], 4, 5)
    assert torch.autograd.gradcheck(linear_recurrence, (a, b, first))
