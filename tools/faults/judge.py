"""What the verifiers say of models compiled by this tree, and whether their values are right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import compiler_trainer as ct
from compiler_trainer.step.step import Step
from passes.check.verify import WrongProgram
from tools.faults.models import LRS, Case, make, train_plainly

Verdict = dict[str, str]  # who looks -> what it says first, an empty string if nothing


def judge(names: Iterable[str]) -> Verdict:
    """What is seen of the first model of which anything is seen."""
    for name in names:
        verdict = look(make(name))
        if any(verdict.values()):
            return {who: said and f"{name}: {said}" for who, said in verdict.items()}
    return {"spec": "", "numeric": "", "value": ""}


def look(case: Case) -> Verdict:
    """What the verifiers say of a case, and where its values are wrong.

    `numeric` checks also all that `spec` does, so that where it has nothing to say `spec` has nothing either.
    """
    step, numeric = compiled(case, "numeric")
    if step is not None:
        return {"spec": "", "numeric": "", "value": by_value(case, step)}
    step, spec = compiled(case, "spec")
    unverified, fails = (step, "") if step is not None else compiled(case, "none")
    return {"spec": spec, "numeric": numeric, "value": by_value(case, unverified) if unverified else f"fails: {fails}"}


def compiled(case: Case, verify: str) -> tuple[Step | None, str]:
    """The step of all ranks in this process, or what the compiler or its verifier says."""
    how: dict[str, Any] = {"mesh": case.mesh, "optim": case.optim, "microbatches": case.microbatches}
    how |= {"passes": {**case.passes, "verify": verify}, "ranks": "lockstep", "lower": {"backend": "eager"}}
    try:
        return ct.compile_step(case.model, case.loss, case.batches[0], **how), ""
    except Exception as error:
        return None, said(error)


def by_value(case: Case, step: Step) -> str:
    """Where two steps differ from PyTorch's on one device."""
    try:
        found = [step(batch, lr) for batch, lr in zip(case.batches, LRS, strict=True)]
    except Exception as error:
        return f"fails: {said(error)}"
    metrics, state = train_plainly(case)
    pairs: list[tuple[str, Any, Any]]
    pairs = [(name, ours[name], theirs[name]) for ours, theirs in zip(found, metrics, strict=True) for name in theirs]
    pairs += [(name, value, state[name]) for name, value in step.state_dict().items()]
    return next((f"{name} differs" for name, ours, theirs in pairs if not alike(ours, theirs, case.tolerance)), "")


def alike(ours: Any, theirs: Any, tolerance: float) -> bool:
    """Whether two values agree, absolutely and relatively, and are of one dtype."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def said(error: Exception) -> str:
    """Return the first line of an error, after the name of the check that raised it."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    while error.__cause__ is not None and not isinstance(error, WrongProgram):
        error = error.__cause__  # type: ignore[assignment]
    return f"{error.check if isinstance(error, WrongProgram) else 'the pass itself'}: {line}"
