"""A random case as a model, captured and compared with eager PyTorch; and a smaller one that fails alike."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compiler_trainer.capture.compare import captured_difference, eager_results
from compiler_trainer.config.errors import UserError
from tests.nightly.capture_fuzz import functions
from tests.nightly.capture_fuzz.draw import Case, Line

Verdict = Literal["right", "refused", "wrong", "crash", "invalid"]
ROWS, WIDTH = 4, 6


@dataclass(frozen=True)
class Outcome:
    """The verdict on a case; `invalid` where eager PyTorch itself fails, or nothing has a gradient."""

    verdict: Verdict
    why: str = ""


class Model(nn.Module):
    """Two layers, a scale and a running statistic, whose `forward` is a case's."""

    def __init__(self, body: Callable[[Model, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.same = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Identity()
        self.register_buffer("seen", torch.linspace(0.1, 0.6, WIDTH))
        self.body = body

    @torch.no_grad()
    def quietly(self, x: Tensor) -> Tensor:
        """A method that autograd does not see."""
        return self.a(x).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x * self.scale)


def model_of(case: Case) -> Model:
    """The model of a case."""
    names = {"torch": torch, "F": F, "checkpoint": checkpoint, **vars(functions)}
    exec(compile(case.source(), f"case_{case.number}", "exec"), names)
    return Model(names["forward"]).to(getattr(torch, case.dtype))  # type: ignore[arg-type]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A scalar that every value counts in."""
    return model(batch["x"]).float().mul(0.3).sin().mean()


def run(case: Case) -> Outcome:
    """The verdict on a case."""
    model, generator = model_of(case), torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(ROWS, WIDTH, generator=generator).to(getattr(torch, case.dtype))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = eager_results(copy.deepcopy(model), loss_of, batch)
        except Exception as error:
            return Outcome("invalid", str(error).splitlines()[0])
        if not all(value.isfinite().all() for value in expected.values()):
            return Outcome("invalid", "is not finite")
        try:
            found = captured_difference(model, loss_of, batch)
        except UserError as error:
            return Outcome("refused", str(error))
        except Exception as error:
            return Outcome("crash", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Outcome("wrong", found) if found else Outcome("right")


def shrunk(case: Case, outcome: Outcome) -> Case:
    """A case of fewer lines with the same verdict: lines are left out one by one, as long as any can be."""
    while smaller := next((s for s in without_a_line(case) if run(s).verdict == outcome.verdict), None):
        case = smaller
    return case


def without_a_line(case: Case) -> Iterator[Case]:
    """The case without each of its lines, and with each region in line."""
    return (replace(case, body=body) for body in smaller_bodies(case.body))


def smaller_bodies(body: tuple[Line, ...]) -> Iterator[tuple[Line, ...]]:
    """The body without each of its lines, and with each region in line."""
    for i, line in enumerate(body):
        yield body[:i] + body[i + 1 :]
        if line.inside:
            yield body[:i] + line.inside + body[i + 1 :]
            for inside in filter(None, smaller_bodies(line.inside)):
                yield body[:i] + (replace(line, inside=inside),) + body[i + 1 :]
