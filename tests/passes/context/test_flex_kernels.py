"""Attention by interval as CUDA computes it: FlexAttention's operator, run on the CPU here, and its lists of blocks."""

from __future__ import annotations

import functools

import pytest
import torch
from attention_cases import random
from bounds import BOUNDS, bounds_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from passes.context import flex, operators
from passes.idioms.intervals import why_no_kernel
from passes.ops.attend import attend, attend_backward
from passes.torch_private import from_torch, inductor_decompositions

SIZE = 300
ONE_RUN = pytest.param(None, id="one run")
TWO_RUNS = pytest.param(torch.tensor([150, 0]), id="two runs")


# ---- blocks -----------------------------------------------------------------------------------------


def dense(first: Tensor, last: Tensor, where: Tensor) -> Tensor:
    """Return the keys that each query sees, bool[b, 1, s, t]."""
    return ((where >= first[..., None]) & (where < last[..., None])).unsqueeze(1)


def in_squares(seen: Tensor, size: int) -> Tensor:
    """Return pairs by pairs of blocks, unseen beyond the sequence, bool[b, 1, m, n, size * size]."""
    rows, keys = (-n % size for n in seen.shape[-2:])
    seen = torch.nn.functional.pad(seen, [0, keys, 0, rows])
    return seen.unflatten(3, (-1, size)).unflatten(2, (-1, size)).transpose(3, 4).flatten(-2)


def pairs_in(count: Tensor, order: Tensor, columns: int) -> Tensor:
    """Return the pairs of a list of blocks; check that lists are complete, in order and without repeats."""
    pairs = torch.zeros(*order.shape[:-1], columns, dtype=torch.bool)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in order.shape[:-1])).tolist():
        blocks = order[tuple(place)][: count[tuple(place)]]
        assert bool((blocks.diff() > 0).all()) and bool((order[tuple(place)] < columns).all())
        pairs[tuple(place)][blocks] = True
    return pairs


@pytest.mark.parametrize("runs", [ONE_RUN, TWO_RUNS])
@pytest.mark.parametrize("form", BOUNDS)
def test_blocks_are_those_of_the_mask(form, runs):
    """Check that seen blocks are listed, and that blocks listed as full are fully seen and end within the sequence."""
    first, last = (x.to(torch.int32) for x in bounds_of(form, SIZE))
    where = flex.positions(runs, SIZE, first.device)
    mask = flex.block_mask(first, last, where, lambda *_: None)
    squares = in_squares(dense(first, last, where), flex.BLOCK)
    some = pairs_in(mask.kv_num_blocks, mask.kv_indices, squares.shape[3])
    full = pairs_in(mask.full_kv_num_blocks, mask.full_kv_indices, squares.shape[3])
    assert not (some & full).any() and not (full & ~squares.all(-1)).any()
    assert not (squares.any(-1) & ~some & ~full).any()
    if runs is None and form != "any":  # else a block may be looked at for nothing: where runs meet, where bounds jump
        assert torch.equal(full, squares.all(-1)) and torch.equal(some | full, squares.any(-1))
    assert torch.equal(pairs_in(mask.q_num_blocks, mask.q_indices, squares.shape[2]), some.transpose(2, 3))
    assert torch.equal(pairs_in(mask.full_q_num_blocks, mask.full_q_indices, squares.shape[2]), full.transpose(2, 3))


def test_long_sequences_have_larger_blocks():
    """Check that lists of blocks stay small."""
    sizes = {2**10: 128, 2**17: 128, 2**17 + 1: 256, 2**20: 1024}
    assert {n: flex.block_size(4, n) for n in sizes} == sizes


# ---- numbers ----------------------------------------------------------------------------------------


@functools.cache
def given_of(form: str, heads: tuple[int, int], widths: tuple[int, int]):
    """Return queries, keys, values, gradient of the result and bounds."""
    (h, g), (e, f) = heads, widths
    shapes = (2, h, SIZE, e), (2, g, SIZE, e), (2, g, SIZE, f), (2, h, SIZE, f)
    return [random(*shape) for shape in shapes], bounds_of(form, SIZE)


