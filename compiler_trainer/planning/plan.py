"""`compiler-trainer plan`: find the best setting for a job on a cluster; write a table, a page and a recipe."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compiler_trainer.config import schema
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import CheckpointConfig, Config, with_placeholders
from compiler_trainer.config.validate import validate
from compiler_trainer.console import say, wide
from compiler_trainer.models.subject import named
from compiler_trainer.planning import answer, plan_page
from compiler_trainer.planning.answer import Varied, vary_table
from compiler_trainer.planning.search import Plan, compile_in_parallel, search, search_all
from compiler_trainer.planning.space import PlanRequest
from compiler_trainer.training import folder
from compiler_trainer.training.loggers import say_contents


class Question(NamedTuple):
    """A request of the command line for a plan: options, overrides, and the names of groups with choices."""

    cfg: Config
    overrides: Sequence[str]
    groups: frozenset[str]
    varied: dict[str, Any] = {}  # option values of this question, if there are several

    @property
    def request(self) -> PlanRequest:
        """The job to plan for, with its stated options; raises UserError if they contradict each other."""
        open_mesh = "mesh=auto"  # states nothing
        names = (text.lstrip("+~").partition("=")[0] for text in self.overrides if text != open_mesh)
        request = PlanRequest(self.cfg, frozenset(name for name in names if name not in self.groups))
        dry = dataclasses.replace(self.cfg.run, dry=True)
        validate(with_placeholders(dataclasses.replace(self.cfg, run=dry)), request.gpus)
        return request


def plan(question: Question) -> Plan:
    """Plan for one job and write into its run folder; raise UserError, with nothing written, on bad input."""
    began = time.perf_counter()
    request = question.request
    run_folder = checked_folder(question.cfg)
    train = request.cfg.train
    batch = f"{train.global_batch_size:,} sequences of {train.seq_len:,} tokens a step"
    say(f"planning {named(request.cfg.model)} on {request.gpus:,} GPUs of {request.cfg.cluster.name}: {batch}")
    with compile_in_parallel([request]) as compile_all:
        result = search(request, compile_all)
    wide().print(answer.table(result))
    run_folder.mkdir(parents=True, exist_ok=True)
    schema.save(result.best.candidate.applied(question.cfg), run_folder / folder.CONFIG)
    answer.write(result, answer.job_file(result, question.overrides, question.groups), run_folder)
    plan_page.write(result, run_folder)
    say(f"planned in {time.perf_counter() - began:.1f} s; train it with: compiler-trainer {run_folder / answer.JOB}")
    say_contents(run_folder)
    return result


def plan_all(questions: Sequence[Question]) -> list[Varied]:
    """Plan for jobs that differ in some options; jobs that differ only in the cluster share compiled programs.

    Raises UserError if nothing fits for any of them.
    """
    began = time.perf_counter()
    run_folder = checked_folder(questions[0].cfg)
    jobs = [question.request for question in questions]
    plans: dict[int, Plan | UserError] = {}
    for indices in by_program(jobs):
        with compile_in_parallel([jobs[i] for i in indices]) as compile_all:
            plans |= dict(zip(indices, search_all([jobs[i] for i in indices], compile_all)))
    variants = [Varied(question.varied, plans[i]) for i, question in enumerate(questions)]
    if all(isinstance(plan, UserError) for plan in plans.values()):
        raise plans[0]  # type: ignore[misc]
    wide().print(vary_table(variants))
    run_folder.mkdir(parents=True, exist_ok=True)
    for number, (question, variant) in enumerate(zip(questions, variants)):
        if isinstance(variant.plan, UserError):
            continue
        point = run_folder / str(number)
        point.mkdir(exist_ok=True)
        answer.write(variant.plan, answer.job_file(variant.plan, question.overrides, question.groups), point)
    plan_page.write_varied(variants, run_folder)
    say(
        f"made {len(variants)} plans in {time.perf_counter() - began:.1f} s; job files are {run_folder}/N/{answer.JOB}"
    )
    say_contents(run_folder)
    return variants


def by_program(jobs: Sequence[PlanRequest]) -> list[list[int]]:
    """Return the indices of jobs by group; jobs of a group differ only in the cluster's rates and share programs."""
    groups: dict[str, list[int]] = {}
    for i, request in enumerate(jobs):
        without_rates = dataclasses.replace(request.cfg, cluster=schema.ClusterConfig(gpus=request.gpus))
        groups.setdefault(repr((dataclasses.replace(without_rates, run=None), sorted(request.stated))), []).append(i)  # type: ignore[arg-type]
    return list(groups.values())


def checked_folder(cfg: Config) -> Path:
    """Return the run folder; raise UserError if files are in the way."""
    folder.check(dataclasses.replace(cfg, checkpoint=CheckpointConfig(interval=None)), None, 0)
    return Path(cfg.run.dir)
