"""Build a random case as a model, compare its capture with eager PyTorch, and shrink a case that fails."""

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
    """The verdict on a case; `invalid` if eager PyTorch fails, has no gradients, or its numbers are not finite."""

    verdict: Verdict
    why: str = ""


class Model(nn.Module):
    """A model with two layers, a scale and a running statistic, whose `forward` is the case's body."""

    def __init__(self, body: Callable[[Model, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.same = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Identity()
        self.register_buffer("seen", torch.linspace(0.1, 0.6, WIDTH))
        self.body = body

    @torch.no_grad()
    def quietly(self, x: Tensor) -> Tensor:
        """Compute a sigmoid layer without gradients."""
        return self.a(x).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x * self.scale)


def model_of(case: Case) -> Model:
    """Build the model of a case."""
    names = {"torch": torch, "F": F, "checkpoint": checkpoint, **vars(functions)}
    exec(compile(case.source(), f"case_{case.number}", "exec"), names)
    return Model(names["forward"]).to(getattr(torch, case.dtype))  # type: ignore[arg-type]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a scalar loss that depends on every value."""
    return model(batch["x"]).float().mul(0.3).sin().mean()


def run(case: Case) -> Outcome:
    """Return the verdict on a case."""
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
            difference = captured_difference(model, loss_of, batch)
        except UserError as error:
            return Outcome("refused", str(error))
        except Exception as error:
            return Outcome("crash", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Outcome("wrong", difference) if difference else Outcome("right")


def shrink_case(case: Case, outcome: Outcome) -> Case:
    """Return a case with fewer lines and the same verdict: remove lines one by one as long as the verdict stays."""
    while smaller := next((s for s in without_a_line(case) if run(s).verdict == outcome.verdict), None):
        case = smaller
    return case


def without_a_line(case: Case) -> Iterator[Case]:
    """Yield the case without each of its lines, and with each region's lines moved out of it."""
    return (replace(case, body=body) for body in smaller_bodies(case.body))


def smaller_bodies(body: tuple[Line, ...]) -> Iterator[tuple[Line, ...]]:
    """Yield the body without each of its lines, and with each region's lines moved out of it."""
    for i, line in enumerate(body):
        yield body[:i] + body[i + 1 :]
        if line.inside:
            yield body[:i] + line.inside + body[i + 1 :]
            for inside in filter(None, smaller_bodies(line.inside)):
                yield body[:i] + (replace(line, inside=inside),) + body[i + 1 :]