def compare(form: str, runs: Tensor | None, heads: tuple[int, int] = (4, 2), widths: tuple[int, int] = (16, 16)) -> None:
    (q, k, v, gradient), bounds = given_of(form, heads, widths)
    arguments = (*bounds, runs, [], 0.3, "")
    wanted, actual = attend(q, k, v, *arguments), flex.forward(q, k, v, *arguments)
    assert bool(torch.isinf(wanted[1]).any()) == bool((bounds[0] >= bounds[1]).any())
    wanted += attend_backward(gradient, q, k, v, *wanted, *arguments)
    actual += flex.backward(gradient, q, k, v, *actual, *arguments)
    for x, y in zip(actual, wanted, strict=True):
        assert x.is_contiguous()
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", BOUNDS)
def test_it_is_what_the_cpu_computes(form):
    compare(form, torch.tensor([150, 0]))


@pytest.mark.parametrize("heads, widths", [((4, 1), (16, 16)), ((6, 2), (8, 8)), ((2, 2), (16, 24)), ((2, 2), (24, 8))])
def test_heads_of_any_width_and_number(heads, widths):
    compare("any", None, heads, widths)


def test_blocks_of_a_ring_add_up():
    """Attend to half of the keys at a time; the backward gets the merged result."""
    (q, k, v, gradient), bounds = given_of("documents and window", (4, 2), (16, 16))
    full = attend(q, k, v, *bounds, None, [], 0.3, "")
    halves = [(k[:, :, i : i + 150], v[:, :, i : i + 150], (*bounds, torch.tensor([i]), [], 0.3, "")) for i in (0, 150)]
    parts = [flex.forward(q, *keys, *arguments) for *keys, arguments in halves]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(part * (level - lse).exp().unsqueeze(-1) for part, level in parts)
    torch.testing.assert_close((out, lse), full, rtol=0, atol=1e-11)
    wanted = attend_backward(gradient, q, k, v, *full, *bounds, None, [], 0.3, "")
    gradients = [flex.backward(gradient, q, *keys, out, lse, *arguments) for *keys, arguments in halves]
    torch.testing.assert_close(gradients[0][0] + gradients[1][0], wanted[0], rtol=0, atol=1e-11)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([gradients[0][i], gradients[1][i]], 2), wanted[i], rtol=0, atol=1e-11)


# ---- what is taken, and what comes of it ------------------------------------------------------------


@pytest.mark.parametrize("dtype, widths, why", [
    (torch.bfloat16, (128, 128), ""),
    (torch.float32, (160, 160), ""),
    (torch.float16, (3, 256), ""),
    (torch.float64, (64, 64), "takes bfloat16, float16, float32, not float64"),
    (torch.bfloat16, (512, 64), "takes heads of up to 256, not of 512"),
    (torch.bfloat16, (64, 512), "takes heads of up to 256, not of 512"),
])  # fmt: skip
def test_what_the_kernel_does_not_take_is_said(dtype, widths, why):
    with FakeTensorMode():
        q, v = (torch.empty(1, 2, 4, width, dtype=dtype, device="cuda") for width in widths)
    text = why_no_kernel(q, q, v)
    assert why in text and bool(why) == bool(text)
    wide, value = flex.widths(q, v)
    assert wide >= max(widths) or why
    assert wide <= 128 or wide in (192, 256) or why
    assert value <= wide or why


def test_the_graph_has_the_operator_and_no_mask():
    def both(q, k, v, gradient, first, last, runs):
        inputs = (first, last, runs, [], 0.3, "")
        out, lse = attend(q, k, v, *inputs)
        return out, lse, *attend_backward(gradient, q, k, v, out, lse, *inputs)

    with FakeTensorMode():
        q, k, v, gradient = (torch.empty(2, n, SIZE, 16, dtype=torch.bfloat16) for n in (4, 2, 2, 4))
        bounds = [torch.empty(2, SIZE, dtype=torch.int64) for _ in range(2)]
        runs = torch.empty(2, dtype=torch.int64)
        module = make_fx(both, inductor_decompositions() | operators.compiled_for("cuda"))(q, k, v, gradient, *bounds, runs)
    called = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert called.count("flex_attention") == called.count("flex_attention_backward") == 1
    assert not [name for name in called if name.startswith("ct.")]
    values = [value for node in module.graph.nodes if isinstance(value := from_torch(node).value, Tensor)]
    assert not [value.shape for value in values if value.shape[-2:] == (SIZE, SIZE)]
    assert max(value.numel() for value in values) == q.numel()
