"""Compile pipeline stages that are alike once: inner ranks of the pipeline with equal numbers of layers.

    compiled     F0         F1         F2            3 ranks: embedding, 2 layers | 2 layers | 2 layers, head
    repeated     F0   F1 F2 F3 F4 F5 F6   F7         8 ranks; F2 to F6 are the graph of F1 with other names

A value for a neighbouring stage is identified by its position among the values sent, so that one graph can stand at any
position: each stage must send the same number of values to its next stage, and the same number to its previous one.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from compiler_trainer.config.schedules import build_schedule
from compiler_trainer.config.schema import Config, ModelConfig
from compiler_trainer.models.subject import subject
from compiler_trainer.planning.dry import DryStep
from compiler_trainer.planning.space import depth_pattern, replace_nested, sizes_of
from compiler_trainer.step.captured import Captured, Reporter
from passes.ir import ir
from passes.ir.task import OF_RANKS, SQUARE, Task, square_of, term_of
from passes.pipeline.assign import even
from passes.pipeline.schedules import Schedule

T = TypeVar("T", ir.Input, ir.Output)


@dataclass(frozen=True)
class FewStages:
    """A job on few pipeline ranks, the schedule of all ranks, and the compiled rank and stage that stand for each."""

    cfg: Config
    schedule: Schedule
    ranks: tuple[int, ...]
    stages: tuple[int, ...]


def few_stages(cfg: Config) -> FewStages | None:
    """Return a job on few ranks of the pipeline with every kind of stage of `cfg`; None if all have to be compiled."""
    ranks = cfg.mesh.pp
    if ranks == 1 or not isinstance(cfg.model, ModelConfig) or depth_pattern(cfg.model)[1] > 1:
        return None
    schedule = build_schedule(cfg.passes.pipeline, ranks, cfg.train.microbatches)
    names = {(False, 1): "1f1b", (True, 1): "zero_bubble", (True, 2): "zbv"}
    chunks = schedule.stages // ranks
    name = names.get((schedule.is_split, chunks), "interleaved")
    counts = cfg.passes.pipeline.stages or layers_by_stage(cfg, schedule.stages)
    by_rank = stages_by_rank(schedule)
    kinds = [tuple(counts[stage] for stage in stages) for stages in by_rank]
    between = list(dict.fromkeys(kinds[1:-1]))
    few_rank_of = (0, *(1 + between.index(kind) for kind in kinds[1:-1]), 1 + len(between))
    few_ranks = 2 + len(between)
    changes = {"mesh": {"pp": few_ranks}, "passes": {"pipeline": {"schedule": name, "chunks": max(2, chunks)}}}
    few_cfg = replace_nested(cfg, changes)
    few_schedule = build_schedule(few_cfg.passes.pipeline, few_ranks, cfg.train.microbatches)
    few_by_rank = stages_by_rank(few_schedule)
    if few_ranks == ranks or any(len(few_by_rank[few]) != len(by_rank[rank]) for rank, few in enumerate(few_rank_of)):
        return None
    pairs = [pair for rank, few in enumerate(few_rank_of) for pair in zip(by_rank[rank], few_by_rank[few])]
    stages = tuple(few for _, few in sorted(pairs))
    ends = [
        (chunk * ranks + at * (ranks - 1), chunk * few_ranks + at * (few_ranks - 1))
        for chunk in range(chunks)
        for at in (0, 1)
    ]
    if any(stages[stage] != few for stage, few in ends):  # the order of chunks differs from that on few ranks
        return None
    few_counts = [count for _, count in sorted(dict(zip(stages, counts)).items())]
    changes = {"model": {"n_layers": sum(few_counts)}, "passes": {"pipeline": {"stages": few_counts}}}
    return FewStages(replace_nested(few_cfg, changes), schedule, few_rank_of, stages)


def stages_by_rank(schedule: Schedule) -> list[list[int]]:
    """Return the stages of each rank of the pipeline in order."""
    return [
        [stage for stage, rank_of_stage in enumerate(schedule.rank_of) if rank_of_stage == rank]
        for rank in range(schedule.ranks)
    ]


def layers_by_stage(cfg: Config, stages: int) -> tuple[int, ...]:
    """Return the number of layers that `assign` gives each stage."""
    sizes = sizes_of(cfg, subject(cfg).module)
    heads, length = sizes.heads, cfg.train.seq_len
    layer = 2 * sizes.active_entries + 2 * length * heads.queries * (heads.key_dim + heads.value_dim)
    return even([round(layer)] * (sizes.layers - 1) + [round(layer + 2 * sizes.head_entries)], stages)


def repeat_stages(cfg: Config, few: FewStages, step: DryStep) -> DryStep | None:
    """Return the programs of all stages of `cfg` from those of few; None if some stages send different values."""
    labels = labels_of(step)
    if labels is None:
        return None
    programs, passes = dict[str, Captured](), []
    report_of_program = {done["program"]: done for done in step.report["passes"]}
    for name, captured in step.programs.items():
        task = task_of(captured)
        of_rank = task.kind in OF_RANKS
        few_numbers = few.ranks if of_rank else few.stages
        for number in (n for n, few_number in enumerate(few_numbers) if few_number == task.stage):
            repeated = Task(number, task.kind)
            if of_rank:
                new_name = names_in_update(step, task.stage, number, (few.ranks[-1], few.schedule.ranks - 1))
            else:
                new_name = partial(name_in_stage, labels=labels, few_stage=task.stage, stage=number)
            program = dataclasses.replace(renamed(captured.program, new_name), task=repeated)
            programs[str(repeated)] = Captured(program, captured.ctx)
            passes.append(report_of_program[name] | {"program": str(repeated)})
    schedule = build_schedule(cfg.passes.pipeline, cfg.mesh.pp, cfg.train.microbatches, Reporter(passes=passes).cost)
    return dataclasses.replace(step, programs=programs, report=step.report | {"passes": passes}, schedule=schedule)


def task_of(captured: Captured) -> Task:
    """Return the task that a program of a pipelined step does."""
    assert captured.program.task is not None
    return captured.program.task


def renamed(program: ir.Program, new_name: Callable[[str], str]) -> ir.Program:
    """Return a program over the same graph with other names for its carried values."""

    def change(end: T) -> T:
        return dataclasses.replace(end, name=new_name(end.name)) if end.kind == "carried" else end

    return dataclasses.replace(
        program, inputs=tuple(map(change, program.inputs)), outputs=tuple(map(change, program.outputs))
    )


def labels_of(step: DryStep) -> dict[str, tuple[int, str]] | None:
    """Return for each value the stage that makes it and a label: its position among the values for the same neighbour.

    None if values go to stages that are not neighbours, or stages make different numbers of them.
    """
    tasks = [(task_of(captured), captured.program) for captured in step.programs.values()]
    ends = {task: (carried(p.inputs), carried(p.outputs)) for task, p in tasks if task.kind not in OF_RANKS}
    stage_of_value = {value: task.stage for task, (_, outputs) in ends.items() for value in outputs}
    to_next, to_previous = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
    for value, stage in stage_of_value.items():
        others = {task.stage for task, (inputs, _) in ends.items() if value in inputs} - {stage}
        if not others <= {stage - 1, stage + 1} or len(others) > 1:
            return None
        for other in others:
            (to_next if other > stage else to_previous)[stage].append(value)
    stages = len({*stage_of_value.values()})
    lists_by_direction = (to_next.values(), to_previous.values())
    if any(len({*map(len, lists)}) > 1 or len(lists) not in (0, stages - 1) for lists in lists_by_direction):
        return None
    labels = {value: (stage, value) for value, stage in stage_of_value.items()}
    for label, lists in (("next", to_next), ("previous", to_previous)):
        labels |= {value: (stage, f"{label} {i}") for stage, values in lists.items() for i, value in enumerate(values)}
    return labels


def carried(ends: Iterable[ir.Input | ir.Output]) -> list[str]:
    return [end.name for end in ends if end.kind == "carried"]


def name_in_stage(name: str, labels: Mapping[str, tuple[int, str]], few_stage: int, stage: int) -> str:
    """Return the name, in a stage, of the value that the compiled stage calls `name`."""
    source, label = labels[name]
    return f"stage {stage + source - few_stage}: {label}"  # names of updates begin with the number of their rank


def names_in_update(step: DryStep, few_rank: int, rank: int, last: tuple[int, int]) -> Callable[[str], str]:
    """Return the function that renames the carried values of a compiled rank's update to those of a rank's update.

    `last` is (last compiled rank, last rank of all). Ranks exchange squared norms, and gradient terms of parameters
    that the first and the last rank share (`passes/ir/task.py`); all other values stay on the rank.
    """
    sources = {0: 0, last[0]: last[1], few_rank: rank}
    parameters = {i.name for c in step.programs.values() for i in c.program.inputs if i.kind == "parameter"}
    names = {SQUARE: SQUARE, square_of(few_rank - 1): square_of(rank - 1), square_of(few_rank): square_of(rank)}
    names |= {term_of(name, old): term_of(name, new) for name in parameters for old, new in sources.items()}
    return lambda name: names.get(name) or f"rank {rank}: {name}"
