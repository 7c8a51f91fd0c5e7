"""Train a model by eager PyTorch and by a compiled step of all its ranks, and compare the results."""

from __future__ import annotations

import copy
import math
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compiler_trainer.capture.compare import captured_difference
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import OptimConfig, PassesConfig
from compiler_trainer.parity import oracle
from compiler_trainer.parity.oracle import Found
from compiler_trainer.parity.subject import Settings, Subject
from compiler_trainer.step.compile import compile_step
from compiler_trainer.step.step import Step
from passes.ir import ir

Verdict = Literal["right", "refused", "crash", "wrong"]
EXACT, ROUNDED = 1e-10, 2e-5  # tolerance in fp64; with the model, or parts of it, in fp32
DRIFT = {EXACT: 1e-6, ROUNDED: 1e-3}  # the largest tolerance if eager results depend this much on rounding
ROUNDINGS = 3  # perturbations to try
FLOOR = 1e-3  # added to the magnitude that differences are divided by
NAMES_PLACE = re.compile(r"\w\.py:\d+|%\w+")


@dataclass(frozen=True)
class Outcome:
    """The verdict on a model: the worst error with its value, or the reason of a refusal (at `where`) or failure.

    With an error, `why` is a remark on the comparison.
    """

    verdict: Verdict
    error: float = 0.0
    value: str = ""
    where: str = ""
    why: str = ""
    trace: str = ""
    allowed: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.verdict in ("right", "wrong"):
            where = f" at {self.value}" if self.value else ""
            return f"{self.verdict}, off by {self.error:.1e}{where}" + (f"; {self.why}" if self.why else "")
        return f"{self.verdict}: {self.reason}"

    @property
    def reason(self) -> str:
        """The option or place at fault and the problem, as one text."""
        return ": ".join(filter(None, (self.where, self.why)))


class Narrow(TorchFunctionMode):
    """A mode that notices differentiable values computed in less than fp64; constants are the same either way."""

    seen = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, (tuple, list)) else (result,)
        graded = [part for part in parts if isinstance(part, Tensor) and part.requires_grad]
        self.seen = self.seen or any(part.dtype not in (torch.float64, torch.complex128) for part in graded)
        return result


def compare(subject: Subject, settings: Settings, alone: bool = False) -> Outcome:
    """Train a model both ways and return the verdict.

    With `alone` the reference is a compiled step of one rank, which models that draw random numbers need.
    """
    began = time.perf_counter()
    try:
        if settings.evaluates and not alone and has_modes(subject):
            settings = replace(settings, evaluates=False)
    except ValueError as error:  # a batch norm of one sample, for example
        return Outcome("refused", where="eager PyTorch", why=str(error), seconds=time.perf_counter() - began)
    if differs := captured_otherwise(subject):
        return Outcome("wrong", math.inf, f"capture: {differs}", seconds=time.perf_counter() - began)
    try:
        states, parameters = train(subject, settings)
    except Exception as error:
        outcome = failed(error)
    else:
        subject = replace(subject, parameters=parameters)
        expected = train(subject, replace(settings, mesh={}))[0] if alone else oracle.train(subject, settings)
        if settings.evaluates and not alone:
            expected[0]["evaluated"] = oracle.evaluate(subject, settings.microbatches)
        outcome = judged(states, expected, tolerance(subject, settings))
        if outcome.verdict == "wrong" and not alone and outcome.error < DRIFT[outcome.allowed]:
            outcome = judged_by_drift(outcome, subject, settings, states, expected)
    return replace(outcome, seconds=time.perf_counter() - began)


def captured_otherwise(subject: Subject) -> str:
    """Return the first difference between the captured program and eager PyTorch in fp32; empty if there is none.

    Steps are compared in fp64, where casts to fp32 change results; steps of a model that draws random numbers are
    compared with a compiled step, which shares the capture. Empty, too, if the model cannot be captured or run.
    """
    model = copy.deepcopy(subject.model).float()
    batch = {name: v.float() if v.is_floating_point() else v for name, v in subject.batches[0].items()}
    try:
        return captured_difference(model, subject.loss, batch, subject.eager)
    except Exception:  # the comparison of steps reports it
        return ""


def train(subject: Subject, settings: Settings) -> tuple[list[Found], dict[str, ir.Input]]:
    """Return the state after each step of a compiled step with all ranks in this process, and its parameters."""
    model = copy.deepcopy(subject.model)
    options: dict[str, Any] = {"mesh": settings.mesh, "optim": settings.optim, "passes": settings.passes}
    options |= {"microbatches": settings.microbatches, "ranks": "lockstep", "evaluate": settings.evaluates}
    step = compile_step(model, subject.loss, subject.batches[0], **options)
    inputs = [item for compiled in step.train.values() for item in compiled.program.inputs]
    states: list[Found] = []
    for batch, lr in zip(subject.batches, settings.lrs):
        evaluated = {"evaluated": step.evaluate(batch)} if settings.evaluates and not states else {}
        measured = evaluated | step(batch, lr)
        metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in measured.items()}
        states.append(metrics | {name: value.clone() for name, value in wholes(step).items()})
    return states, {item.original: item for item in inputs if item.kind == "parameter"}


