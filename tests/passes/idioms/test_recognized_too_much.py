"""Forms close to attention, heads and casts that mean something else: values are those of eager PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import NO_DECAY, Embedded, batches, compile_lockstep, points, squared_error, trained_alike
from torch import nn

from compiler_trainer import UserError
from passes.context import kernels
from passes.context.sdpa import attention_with_dropout
from passes.ops.attend import attend

SCORES = {
    "tanh of -inf": lambda x, hides: x.masked_fill(hides, -math.inf).tanh() * 2,
    "relu of the lowest": lambda x, hides: x.masked_fill(hides, torch.finfo(x.dtype).min).relu(),
    "minus the lowest": lambda x, hides: -x.masked_fill(hides, torch.finfo(x.dtype).min),
    "times a negative number": lambda x, hides: x.masked_fill(hides, torch.finfo(x.dtype).min) * -0.35,
    "plus a number": lambda x, hides: x.masked_fill(hides, -math.inf) + 0.5,
    "times almost zero": lambda x, hides: x.masked_fill(hides, torch.finfo(x.dtype).min) * 1e-308,
    "over a number": lambda x, hides: x.masked_fill(hides, -math.inf) / 2.8,
}


class Attention(nn.Module):
    def __init__(self, score):
        super().__init__()
        torch.manual_seed(0)
        self.score, self.embed, self.qkv, self.head = score, nn.Embedding(61, 16), nn.Linear(16, 48), nn.Linear(16, 61)

    def forward(self, tokens):
        rows, size = tokens.shape
        q, k, v = (x.view(rows, size, 2, 8).transpose(1, 2) for x in self.qkv(self.embed(tokens)).split(16, -1))
        at = torch.arange(size)
        weights = self.score(q @ k.transpose(-1, -2), at[:, None] < at).softmax(-1)
        return self.head((weights @ v).transpose(1, 2).reshape(rows, size, 16))


def next_token(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def some_tokens():
    return [{name: batch[name] for name in ("tokens", "labels")} for batch in batches()]


@pytest.mark.parametrize("name", SCORES)
def test_a_mask_under_another_function_is_no_mask(name):
    step = trained_alike(Attention(SCORES[name]).double(), next_token, some_tokens(), {"dp_shard": 1}, {"name": "sgd"})
    (counts,) = [entry["report"]["counts"] for entry in step.report["passes"] if entry["name"] == "intervals"][:1]
    assert any(counts.values()) == (name in ("plus a number", "over a number"))


class Head(nn.Module):
    def __init__(self, logits, bias):
        super().__init__()
        torch.manual_seed(0)
        self.logits, self.embed, self.hidden = logits, nn.Embedding(61, 8), nn.Linear(8, 8)
        self.weight, self.bias = nn.Parameter(torch.randn(61, 8)), nn.Parameter(torch.randn(bias))

    def forward(self, tokens):
        return self.logits(self, self.hidden(self.embed(tokens)).tanh().flatten(0, 1))


HEADS = {
    "%addmm adds more than a bias": (lambda m, h: torch.addmm(m.bias, h, m.weight.t()).log_softmax(-1), (1, 61)),
    "%log_softmax is followed by %add": (lambda m, h: F.linear(h, m.weight).log_softmax(-1) + m.bias, (61,)),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_no_matmul_with_a_bias_are_not_chunked(name):
    """Check that a limit that the logits exceed is refused, and that logits stay whole without one."""
    def loss(model, batch):
        return F.nll_loss(model(batch["tokens"]), batch["labels"].flatten(), ignore_index=-100)

    model, data = Head(*HEADS[name]).double(), some_tokens()
    trained_alike(model, loss, data, {"dp_shard": 1}, NO_DECAY)
    with pytest.raises(UserError, match=f"passes.chunk_loss.logits_mib: 0.0001 has no effect: .*{name}"):
        compile_lockstep(model, loss, data[0], {}, NO_DECAY, passes={"chunk_loss": {"logits_mib": 1e-4}})


def test_a_row_that_sees_nothing_is_zero_also_with_dropout_and_a_mask_of_numbers():
    torch.manual_seed(0)
    values = [torch.randn(1, 1, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(4, 4, dtype=torch.float64)
    mask[0] = -math.inf
    ours = attention_with_dropout(lambda weights, p: weights, *values, mask, 0.1)
    theirs = F.scaled_dot_product_attention(*values, mask)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(out.square().sum(), values) for out in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_tiles_of_the_same_queries_are_merged(monkeypatch):
    monkeypatch.setattr(kernels, "kernel_for", lambda q, v, b: (kernels._math, kernels._math_backward))  # as on CUDA in fp32
    monkeypatch.setattr(kernels, "is_plain", lambda *args: True)
    q, k, v = (torch.randn(1, 1, n, 16) for n in (64, 9000, 9000))
    first, last = torch.zeros(1, 64, dtype=torch.int64), torch.full((1, 64), 9000)
    out, _ = attend(q, k, v, first, last, None, [], 0.25, "")
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))


def test_zero_and_minus_zero_are_two_constants():
    class Signs(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(5, 3)

        def forward(self, x):
            y = self.linear(x)
            return torch.copysign(y, 0.0) - torch.copysign(y, -0.0)

    trained_alike(Signs().double(), squared_error, points(4), {}, NO_DECAY)


@pytest.mark.parametrize("cut", [lambda x: x.chunk(2), lambda x: (x[:2], x[2:])], ids=["chunk", "slices"])
@pytest.mark.parametrize("by_author", [True, False], ids=["dtype of the call", "output_dtype"])
def test_sums_of_logs_in_float32_are_not_rounded_between(cut, by_author):
    dtype = {"dtype": torch.float32} if by_author else {}

    def loss(model, batch):
        logits = model(batch["tokens"])
        logs = F.log_softmax(logits, -1, **dtype).gather(-1, batch["tokens"].unsqueeze(-1)).squeeze(-1).sum(-1)
        chosen, rejected = cut(logs)
        return (chosen - rejected).mean()

    batch = {"tokens": torch.randint(0, 61, (4, 256), generator=torch.Generator().manual_seed(0))}
    cast = {"param_dtype": "bfloat16", "output_dtype": None if by_author else "float32"}
    step = compile_lockstep(Embedded(), loss, batch, {"dp_shard": 1}, {"name": "sgd"}, passes={"cast": cast})
    model = Embedded()
    half = Embedded().bfloat16()
    half.load_state_dict(model.state_dict())
    expected = loss(half if by_author else lambda tokens: half(tokens).float(), batch).item()
    assert step(batch, 0.0)["loss"] == pytest.approx(expected, abs=0.1)  # bf16 rounds sums of 256 logs to multiples of 8


class Function(nn.Module):
    """A function of activations [row, 7, 6] between two linear layers."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.function = nn.Linear(6, 6), nn.Linear(6, 3), function

    def forward(self, x):
        return self.down(self.function(torch.tanh(self.up(x))))


