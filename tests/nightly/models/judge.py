"""Judge if two steps of a compiled model equal those of plain PyTorch; run as a process, for one model of a table.

Prints a line of JSON per mesh. "right": loss, gradient norm, parameters and buffers agree after every step; "wrong":
they do not; "refused": a UserError that names a field, a node or a line; "crash": any other exception on our side;
"unbuilt": the model or its plain training fails without us.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import compiler_trainer as ct
from compiler_trainer.parity.compare import draws, failed, rounds
from compiler_trainer.parity.subject import Subject
from compiler_trainer.step.step import Step
from tests.nightly.models.case import MESHES, PASSES, Case, Entry

Record = dict[str, Any]
Results = list[dict[str, Tensor]]  # per step: metrics and the state after it, by name
LRS = (1e-2, 5e-3)
ADAMW: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
NOISE = 0.02  # added to all parameters: many libraries start with zeros, which hide errors
EXACT, ROUNDED, SINGLE = 1e-8, 1e-5, 1e-4  # tolerances: in fp64; with parts in fp32 (norms, rotations); all in fp32
HALF, HALF_NAMES = 5e-2, ("loss", "grad_norm")  # in bf16, only for these, against the plain model's
ROUNDINGS = 4
AS_PLAIN = -1.0  # means: at most twice the error of eager PyTorch with the model in bf16


def judge(entry: Entry, meshes: Iterable[str], passes: Mapping[str, Any] | None = None) -> Iterator[Record]:
    """Yield the model's record on each mesh, with other options of `passes` than the mesh has."""
    meshes = list(meshes)
    try:
        case, plain, tolerances = reference(entry)
    except Exception as error:
        yield from ({"mesh": mesh, "verdict": "unbuilt", "why": first_line(error)} for mesh in meshes)
        return
    for mesh in meshes:
        yield {"mesh": mesh} | on_mesh(case, mesh, plain, (HALF,) if mesh in PASSES else tolerances, passes)


def reference(entry: Entry) -> tuple[Case, Results, tuple[float, ...]]:
    """Return the case, its plain training in fp64 (or fp32 if fp64 is not supported), and tolerances to try."""
    try:
        case = prepare(entry.build(), torch.float64)
        return case, train_plainly(case), (EXACT, ROUNDED) if rounds(subject_of(case)) else (EXACT,)
    except Exception:
        case = prepare(entry.build(), torch.float32)
        return case, train_plainly(case), (SINGLE,)


def subject_of(case: Case) -> Subject:
    """Convert the case to the Subject that `compiler_trainer.parity` compares."""
    return Subject(case.model, lambda model, batch: (None, case.loss(model, batch)), case.batches)


def prepare(case: Case, dtype: torch.dtype) -> Case:
    """Return the case in a dtype, in train mode, without dropout, with noise added to every parameter."""
    generator = torch.Generator().manual_seed(0)
    model = case.model.train()
    model = model.double() if dtype == torch.float64 else model.float()  # complex numbers keep their dtype
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return cast_batches(dtype, replace(case, model=model))


def cast_batches(dtype: torch.dtype, case: Case) -> Case:
    """Cast the floating-point entries of the case's batches."""
    cast = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()} for batch in case.batches]
    return replace(case, batches=cast)


def train_plainly(case: Case) -> Results:
    """Train a copy of the model in eager PyTorch; raise ValueError for random draws or infinite gradients."""
    if draws(subject_of(case)):
        raise ValueError("the model draws random numbers, which differ from ours; build it without them")
    model = copy.deepcopy(case.model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, **ADAMW)
    results: Results = []
    for batch, lr in zip(case.batches, LRS, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = case.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        if not norm.isfinite():
            raise ValueError("the gradients are not finite")
        optimizer.step()
        results.append({"loss": loss.detach(), "grad_norm": norm, **state_of(model)})
    return results


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of parameters and buffers by name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: value.detach().clone() for name, value in named}