def wholes(step: Step) -> Found:
    """Return full parameters, buffers and moments of a step."""
    return {name.removeprefix("model."): value for name, value in step.wholes("model.", "optim.").items()}


def failed(error: Exception) -> Outcome:
    """Return a refusal if the error names its cause, otherwise a crash."""
    is_explained = isinstance(error, UserError) and (error.place != "model" or NAMES_PLACE.search(str(error)))
    where, message = type(error).__name__, str(error)
    if isinstance(error, UserError):
        where, message = error.place, error.message
    trace = "" if is_explained else traceback.format_exc()[-6000:]
    return Outcome(
        "refused" if is_explained else "crash", where=where, why=" ".join(message.split())[:400], trace=trace
    )


def tolerance(subject: Subject, settings: Settings) -> float:
    """Return the largest allowed error, by the precision of the computation."""
    cast, state = build(PassesConfig, settings.passes, "passes").cast, build(OptimConfig, settings.optim, "optim").state
    dtypes = {cast.param_dtype, cast.reduce_dtype, cast.output_dtype, state}
    if not dtypes <= {None, "auto", "float64"}:  # auto means none on the CPU
        return ROUNDED
    return ROUNDED if rounds(subject) else EXACT


def judged_by_drift(
    outcome: Outcome, subject: Subject, settings: Settings, states: Sequence[Found], expected: Sequence[Found]
) -> Outcome:
    """Return the verdict if steps after the first may differ by as much as rounding changes eager PyTorch's results."""
    if judged(states[:1], expected[:1], outcome.allowed).verdict == "wrong":
        return outcome
    eps = torch.finfo(torch.float32 if outcome.allowed == ROUNDED else torch.float64).eps
    drift = min(DRIFT[outcome.allowed], 2 * spread(subject, settings, expected, eps))
    return judged(states, expected, max(outcome.allowed, drift))


def spread(subject: Subject, settings: Settings, expected: Sequence[Found], eps: float) -> float:
    """Return the largest error among eager PyTorch's own results when each parameter changes by `eps` of itself."""
    trials = (oracle.train(rounded(subject, seed, eps), settings) for seed in range(ROUNDINGS))
    return max(judged(trial, expected, 0.0).error for trial in trials)


def rounded(subject: Subject, seed: int, eps: float) -> Subject:
    """Return the same model with each parameter moved up or down by `eps` of itself."""
    generator, model = torch.Generator().manual_seed(seed), copy.deepcopy(subject.model)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.is_floating_point()):
            signs = 2 * torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.dtype) - 1
            parameter.mul_(1 + max(eps, torch.finfo(parameter.dtype).eps) * signs)
    return replace(subject, model=model)


def rounds(subject: Subject) -> bool:
    """Return True if the model computes parts in less than fp64."""
    with Narrow() as narrow:
        subject.loss(subject.eager(copy.deepcopy(subject.model)), subject.batches[0])
    return narrow.seen


def draws(subject: Subject) -> bool:
    """Return True if the loss depends on random numbers."""
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        losses.append(subject.loss(subject.eager(copy.deepcopy(subject.model)), subject.batches[0]).detach())
    return not torch.equal(*losses)


def has_modes(subject: Subject) -> bool:
    """Return True if the loss differs in eval mode."""
    losses = []
    for training in (True, False):
        torch.manual_seed(0)
        losses.append(subject.loss(subject.eager(copy.deepcopy(subject.model)).train(training), subject.batches[0]))
    return not torch.equal(*losses)


def judged(states: Sequence[Found], expected: Sequence[Found], allowed: float) -> Outcome:
    """Return the verdict on the states after each step, by the worst error; a value that either side lacks is wrong.

    Entries moved by rounding alone are not compared; their gradients are, as moments.
    """
    worst, where = 0.0, ""
    for number, (ours, theirs) in enumerate(zip(states, expected, strict=True), 1):
        for name, value in theirs.items():
            if name.startswith("chance."):
                continue
            if name not in ours and number == 1 and not name.startswith("optim."):
                continue  # the program does not use it
            error = math.inf if name not in ours else difference(ours[name], value, theirs.get(f"chance.{name}"))
            if error > worst:
                worst, where = error, f"step {number}: {name}"
    return Outcome("right" if worst <= allowed else "wrong", worst, where, allowed=allowed)


def difference(ours: Tensor, theirs: Tensor, chance: Tensor | None = None) -> float:
    """Return the largest difference of entries over the largest expected entry; infinite if shapes or infs differ.

    Entries marked in `chance` are not compared.
    """
    if ours.shape != theirs.shape:
        return math.inf
    if chance is not None and chance.any():
        ours = torch.where(chance, theirs, ours)
    if theirs.numel() == 0 or torch.equal(ours.to(theirs.dtype), theirs):
        return 0.0
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    error = ((ours.to(wide) - theirs.to(wide)).abs().max() / (theirs.to(wide).abs().max() + FLOOR)).item()
    return error if math.isfinite(error) else math.inf
