"""The prediction of a dry run for a rank's step, in the categories of a trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from compiler_trainer.config.schema import Config
from compiler_trainer.planning.dry import DryStep, compile_dry, predict_step
from compiler_trainer.step.turns import turns_of_step
from compiler_trainer.training.trace import ATTENTION, ELEMENTWISE, MATMULS, Spent, place_of
from passes.context.operators import kernel_of
from passes.cost.accounting import count_flops
from passes.cost.timeline import COMPUTE
from passes.trace.abstract_eval import Avals, recorded


@dataclass(frozen=True)
class Predicted:
    """A rank's step: milliseconds by kind and place, milliseconds of collectives by axis, and memory."""

    spent: Spent
    travel_ms: Mapping[str, float]
    memory: Mapping[str, Any]


def predicted(cfg: Config, stage: int = 0) -> Predicted:
    """Return the prediction for a rank of a pipeline stage; raise UserError if a pass refuses the job."""
    step = compile_dry(cfg, None)
    report = predict_step(cfg, step)
    prediction, runs = report["prediction"], runs_of(cfg, step, stage)
    kinds, places, travel = (defaultdict[str, float](float) for _ in range(3))
    kind_and_place = known(step)
    for event in report["timeline"]:
        ms = runs[event["program"]] * (event["end_ms"] - event["start_ms"])
        if event["stream"] == COMPUTE:
            kind, place = kind_and_place[event["program"], event["node"]]
            kinds[kind] += ms
            places[place] += ms
        else:
            travel[event["stream"]] += ms
    parts = dict(kinds), prediction["exposed_ms"], prediction["launch_ms"], 0.0, dict(places)
    return Predicted(Spent(report["predicted"]["step_ms"], *parts), dict(travel), prediction["memory"])


def runs_of(cfg: Config, step: DryStep, stage: int) -> Mapping[str, int]:
    """Return the number of runs of each program in a step of a stage."""
    programs = {name: captured.program for name, captured in step.programs.items()}
    return Counter(t.program for t in turns_of_step(programs, step.schedule, cfg.train.microbatches) if t.rank == stage)


def known(step: DryStep) -> dict[tuple[str, str], tuple[str, str]]:
    """Return (kind, place) of each operator, by program and name."""
    nodes = ((name, node) for name, (program, _) in step.programs.items() for node in program.calls())
    sizes = recorded()
    return {(name, node.name): (kind_of_operator(node, sizes), place_of(node)) for name, node in nodes}


def kind_of_operator(node: fx.Node, sizes: Avals) -> str:
    """Return the kind of computation of an operator."""
    if kernel_of(node):
        return ATTENTION
    return MATMULS if count_flops(node, sizes) else ELEMENTWISE
