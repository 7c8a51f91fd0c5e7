"""A table of small models for the tool that judges models: one of each verdict."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

from tests.nightly.models.case import Case, Entry, batches, normal


class Line(nn.Module):
    """A linear layer that creates `scale` at each forward."""

    def __init__(self, grows: float = 0.0, width: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale, self.grows = nn.Linear(4, width), 1.0, grows

    def forward(self, x):
        self.scale += self.grows
        return self.layer(x) * self.scale


class Branching(Line):
    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


class Noisy(Line):
    def forward(self, x):
        return self.layer(x + torch.rand_like(x))


class Tied(Line):
    """Two names for one layer."""

    def __init__(self):
        super().__init__(width=4)
        self.again = self.layer

    def forward(self, x):
        return self.again(super().forward(x))


def loss(model, batch):
    return model(batch["x"]).square().mean()


def case(model):
    return Case(model, loss, batches(lambda generator: {"x": normal(generator, 3, 5, 4)}))


def rounded():
    """Return a layer that computes in fp32."""
    model = Line()
    model.register_forward_pre_hook(lambda module, args: (args[0].float().double(),))
    return case(model)


def late():
    time.sleep(600)


MODELS = [
    Entry("right", "torch", lambda: case(Line()), sequence=True),
    Entry("tied", "torch", lambda: case(Tied())),
    Entry("right_rounded", "torch", rounded),
    Entry("wrong", "torch", lambda: case(Line(grows=1e-4))),  # the model that the step was compiled from stays unchanged
    Entry("refused", "torch", lambda: case(Branching())),
    Entry("crash", "torch", lambda: os._exit(7)),
    Entry("time-out", "torch", late),
    Entry("drawn", "torch", lambda: case(Noisy())),
    Entry("unbuilt", "no-such-library", lambda: __import__("no_such_library")),
]
