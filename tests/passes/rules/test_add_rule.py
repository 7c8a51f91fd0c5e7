"""Rules written as lines: their text is checked, and maxima are right with padding and with gradients."""

from __future__ import annotations

import pytest
import torch
from oracle import NO_DECAY, trained_alike
from torch import Tensor, nn

from passes.ir.ir import CompileError
from passes.rules import RULES, add_rule
from passes.rules.base import from_text


@torch.library.custom_op("test_add_rule::rowmax", mutates_args=())
def rowmax(x: Tensor) -> Tensor:
    return x.amax(-1)


@rowmax.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1])


rowmax.register_autograd(
    lambda ctx, g: g[..., None] * (ctx.saved_tensors[0] == ctx.saved_tensors[0].amax(-1, keepdim=True)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Most(nn.Module):
    """A matmul whose columns tp may shard unevenly, and their maximum; all are negative."""

    def __init__(self, with_gradient: bool):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7).double(), nn.Linear(1, 3).double()
        self.with_gradient = with_gradient

    def forward(self, x: Tensor) -> Tensor:
        y = -self.up(x).exp()
        most = torch.ops.test_add_rule.rowmax(y if self.with_gradient else y.detach())
        return self.down(y.sum(-1, keepdim=True) + most[:, None])


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


@pytest.fixture
def rule():
    add_rule("test_add_rule::rowmax", "...d -> ...; max d")
    yield
    del RULES["test_add_rule::rowmax"]


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.sample(2)
def test_a_maximum_of_negative_numbers_over_uneven_shards(rule, ranks, with_gradient):
    torch.manual_seed(0)
    data = [{"x": torch.randn(4, 5).double()} for _ in range(3)]
    plan = {"shard": {"plan": {"up.weight": {"tp": 0}, "up.bias": {"tp": 0}}}}
    trained_alike(Most(with_gradient), loss, data, {"tp": ranks}, NO_DECAY, passes=plan)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("...d, d -> ...d; sums d", "'sums' is not a clause; use sum, max, whole, linear or moves"),
        ("...d, d -> ...d; whole z", "whole z, but the rule has no z"),
        ("...d, d -> ...d; linear 7", "linear 7, but the rule has no 7"),
        ("...d => ...d", "one ->"),
        ("a -> b -> c", "one ->"),
    ],
)
def test_what_a_line_cannot_mean_is_refused(line, message):
    with pytest.raises(ValueError, match=message):
        from_text(line)


@pytest.mark.parametrize("name", ["my.relu", "my::relu.default", "relu", "my::"])
def test_a_name_that_no_operator_has_is_refused(name):
    with pytest.raises(ValueError, match="not an operator name"):
        add_rule(name, "...d -> ...d")


@pytest.mark.parametrize(("line", "message"), [("d -> ", "its tensors have 2, 1 dims"), ("nd -> n, n", "it takes 1 tensors and gives 1")])
def test_a_line_that_does_not_fit_its_operator_is_refused_by_node(rule, line, message):
    add_rule("test_add_rule::rowmax", line)
    with pytest.raises(CompileError, match=rf"%rowmax.* its rule '{line}' does not fit: {message}"):
        trained_alike(Most(False), loss, [{"x": torch.randn(4, 5).double()}] * 3, {"tp": 2}, NO_DECAY)
