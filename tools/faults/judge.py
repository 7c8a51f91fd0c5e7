"""The verdicts of the verifiers on models compiled by this tree, and the check of their values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import compiler_trainer as ct
from compiler_trainer.step.step import Step
from passes.check.verify import WrongProgram
from tools.faults.models import LRS, Case, make, train_plainly

Verdict = dict[str, str]  # check -> its first complaint, an empty string if it has none


def judge(names: Iterable[str]) -> Verdict:
    """Return the verdict on the first model that shows anything."""
    for name in names:
        verdict = look(make(name))
        if any(verdict.values()):
            return {check: complaint and f"{name}: {complaint}" for check, complaint in verdict.items()}
    return {"spec": "", "numeric": "", "value": ""}


def look(case: Case) -> Verdict:
    """Return the complaints of the verifiers on a case, and of the comparison of values.

    `numeric` includes all checks of `spec`, so that without a complaint of `numeric` there is none of `spec`.
    """
    step, numeric = compiled(case, "numeric")
    if step is not None:
        return {"spec": "", "numeric": "", "value": by_value(case, step)}
    step, spec = compiled(case, "spec")
    unverified, fails = (step, "") if step is not None else compiled(case, "none")
    return {"spec": spec, "numeric": numeric, "value": by_value(case, unverified) if unverified else f"fails: {fails}"}


def compiled(case: Case, verify: str) -> tuple[Step | None, str]:
    """Return the step of all ranks in this process, or the error of the compiler or its verifier."""
    options: dict[str, Any] = {"mesh": case.mesh, "optim": case.optim, "microbatches": case.microbatches}
    options |= {"passes": {**case.passes, "verify": verify}, "ranks": "lockstep", "lower": {"backend": "eager"}}
    try:
        return ct.compile_step(case.model, case.loss, case.batches[0], **options), ""
    except Exception as error:
        return None, said(error)


def by_value(case: Case, step: Step) -> str:
    """Return the first difference of two steps from PyTorch's on one device; empty if there is none."""
    try:
        metrics_of_steps = [step(batch, lr) for batch, lr in zip(case.batches, LRS, strict=True)]
    except Exception as error:
        return f"fails: {said(error)}"
    metrics, state = train_plainly(case)
    pairs: list[tuple[str, Any, Any]]
    pairs = [
        (name, ours[name], theirs[name])
        for ours, theirs in zip(metrics_of_steps, metrics, strict=True)
        for name in theirs
    ]
    pairs += [(name, value, state[name]) for name, value in step.state_dict().items()]
    return next((f"{name} differs" for name, ours, theirs in pairs if not alike(ours, theirs, case.tolerance)), "")


def alike(ours: Any, theirs: Any, tolerance: float) -> bool:
    """Return True if two values agree, absolutely and relatively, and have the same dtype."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def said(error: Exception) -> str:
    """Return the first line of an error, after the name of the check that raised it."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    while error.__cause__ is not None and not isinstance(error, WrongProgram):
        error = error.__cause__  # type: ignore[assignment]
    return f"{error.check if isinstance(error, WrongProgram) else 'the pass itself'}: {line}"
