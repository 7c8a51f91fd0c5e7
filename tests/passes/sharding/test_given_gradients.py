"""An author's gradients need not be derivatives: they may map zeros to other values, in padding too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mixture import Mixture, sequences
from oracle import LRS, squared_error, trained_alike
from sweeps import in_turn
from torch import Tensor, nn
from torch.autograd import Function

from compiler_trainer import UserError
from passes.ir.ir import CompileError
from passes.rules import RULES, add_rule
from passes.sharding.partition import Partitioner

GIVEN = {
    "scaled": lambda g, x: 1.1 * g * x.cos(),
    "affine": lambda g, x: 0.01 + 0.5 * g,
    "regularized": lambda g, x: g + 1e-2 * x,
    "quadratic": lambda g, x: g * g.abs() + 1e-3 * x,
    "sign": lambda g, x: 0.01 * torch.sign(g) + 0.003,
    "clamped": lambda g, x: g.clamp(min=1e-3),
    "exponential": lambda g, x: torch.exp(g) - 0.5,
    "centered": lambda g, x: g - g.mean() + 0.1,
    "normalized": lambda g, x: g / (0.1 + g.norm()) + 1e-3,
    "cosine": lambda g, x: torch.cos(g) * x,
}
PLACES = ("weight", "activation", "hidden", "logits", "loss of a token", "loss")
# (mesh, rows of 9 tokens): no size divides evenly
MESHES = [
    ({"cp": 2}, 2),
    ({"dp_shard": 2}, 3),
    ({"dp_replicate": 2}, 3),
    ({"tp": 3}, 2),
    ({"dp_shard": 2, "tp": 3}, 3),
    ({"cp": 2, "tp": 2}, 2),
    ({"dp_shard": 2, "cp": 2}, 3),
]


def function(backward):
    """Return a function that halves, with the given gradient."""

    class Halved(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x / 2

        @staticmethod
        def backward(ctx, g):
            return backward(g, *ctx.saved_tensors)

    return Halved.apply  # bound before the capture, as in PyTorch's own examples


class Model(nn.Module):
    """A block with a norm and a feed-forward; `fn` is called at the named places."""

    def __init__(self, fn, places):
        super().__init__()
        torch.manual_seed(0)
        self.fn, self.places = fn, places
        self.embed, self.norm = nn.Embedding(11, 6), nn.Parameter(torch.rand(6))
        self.up, self.down, self.head = nn.Linear(6, 10), nn.Linear(10, 6, bias=False), nn.Linear(6, 11, bias=False)
        self.double()

    def at(self, place, x):
        return self.fn(x) if place in self.places else x

    def forward(self, tokens):
        x = self.at("activation", self.embed(tokens))
        y = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.norm
        hidden = F.silu(F.linear(y, self.at("weight", self.up.weight), self.up.bias))
        return self.at("logits", self.head(x + self.down(self.at("hidden", hidden))))


def loss(model, batch):
    logits = model(batch["tokens"])
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="none")
    return model.at("loss", model.at("loss of a token", losses).sum() / (batch["labels"] != -100).sum())


def data(rows):
    generator = torch.Generator().manual_seed(1)

    def batch_of():
        tokens, labels = (torch.randint(0, 11, (rows, 9), generator=generator) for _ in range(2))
        return {"tokens": tokens, "labels": labels.masked_fill(torch.rand(rows, 9, generator=generator) < 0.3, -100)}

    return [batch_of() for _ in LRS]


def check(fn, places, mesh, rows):
    trained_alike(Model(fn, places), loss, data(rows), mesh, {"name": "sgd"}, lower={"backend": "eager"})


@pytest.mark.parametrize(("kind", "where"), in_turn(GIVEN, MESHES), ids=str)
@pytest.mark.sample(2)
def test_at_all_places_at_once(kind, where):
    check(function(GIVEN[kind]), PLACES, *where)


@pytest.mark.parametrize(("place", "kind", "where"), in_turn(PLACES, ["quadratic", "affine", "centered"], MESHES[::2]), ids=str)
@pytest.mark.sample(2)
def test_at_one_place(place, kind, where):
    check(function(GIVEN[kind]), (place,), *where)


class Routed(Mixture):
    """A mixture of experts with `fn` at the named places."""

    def __init__(self, fn, places, **changes):
        torch.manual_seed(0)
        super().__init__(**changes)
        self.fn, self.places = fn, places
        self.double()

    def at(self, place, x):
        return self.fn(x) if place in self.places else x


AT_EXPERTS, OF_ROWS = ("scores", "chosen", "up", "down"), ("routed", "hidden", "made")
EXPERT_MESHES = [  # (mesh, method), with 5 experts and 3 rows of 5: no size divides evenly
    ({"dp_shard": 2, "ep": 2}, "all_gather"),
    ({"cp": 2, "ep": 2}, "dropless"),
    ({"tp": 2, "ep": 2}, "all_gather"),
    ({"dp_shard": 4, "ep": 2}, "dropless"),
    ({"dp_shard": 2, "tp": 2, "ep": 4}, "all_gather"),
    ({"dp_shard": 2, "cp": 2, "ep": 4}, "dropless"),
    ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, "dropless"),
]


def check_routed(fn, places, mesh, dispatch):
    how = {"passes": {"moe": {"dispatch": dispatch}}, "lower": {"backend": "eager"}}
    trained_alike(Routed(fn, places, experts=5), squared_error, sequences(3, 5), mesh, {"name": "sgd"}, **how)


@pytest.mark.parametrize(("kind", "where"), in_turn(GIVEN, EXPERT_MESHES), ids=str)
@pytest.mark.sample(2)
def test_at_all_places_of_experts(kind, where):
    check_routed(function(GIVEN[kind]), AT_EXPERTS, *where)


@pytest.mark.full
@pytest.mark.parametrize(("place", "kind", "where"),
                         in_turn(AT_EXPERTS, ["quadratic", "affine", "centered"], EXPERT_MESHES[1::2]), ids=str)
def test_at_one_place_of_experts(place, kind, where):
    check_routed(function(GIVEN[kind]), (place,), *where)


@pytest.mark.parametrize(("place", "where"), list(zip(OF_ROWS, EXPERT_MESHES[1::2])), ids=str)
@pytest.mark.sample(2)
def test_of_rows_that_are_to_travel_it_is_refused(place, where):
    """A function may depend on the order of rows, or on the empty rows of a buffer."""
    with pytest.raises(UserError, match="rows sorted by expert are gathered: %halved_0 .* is fn::Halved_0 of them"):
        check_routed(function(GIVEN["affine"]), (place,), *where)


@pytest.mark.parametrize("place", OF_ROWS)
@pytest.mark.sample(2)
def test_of_rows_that_stay(place):
    trained_alike(Routed(function(GIVEN["centered"]), (place,), experts=5), squared_error, sequences(3, 5),
                  {"dp_shard": 2, "tp": 2}, {"name": "sgd"}, lower={"backend": "eager"})


@pytest.mark.parametrize("kind", ["affine", "quadratic", "sign", "exponential"])
@pytest.mark.sample(2)
def test_a_gradient_left_unmasked_is_heard(monkeypatch, kind):
    monkeypatch.setattr(Partitioner, "zero_padding", lambda self, gradient, spec: gradient)
    with pytest.raises(CompileError, match="is a gradient whose padding may hold .*; it must be 0"):
        check(function(GIVEN[kind]), ("activation",), {"dp_shard": 2}, 3)


@pytest.mark.parametrize("place", ["hidden", "loss of a token"])
def test_a_mask_left_out_is_heard(monkeypatch, place):
    monkeypatch.setattr(Partitioner, "padding", lambda self, i, x, spec, decision, node: x)
    with pytest.raises(CompileError, match=r"needs \d in the padding of operand"):
        check(function(GIVEN["scaled"]), (place,), {"dp_shard": 2}, 3)


@torch.library.custom_op("test_given_gradients::halved", mutates_args=())
def halved(x: Tensor, by: float = 2.0) -> Tensor:
    return x / by


halved.register_fake(lambda x, by=2.0: torch.empty_like(x))
halved.register_autograd(
    lambda ctx, g: (g * g.abs() + 0.01 * ctx.saved_tensors[0] + 1e-3, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@pytest.fixture(params=["... -> ...", None], ids=["with a rule", "without"])
def rule(request):
    if request.param:
        add_rule("test_given_gradients::halved", request.param)
    yield
    RULES.pop("test_given_gradients::halved", None)


@pytest.mark.parametrize(("mesh", "rows"), MESHES[::2], ids=str)
@pytest.mark.sample(2)
def test_registered_with_an_operator(rule, mesh, rows):
    check(lambda x: halved(x, by=2.0), PLACES, mesh, rows)