def heads(x):
    return x.view(len(x), x.shape[1], 2, 3).transpose(1, 2)


def of_function(function, rows=5, size=7, **options):
    """Train a function as plain PyTorch does, check that values are the same, and return the report on attention."""
    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(rows, size, 6, generator=generator, dtype=torch.float64)} for _ in range(3)]
    model = Function(lambda x: function(x).transpose(1, 2).reshape(rows, size, 6)).double()
    step = trained_alike(model, lambda model, b: (model(b["x"]) - 0.3).square().mean(), data, {}, NO_DECAY, **options)
    (report,) = [entry["report"] for entry in step.report["passes"] if entry["name"] == "intervals"]
    return report


def ones(*shape, dtype=torch.bool):
    return torch.ones(shape, dtype=dtype)


def by_positions(of_keys):
    """Return a mask of documents by positions that restart, whose first two keys are seen."""
    p = (torch.arange(7) - torch.arange(7)[:, None]) % 7
    ids = (torch.diff(p, prepend=p[:, :1] - 2) != 1).cumsum(-1)
    return (ids[:, None, :, None] == ids[:, None, None, :]) & (of_keys(p)[:, None, None, :] <= 1)


MASKS = {  # mask, whether it is read
    "a triangle of one row": (lambda: ones(1, 7).tril(3), True),
    "a triangle of one row without its first keys": (lambda: ones(1, 7).triu(2), True),
    "a row of numbers": (lambda: torch.logical_and(causal(), (torch.arange(7) % 3)[:, None]), True),
    "bits of numbers, inverted": (
        lambda: torch.logical_and(ones(7, 7), ~ones(7, 7, dtype=torch.int64).tril()), False,
    ),
    "bits of numbers": (
        lambda: torch.logical_and(ones(7, 7), ones(7, 7, dtype=torch.int64).tril() & (torch.arange(7)[:, None] + 1)), False,
    ),
    "numbers that become 0": (
        lambda: torch.logical_and(ones(7, 7), torch.where(~causal(), torch.zeros(()), -0.5).to(torch.int64)), False,
    ),
    "a number that rounds to 0": (lambda: torch.where(~causal(), torch.zeros(()), 1e-50).bool(), False),
    "positions of another row": (lambda: by_positions(lambda p: p.t()), False),
    "positions": (lambda: by_positions(lambda p: p), True),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_look_like_others(name):
    mask, read = MASKS[name]
    report = of_function(lambda x: F.scaled_dot_product_attention(q := heads(x), q, q, mask()), rows=7)
    assert report["counts"] == {"attention_by_interval": int(read)}, report["notes"]


def softmax_of(scores, last=lambda result: result, split=heads):
    """Return attention whose scores are a function of `q @ k`."""

    def attention(x):
        q = split(x)
        return last(scores(q @ q.mT).softmax(-1) @ q)

    return attention


def causal(size=7):
    return torch.arange(size)[:, None] >= torch.arange(size)


def hide(scores):
    return scores.masked_fill(~causal(scores.shape[-1]), -math.inf)


def guarded(keepdim):
    """Return attention of 6 tokens, of which the first sees none: `any` gives [6, 1], or [6], which is along keys."""
    mask = causal(6).tril(-1)
    sees = mask.any(-1, keepdim)
    return softmax_of(
        lambda s: torch.where(sees, torch.where(mask, s, -math.inf), 0.0), lambda r: torch.where(sees, r, 0.0),
        lambda x: x.unsqueeze(1),
    )  # fmt: skip


def few_dims(keys, values, attend):
    """Return attention in which all rows share keys or values of three dims, those of the first row."""
    return lambda x: attend(q := heads(x), q[0] if keys else q, q[0] if values else q)


def small():
    return torch.arange(7, dtype=torch.uint8)


def alibi(scores):
    at = torch.arange(scores.shape[-1])
    return scores - (at[:, None] - at).masked_fill(~causal(scores.shape[-1]), 1000)


WRITTEN_OUT = {  # attention, its size, whether it is read
    "guards of queries": (lambda x: guarded(True)(x), (5, 6), True),
    "guards along keys": (lambda x: guarded(False)(x).nan_to_num(), (5, 6), False),
    "largest scores of queries": (softmax_of(lambda s: (s := hide(s)) - s.amax(-1, True)), (5, 7), True),
    "largest scores along keys": (softmax_of(lambda s: (s := hide(s)) - s.amax(-1)), (2, 2), False),
    "a mask of integers": (softmax_of(lambda s: s + torch.where(causal(), 0, -10000)), (5, 7), False),
    "slopes of integers": (softmax_of(alibi), (5, 7), False),
    "keys of three dims": (few_dims(True, False, lambda q, k, v: hide(q @ k.mT).softmax(-1) @ v), (5, 7), False),
    "turned keys of three dims": (
        lambda x: hide((q := heads(x)) @ x[0].view(7, 2, 3).permute(1, 2, 0)).softmax(-1) @ q, (5, 7), False,
    ),
    "values of three dims": (few_dims(False, True, lambda q, k, v: hide(q @ k.mT).softmax(-1) @ v), (5, 7), False),
    "both, of PyTorch's operator": (
        few_dims(True, True, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal())), (5, 7), False,
    ),
    "keys of one row, of PyTorch's operator": (
        lambda x: F.scaled_dot_product_attention(q := heads(x), q[:1], q[:1], causal()), (5, 7), False,
    ),
    "a bias with more rows": (
        lambda x: hide((q := heads(x[:1])) @ q.mT + torch.arange(5).view(5, 1, 1, 1) * torch.arange(7)).softmax(-1) @ q, (5, 7), False,
    ),
    "a mask with more rows": (
        lambda x: hide((q := heads(x[:1])) @ q.mT + torch.zeros(5, 1, 1, 1)).softmax(-1) @ q, (5, 7), False,
    ),
    "integers that wrap around": (softmax_of(lambda s: hide(s * (small() - 3))), (5, 7), False),
    "negative integers that wrap around": (softmax_of(lambda s: hide(s + -small())), (5, 7), False),
    "integers of 32 bits": (softmax_of(lambda s: hide(s + small().int() * -1)), (5, 7), True),
    "rounded weights": (lambda x: hide((q := heads(x)) @ q.mT).softmax(-1).long().double() @ q + q, (5, 7), False),
    "rounded scores": (lambda x: hide(((q := heads(x)) @ q.mT * 4).long() * 0.5).double().softmax(-1) @ q, (5, 7), False),
    "rounded scores before their scale": (lambda x: hide((4 * (q := heads(x)) @ q.mT).long() * 0.5).double().softmax(-1) @ q, (5, 7), False),
    "a rounded quotient": (softmax_of(lambda s: hide(torch.div(s, 0.5, rounding_mode="floor"))), (5, 7), False),
    "a multiple of what is added": (softmax_of(lambda s: hide(s.add(torch.arange(7), alpha=2))), (5, 7), False),
    "no truth value is -inf": (
        softmax_of(lambda s: torch.where(causal(), s, torch.full((), -math.inf).bool())), (5, 7), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_scores_that_look_like_others(name):
    attention, (rows, size), read = WRITTEN_OUT[name]
    report = of_function(attention, rows, size)
    assert report["counts"] == {"attention_by_interval": int(read)}, report["notes"]