def on_mesh(
    case: Case, mesh: str, plain: Results, tolerances: Sequence[float], passes: Mapping[str, Any] | None = None
) -> Record:
    """Return the model's record on a mesh."""
    case = cast_batches(torch.bfloat16, case) if mesh in PASSES else case
    try:
        with quiet():
            options: dict[str, Any] = {"mesh": MESHES[mesh], "passes": passes or PASSES.get(mesh), "ranks": "lockstep"}
            options |= {"optim": {"name": "adamw", **ADAMW}}
            step = ct.compile_step(copy.deepcopy(case.model), case.loss, case.batches[0], **options)
            results = train(step, case)
    except Exception as error:
        outcome = failed(error)
        return {"verdict": outcome.verdict, "why": first_line(error), "trace": outcome.trace}
    facts = {"share": stored_share(step), "gathered": gathering_operators(step)}
    for tolerance in tolerances:
        if not (differs := difference(results, plain, tolerance, HALF_NAMES if tolerance == HALF else ())):
            return {"verdict": "right", "why": "", "tolerance": tolerance} | facts
    if mesh in PASSES and not difference(results, plain, 2 * rounding_error(case, plain), HALF_NAMES):
        return {"verdict": "right", "why": "", "tolerance": AS_PLAIN} | facts
    return {"verdict": "wrong", "why": differs} | facts


def rounding_error(case: Case, plain: Results) -> float:
    """Return eager PyTorch's worst relative error with the whole model in bf16; 0 if it cannot run.

    One rounding is random: each parameter is first moved by up to its last bit, in several ways.
    """
    try:
        runs = [train_plainly(replace(case, model=perturb(case.model, seed).bfloat16())) for seed in range(ROUNDINGS)]
    except Exception:
        return 0.0
    pairs = [(ours[n], theirs[n]) for run in runs for ours, theirs in zip(run, plain) for n in HALF_NAMES]
    return max(abs(float(a) - float(b)) / (1 + abs(float(b))) for a, b in pairs)


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy whose parameters differ by up to the last bit of bf16."""
    generator, model = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    for parameter in model.parameters():
        noise = 2 * torch.rand(parameter.shape, generator=generator).to(parameter.dtype) - 1
        parameter.mul_(1 + torch.finfo(torch.bfloat16).eps / 2 * noise)
    return model


def train(step: Step, case: Case) -> Results:
    """Return metrics and state after each compiled step."""
    results = []
    for batch, lr in zip(case.batches, LRS, strict=True):
        metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in step(batch, lr).items()}
        results.append(metrics | {name: value.clone() for name, value in step.state_dict().items()})
    return results


def difference(ours: Results, theirs: Results, tolerance: float, names: Sequence[str] = ()) -> str:
    """Describe the first difference of the values with these names, or of all; return "" if there is none."""
    for number, (mine, plain) in enumerate(zip(ours, theirs, strict=True), 1):
        for name in names or (*HALF_NAMES, *mine):
            a, b = mine[name], plain[name].to(mine[name].dtype)
            if not torch.allclose(a, b, rtol=tolerance, atol=tolerance):
                return f"step {number}: {name} differs by {float((a - b).abs().max()):.1e}"
    return ""


def stored_share(step: Step) -> float:
    """Return the share of all parameters that the first rank stores."""
    stored = {name: (spec, local) for name, (spec, local) in step.tensors().items() if name in trained_names(step)}
    whole = sum(torch.Size(spec.shape).numel() for spec, _ in stored.values())
    return sum(local[step.ranks[0]].numel() for _, local in stored.values()) / whole


def trained_names(step: Step) -> set[str]:
    """Return the names of the trained parameters in the step's state."""
    programs = (compiled.program for compiled in step.train.values())
    return {f"model.{i.name}" for program in programs for i in program.inputs if i.kind == "parameter"}


def gathering_operators(step: Step) -> list[str]:
    """List operators that gather activations over a data axis, so that all its ranks repeat the same work."""
    records = (r for r in step.report["passes"] if (r["program"], r["name"]) == ("forward", "shard"))
    changes = [change for record in records for change in record["report"]["reshards"]]
    reasons = [change["reason"] for change in changes if any(is_replicated(change, axis) for axis in ("dp_shard", "cp"))]
    return sorted({re.sub(r"_\d+$", "", reason.removeprefix("for ")) for reason in reasons})


def is_replicated(change: dict[str, Any], axis: str) -> bool:
    """Return True if the change replicates an activation that an axis sharded, with the same use on all its ranks."""
    before, after, is_weight = change["before"], change["after"], change["node"].startswith("p_")
    return not is_weight and before.count(f"@{axis}") > after.count(f"@{axis}") and f"replicate({axis})" not in after


def first_line(error: BaseException) -> str:
    """Return the first line of an error; prefix its type unless it is a UserError."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return line if isinstance(error, ct.UserError) else f"{type(error).__name__}: {line}"


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main(table: str, name: str, *meshes: str) -> None:
    """Judge one model of a table (a module with `MODELS`); print a line of JSON per mesh."""
    entry = next(entry for entry in import_module(table).MODELS if entry.name == name)
    for record in judge(entry, meshes):
        print("\n" + json.dumps({"model": name} | record), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
