"""Callbacks that disturb one rank of a job: a flipped bit in its copy of the weights, or a pause in each step."""

from __future__ import annotations

import os
import time

import torch

from compiler_trainer import Callback
from compiler_trainer.elastic.member import MEMBER


class Flip(Callback):
    """Flip a bit of the first weight in the process that was started as rank `member`, after a step."""

    def __init__(self, member, step):
        self.member, self.number = str(member), step

    def on_step(self, run, record):
        if os.environ[MEMBER] == self.member and record["step"] == self.number:
            _, local = next(iter(run.step.tensors().values()))
            (values,) = local.values()
            values.detach().reshape(-1).view(torch.int32)[0] ^= 1 << 20


class Delay(Callback):
    """Pause in each run of a program in the process that was started as rank `member`."""

    def __init__(self, member, seconds):
        self.member, self.seconds = str(member), seconds

    def on_start(self, run):
        if os.environ[MEMBER] == self.member:
            runtime, launch = run.step.runtime, run.step.runtime.run

            def slow(*args, **kwargs):
                time.sleep(self.seconds)
                return launch(*args, **kwargs)

            runtime.run = slow
