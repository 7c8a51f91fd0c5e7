"""Records of captured nodes: the model's line that an operator comes from, and the modules called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compiler_trainer.capture.capture import capture
from compiler_trainer.capture.records import innermost
from passes.ir import ir
from passes.ir.record import Origin
from passes.torch_private import from_torch

OURS, TORCH = ("/home/someone/model.py", 31), ("/lib/torch/nn/modules/linear.py", 9)
WRAPPER = ("/x/compiler_trainer/capture/capture.py", 60)


@pytest.mark.parametrize(("frames", "expected"), [
    ([OURS, TORCH], OURS),
    ([WRAPPER, OURS], OURS),
    ([WRAPPER], WRAPPER),
    ([OURS, ("<eval_with_key>.3", 4)], OURS),
    ([], ("", 0)),
])
def test_the_innermost_frame_outside_of_libraries_counts(frames, expected):
    assert innermost("\n".join(f'  File "{file}", line {line}, in forward' for file, line in frames)) == expected


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        return self.a(x).relu()


def loss(model, batch):
    return model(batch["x"]).square().sum()


def test_operators_say_their_line_and_modules_and_nothing_of_the_tracer_is_left():
    program, _ = capture(Net(), loss, {"x": torch.ones(2, 3)}, torch.device("cpu"))
    in_forward, in_loss = Net.forward.__code__.co_firstlineno + 1, loss.__code__.co_firstlineno
    result = {node.name: ir.record(node).origin for node in program.calls()}
    assert result["linear"] == Origin(f"test_records.py:{in_forward}", ("", "a"))
    assert result["relu"] == Origin(f"test_records.py:{in_forward}", ("",))
    assert result["square"] == result["sum_1"] == Origin(f"test_records.py:{in_loss}")
    assert all(from_torch(node) == (None, "", (), {}) for node in program.graph.nodes)
