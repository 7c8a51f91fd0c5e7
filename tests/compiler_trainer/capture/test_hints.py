"""PyTorch's hints on memory and precision are kept: checkpointed calls, autocast regions."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, compile_lockstep, points, squared_error, train_plainly, train_step
from sweeps import in_turn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compiler_trainer.capture.capture import capture
from passes.ir import ir

MESHES = [{}, {"dp_shard": 2}, {"tp": 2}]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Checkpointed(nn.Module):
    """Two blocks, of which the first runs under `torch.utils.checkpoint`."""

    def __init__(self, reentrant: bool | None, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Block(), Block(), nn.Linear(5, 3)
        self.first.drop.p, self.second.drop.p, self.reentrant = dropout, 0.0, reentrant
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        first = self.first
        y = first(x) if self.reentrant is None else checkpoint(first, x, use_reentrant=self.reentrant)
        return self.head(self.second(y))


def remat(step) -> dict[str, int]:
    return next(p["report"]["counts"] for p in step.report["passes"] if p["name"] == "remat")


@pytest.mark.parametrize(("mesh", "reentrant"), in_turn(MESHES, [True, False]), ids=str)
@pytest.mark.sample(2)
def test_a_checkpointed_call_trains_as_one_device_does_and_is_recomputed(mesh, reentrant):
    data, marks = points(), {"remat": {"policy": "none"}}  # and nothing else, although the blocks are layers
    step = compile_lockstep(Checkpointed(reentrant), squared_error, data[0], mesh, passes=marks)
    metrics, state = train_plainly(Checkpointed(None), squared_error, data)
    for result, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same(result, expected, 1e-12)
    assert_same(step.state_dict(), state, 1e-12)
    without = compile_lockstep(Checkpointed(None), squared_error, data[0], mesh, passes=marks)
    assert remat(step)["recomputed"] > remat(without)["recomputed"]
    assert remat(step)["saved_bytes_after"] < remat(without)["saved_bytes_after"]


def test_dropout_in_a_checkpointed_call_draws_once():
    data = points()
    first, second = (
        train_step(compile_lockstep(Checkpointed(r, 0.5), squared_error, data[0], {"dp_shard": 2}), data)
        for r in (None, True)
    )
    assert first == second


def test_a_checkpointed_call_within_another_belongs_to_the_outer_one():
    class Nested(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    program, _ = capture(Nested(True), squared_error, points()[0], torch.device("cpu"))
    assert {ir.record(n).checkpoint for n in program.calls()} - {""} == {"checkpoint.0"}


class Autocast(nn.Module):
    """A bfloat16 matmul inside a float32 model, and a region inside it without autocast."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.tanh(self.up(x))
            with torch.autocast("cpu", enabled=False):
                return self.down(y.float())


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_an_autocast_region_computes_in_its_dtype(mesh):
    data = points(dtype=torch.float32)
    step = compile_lockstep(Autocast(), squared_error, data[0], mesh)
    metrics, _ = train_plainly(Autocast(), squared_error, data)
    for result, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same(result, expected, 2e-3)  # a bias is added in bfloat16, after the matmul is rounded
    program, _ = capture(Autocast(), squared_error, data[0], torch.device("cpu"))
    products = [ir.example(n).dtype for n in program.calls() if n.target is torch.ops.aten.linear.default]
    assert products == [torch.bfloat16, torch.float32]
