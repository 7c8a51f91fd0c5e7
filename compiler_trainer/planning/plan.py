"""`compiler-trainer plan`: find the best setting for a job on a cluster; write a table, a page and a recipe."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compiler_trainer.config import schema
from compiler_trainer.config.schema import CheckpointConfig, Config, closed
from compiler_trainer.config.validate import validate
from compiler_trainer.console import say, wide
from compiler_trainer.models.subject import named
from compiler_trainer.planning import answer, plan_page
from compiler_trainer.planning.search import Plan, search, side_by_side
from compiler_trainer.planning.space import Asked
from compiler_trainer.planning.vary import Varied, vary_table
from compiler_trainer.training import folder
from compiler_trainer.training.progress import say_contents


class Question(NamedTuple):
    """A request of the command line for a plan: options, overrides, and the names of groups with choices."""

    cfg: Config
    overrides: Sequence[str]
    groups: frozenset[str]
    varied: dict[str, Any] = {}  # option values of this question, if there are several

    @property
    def asked(self) -> Asked:
        """The job to plan for, with its stated options; raises UserError if they contradict each other."""
        names = (override.lstrip("+~").partition("=")[0] for override in self.overrides)
        asked = Asked(self.cfg, frozenset(name for name in names if name not in self.groups))
        dry = dataclasses.replace(self.cfg.run, dry=True)
        validate(closed(dataclasses.replace(self.cfg, run=dry)), asked.gpus)
        return asked


def plan(question: Question) -> Plan:
    """Plan for one job and write into its run folder; raise UserError, with nothing written, on bad input."""
    began = time.perf_counter()
    asked = question.asked
    place = checked_folder(question.cfg)
    train = asked.cfg.train
    what = f"{train.global_batch_size:,} rows of {train.seq_len:,} tokens a step"
    say(f"planning {named(asked.cfg.model)} on {asked.gpus:,} GPUs of {asked.cfg.cluster.name}: {what}")
    with side_by_side([asked]) as compile_all:
        (found,) = search([asked], compile_all)
    wide().print(answer.table(found))
    place.mkdir(parents=True, exist_ok=True)
    schema.save(found.best.candidate.applied(question.cfg), place / folder.CONFIG)
    answer.write(found, answer.recipe(found, question.overrides, question.groups), place)
    plan_page.write(found, place)
    say(f"planned in {time.perf_counter() - began:.1f} s; train it with recipe={place / answer.RECIPE}")
    say_contents(place)
    return found


def plan_all(questions: Sequence[Question]) -> list[Varied]:
    """Plan for jobs that differ in some options; jobs that differ only in the cluster share compiled programs."""
    began = time.perf_counter()
    place = checked_folder(questions[0].cfg)
    jobs = [question.asked for question in questions]
    found: dict[int, Plan] = {}
    for alike in by_program(jobs):
        with side_by_side([jobs[i] for i in alike]) as compile_all:
            found |= dict(zip(alike, search([jobs[i] for i in alike], compile_all)))
    varied = [Varied(question.varied, found[i]) for i, question in enumerate(questions)]
    wide().print(vary_table(varied))
    place.mkdir(parents=True, exist_ok=True)
    for number, (question, one) in enumerate(zip(questions, varied)):
        point = place / str(number)
        point.mkdir(exist_ok=True)
        overrides = [*question.overrides, *(f"{name}={value}" for name, value in one.values.items())]
        answer.write(one.plan, answer.recipe(one.plan, overrides, question.groups), point)
    plan_page.write_varied(varied, place)
    say(f"planned {len(varied)} times in {time.perf_counter() - began:.1f} s; recipes are {place}/N/{answer.RECIPE}")
    say_contents(place)
    return varied


def by_program(jobs: Sequence[Asked]) -> list[list[int]]:
    """Return the indices of jobs by group; jobs of a group have the same programs and differ only in rates of the cluster."""
    groups: dict[str, list[int]] = {}
    for i, asked in enumerate(jobs):
        alike = dataclasses.replace(asked.cfg, cluster=schema.ClusterConfig(gpus=asked.gpus))
        groups.setdefault(repr((dataclasses.replace(alike, run=None), sorted(asked.given))), []).append(i)  # type: ignore[arg-type]
    return list(groups.values())


def checked_folder(cfg: Config) -> Path:
    """Return the run folder; raise UserError if files are in the way."""
    folder.check(dataclasses.replace(cfg, checkpoint=CheckpointConfig(interval=None)), None, 0)
    return Path(cfg.run.dir)
