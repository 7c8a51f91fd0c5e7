"""Ranks of a machine share compiled bodies: each sees one GPU, number 0, and all generated code has that number."""

from __future__ import annotations

import os

import pytest
import torch
from small_programs import Small, cut

from compiler_trainer.config.errors import UserError
from compiler_trainer.step import ranks
from passes.ir import ir
from passes.ir.bodies import text_of
from passes.torch_private import FakeTensor, see_one_gpu

aten = torch.ops.aten


class Driver:
    """CUDA of a machine with some GPUs; it reads the visible ones on first use."""

    def __init__(self, monkeypatch, gpus, visible=None):
        self.gpus, self.started = gpus, None
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.visible()))
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: len(self.start()), raising=False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def visible(self):
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        return named.split(",") if named else [str(n) for n in range(self.gpus)]

    def start(self):
        self.started = self.started or self.visible()
        return self.started


@pytest.mark.parametrize(("gpus", "visible", "rank", "seen"), [
    (8, None, 3, ["3"]),
    (8, "4,5,6,7", 1, ["5"]),
    (2, "GPU-9a1c, GPU-77e0", 1, ["GPU-77e0"]),
    (1, None, 0, ["0"]),
    (8, "6", 3, ["6"]),  # a scheduler that assigns each rank a GPU
])
def test_a_rank_sees_its_gpu_as_number_0(gpus, visible, rank, seen, monkeypatch):
    driver = Driver(monkeypatch, gpus, visible)
    assert see_one_gpu(rank) == 0 and driver.start() == seen


def test_where_cuda_has_started_all_gpus_keep_their_numbers(monkeypatch):
    driver = Driver(monkeypatch, 8)
    driver.start()
    assert see_one_gpu(3) == 3 and "CUDA_VISIBLE_DEVICES" not in os.environ


def test_without_a_gpu_nothing_is_set(monkeypatch):
    Driver(monkeypatch, 0)
    assert see_one_gpu(3) == 0 and "CUDA_VISIBLE_DEVICES" not in os.environ


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    Driver(monkeypatch, 4)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(UserError, match="^LOCAL_RANK: is 4, but this machine has 4 GPUs; start 4 ranks on it"):
        ranks.gpu_of_process.__wrapped__()


def test_bodies_of_ranks_on_different_gpus_have_one_text():
    def text(number):
        small, device = Small(), torch.device("cuda", number)
        x = small.input("x", cut((4, 4)), dtype=torch.float32)
        zeros = small.call(aten.full.default, [4, 4], 0.0, device=torch.device("cpu"))
        zeros.update_kwarg("device", device)
        total = small.call(aten.add.Tensor, x, zeros)
        for node in (x, zeros, total):
            ir.set_value(node, FakeTensor(small.ctx.fake_mode, torch.empty(4, 4, device="meta"), device))
        small.builder.graph.output((total,))
        return text_of(small.builder.graph)

    assert text(0) == text(3) and "cuda" in text(0)
