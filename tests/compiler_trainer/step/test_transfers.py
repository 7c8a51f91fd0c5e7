"""A step makes the host wait for the device only once, at its end."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from compiler_trainer.step.batch_layout import on_device
from compiler_trainer.step.step import Step
from compiler_trainer.step.turns import Turn
from passes.torch_private import TorchDispatchMode

MICROBATCHES, COUNT, SEED = 3, 5, 7


class Seen(TorchDispatchMode):
    """A mode that records the operators called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(str(op.name()))
        return op(*args, **kwargs or {})


def test_a_launch_reads_no_number_and_sends_none():
    step, seen, seeds = object.__new__(Step), Seen(), []

    def run(turn, compiled, batch, scalars, carried):
        seen.names.append(str(turn))
        seeds.append(scalars["seed"])
        return {"loss": torch.ones(())}

    turns = [*(Turn("accumulate", m) for m in range(MICROBATCHES)), Turn("apply", None)]
    finished = SimpleNamespace(outputs=[SimpleNamespace(name="loss", kind="loss")])
    outputs = SimpleNamespace(finished=finished, compile=lambda: None)
    step.lr, step.seed, step.microbatches, step.device, step.ranks = 0.1, SEED, MICROBATCHES, torch.device("cpu"), (0,)
    step.microbatches_per_turn, step.restored_names = 1, {}
    step.state = {"optim.step": SimpleNamespace(local={0: torch.tensor(float(COUNT), dtype=torch.float64)})}
    step.split, step.counts, step.run = lambda batch: [{}] * MICROBATCHES, lambda batch: {}, run
    step.entries = {}
    step.runtime = SimpleNamespace(numbers=lambda values, names: values, begin=lambda: None)
    step.train = {"accumulate": outputs, "apply": outputs}
    step.training = turns, SimpleNamespace(begin=lambda: None, start=lambda turn: None, end=lambda: None)
    with seen:
        results = step.launch({})
    assert not {"aten::_local_scalar_dense", "aten::lift_fresh"} & set(seen.names)  # reading a number, sending a number
    assert seen.names.index("apply") < len(seen.names) and results.read() == {"loss": 1.0}
    numbers = [COUNT * MICROBATCHES + m for m in range(MICROBATCHES)] + [COUNT]
    assert [int(seed) for seed in seeds] == [(SEED << 32) + number for number in numbers]


class OnHost:
    """A tensor in host memory that records its uses."""

    def __init__(self, kind="cpu", uses=()):
        self.device, self.uses = torch.device(kind), uses

    def pin_memory(self):
        return OnHost(self.device.type, (*self.uses, "pin"))

    def to(self, device, non_blocking):
        return (*self.uses, device.type, non_blocking)


def test_what_goes_to_a_gpu_is_pinned_and_not_waited_for():
    assert on_device(OnHost(), torch.device("cuda", 3)) == ("pin", "cuda", True)
    assert on_device(OnHost("cuda"), torch.device("cuda", 3)) == ("cuda", False)
    assert on_device(OnHost(), torch.device("cpu")) == ("cpu", False)
