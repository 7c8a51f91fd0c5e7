"""A new attention operator (`tests/support/sinks.py`): its record is all that passes need."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import sinks
import torch
from oracle import trained_alike
from torch import Tensor, nn

import compiler_trainer as ct
from compiler_trainer.config.errors import UserError
from passes.context import operators
from passes.context.attention import AttentionKernel
from passes.cost.accounting import count_flops
from passes.ir.bodies import flatten
from passes.lower.host_reads import why_not
from passes.rules import RULES
from passes.trace.abstract_eval import recorded

SGD = {"name": "sgd"}
WIDTH, HEAD = 8, 4


class Sinks(nn.Module):
    """A model with two layers of attention with sinks, `heads` of them over `keys` key heads."""

    def __init__(self, heads: int = 4, keys: int = 2):
        super().__init__()
        self.heads, self.keys = heads, keys
        self.layers = nn.ModuleList(Layer(heads, keys) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, heads: int, keys: int):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * HEAD, bias=False) for n in (heads, keys, keys))
        self.out = nn.Linear(heads * HEAD, WIDTH, bias=False)
        self.sink = nn.Parameter(torch.randn(heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in (self.q, self.k, self.v))
        return self.out(torch.ops.sinks.attention(q, k, v, self.sink).transpose(1, 2).flatten(2))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().sum() / batch["y"].numel()


@pytest.fixture(autouse=True)
def known():
    operators.add_attention(sinks.RECORD)
    yield
    del operators.OPERATORS[sinks.attention], RULES["sinks::attention"]
    for kernel in (sinks.attention, sinks.attention_backward):
        del operators.KERNELS[kernel]


def trained(mesh, heads=4, keys=2, size=12, **options):
    torch.manual_seed(0)
    data = [{name: torch.randn(4, size, WIDTH).double() for name in "xy"} for _ in range(3)]
    options = {"lower": {"backend": "eager"}} | options
    return trained_alike(Sinks(heads, keys).double(), loss_of, data, mesh, SGD, **options)


def called(step, op) -> list:
    return [node for node in flatten(step.train["step"].program).graph.nodes if node.target is op]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"cp": 2}, {}),
        ({"cp": 2}, {"size": 11, "passes": {"context": {"method": "all_gather"}}}),
        ({"cp": 2}, {"passes": {"context": {"method": "ulysses"}}}),
        ({"cp": 2}, {"passes": {"context": {"load_balance": "none"}}}),
        ({"tp": 2}, {}),
        ({"tp": 2}, {"keys": 1}),
        ({"cp": 2, "tp": 2}, {"passes": {"context": {"method": "ulysses"}}}),
    ],
    ids=str,
)
@pytest.mark.sample(4)
def test_it_trains_as_on_one_device(mesh, options):
    trained(mesh, **options)


def test_a_method_that_no_attention_has_a_form_for_is_refused():
    problem = "passes.context.method: ring has no effect: ring cannot: the operator does not support it; set it to auto"
    with pytest.raises(UserError, match=problem):
        trained({"cp": 2}, passes={"context": {"method": "ring"}})


def test_no_method_at_all_is_refused():
    operators.add_attention(replace(sinks.RECORD, gathered=None))
    with pytest.raises(UserError, match="sinks.attention.default cannot run over mesh.cp=2: ulysses cannot: 3 heads"):
        trained({"cp": 2}, heads=3, keys=3)


def test_costs_recomputation_and_the_compiler_know_it():
    step = trained({"tp": 2}, passes={"remat": {"policy": "attention"}})
    (forward, *others), (backward, *_) = called(step, sinks.attention), called(step, sinks.attention_backward)
    sizes = recorded()
    assert len(others) == 1  # kept in each layer, not recomputed
    assert count_flops(forward, sizes) == 2 * 4 * 2 * 12 * 12 * 2 * HEAD
    assert count_flops(backward, sizes) > 2 * count_flops(forward, sizes)
    assert operators.compiled_for("cpu")[sinks.attention] is sinks.forward


def test_what_it_is_compiled_as_is_part_of_what_stored_kernels_are_known_by():
    with_record = operators.sources_for("cpu")
    operators.add_attention(replace(sinks.RECORD, kernels=(AttentionKernel(sinks.attention, sinks.attention_backward),)))
    assert "def weights_of" in with_record and "sinks" not in operators.sources_for("cpu")


@pytest.mark.full
def test_its_forms_are_what_is_compiled():
    torch.manual_seed(0)
    model, batch = Sinks().double(), {name: torch.randn(2, 6, WIDTH).double() for name in "xy"}
    wanted = loss_of(model, batch)
    step = ct.compile_step(model, loss_of, batch, optim=SGD | {"lr": 0.1})
    with patch.object(sinks, "weights_of", side_effect=AssertionError("called, not compiled")):
        assert step(batch)["loss"] == pytest.approx(float(wanted), rel=1e-12)


def test_a_graph_of_cuda_records_it_unless_its_record_says_otherwise():
    (node, *_) = called(trained({"tp": 2}), sinks.attention)
    assert why_not(node, compiled=False) == ""
    kernel = replace(sinks.RECORD.kernels[0], on_host="asks the host")
    operators.add_attention(replace(sinks.RECORD, kernels=(kernel,)))
    assert why_not(node, compiled=False) == "asks the host" and why_not(node) == ""
