"""The report after running out of memory: measured and predicted bytes, the largest tensors, and settings that fit."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from compiler_trainer.config.device import for_running
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from compiler_trainer.planning.auto import FEW, differing
from compiler_trainer.planning.dry import FUSED, DryStep, compile_dry, predict_step
from compiler_trainer.planning.estimate import Estimate
from compiler_trainer.planning.search import Outcome, compile_one, room, search
from compiler_trainer.planning.space import Candidate, PlanRequest, replace_nested
from compiler_trainer.step.ranks import start_ranks
from compiler_trainer.training.failures import Failure, free_bytes, used_bytes
from passes.cost.accounting import Ledger, peak_of
from passes.ir import ir
from passes.trace.abstract_eval import abstract_eval

MIB, GIB = 2**20, 2**30
SHOWN = 3  # settings that fit
LARGEST = 6  # tensors that are alive
CPU_SPARE, PROCESS_GIB = 0.8, 1 / 16  # share of a CPU's free memory to plan with (heaps fragment); threads and kernels
LESS = 0.95  # of the memory of the failed setting: settings that need more are refused whatever is predicted
NUMBER = re.compile(r"\.\d+(?=\.|$)")
OPEN = ("cast", "context", "pipeline")  # passes whose options stay as they are


def describe(cfg: Config, failure: Failure) -> Iterator[str]:
    """Yield lines on a job that ran out of memory; the caller frees the job's memory first."""
    ranks = start_ranks()
    cfg = validate(for_running(cfg), ranks)
    free, used = free_bytes(), used_bytes()
    more = f", {size(failure.asked_bytes)} more requested" if failure.asked_bytes else ""
    yield f"measured: {size(max(0, failure.used_bytes - used))} in use in {failure.where}{more}; {size(free)} is free"
    step = compile_dry(cfg, None)
    memory = predict_step(cfg, step)["prediction"]["memory"]
    needed = memory["bytes"] + memory["beside"][FUSED]
    at = f"%{memory['node']} ({memory['line'] or 'no source line'})"
    yield f"predicted: a peak of {size(needed)} at {at} of {memory['program']}; the largest tensors there:"
    yield from (f"  {size(count):>10}  {text}" for text, count in largest_alive(step, memory))
    yield from settings(limited_request(cfg, ranks, free, needed), cfg)


def largest_alive(step: DryStep, memory: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the largest tensors at the peak as (kind and module, bytes); modules of all layers count together."""
    program, ctx = step.programs[memory["program"]]
    ledger = Ledger(program, abstract_eval(program, ctx))
    names = {
        node: program_input.name for node, program_input in zip(program.placeholders(), program.inputs, strict=True)
    }
    bytes_by_text = Counter[str]()
    for storage, times in peak_of(ledger).alive.items():
        maker = ledger.makers[storage]
        module = names.get(maker) or ir.module_path(maker) or f"%{maker.name}"
        text = f"{ledger.kinds[storage]} of {NUMBER.sub('.*', module)}"
        bytes_by_text.update({text: times * ledger.avals.storage_bytes[storage]})
    return bytes_by_text.most_common(LARGEST)


def limited_request(cfg: Config, ranks: int, free: int, used: int) -> PlanRequest:
    """Return the job to plan for, on devices with less memory than it takes and no more than is free."""
    stated = {f"train.{field.name}" for field in dataclasses.fields(cfg.train) if field.name != "microbatches"}
    stated |= {f"passes.{name}" for name in OPEN}
    plan = {"compile": min(FEW, cfg.plan.compile)}
    cluster = {"gpus": ranks, "hbm_gib": free / GIB}
    if cfg.cluster.host_computes:
        cluster |= {"hbm_gib": CPU_SPARE * free / GIB, "context_gib": PROCESS_GIB, "communicator_gib": 0.0}
    request = PlanRequest(replace_nested(cfg, {"cluster": cluster, "plan": plan}), frozenset(stated))
    usable_gib = request.cfg.cluster.hbm_gib * min(1.0, LESS * used / max(room(request), 1.0))
    return PlanRequest(replace_nested(request.cfg, {"cluster": {"hbm_gib": usable_gib}}), request.stated)


def settings(request: PlanRequest, cfg: Config) -> Iterator[str]:
    """Yield lines on the settings that fit, fastest first, each with its time relative to the job's."""

    def compile_all(chosen: Sequence[Candidate]) -> list[Outcome]:
        return [compile_one([request], candidate) for candidate in chosen]

    try:
        plan = search(request, compile_all)
    except UserError as error:
        yield f"no setting fits: {error.message}"
        return
    baseline = compile_one([request], Candidate(cfg.mesh, cfg.train.microbatches))
    yield "settings that fit, fastest first by prediction:"
    for estimate in plan.ranked[:SHOWN]:
        time = "" if isinstance(baseline, str) else f", {estimate.step_s / baseline[0].step_s - 1:+.0%} time"
        yield f"  {setting(estimate, cfg)} ({size(round(estimate.bytes))}{time})"


def setting(estimate: Estimate, cfg: Config) -> str:
    """Return the changed options of a setting as command-line overrides."""
    return " ".join(differing(estimate.candidate.applied(cfg), cfg))


def size(count: int) -> str:
    """Return bytes as text in MiB or GiB."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / MIB:,.1f} MiB"
