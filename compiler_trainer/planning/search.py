"""The search: estimate every setting by closed forms, compile the best, and rank the compiled ones.

Settings are compiled in rounds. The first third are the best by closed forms, of different kinds; their results correct
the closed forms for the next third, and so on.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch

from compiler_trainer.config.device import cluster_of, usable_gib
from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.config.schema import MeshConfig
from compiler_trainer.models.subject import subject
from compiler_trainer.planning import compiled
from compiler_trainer.planning.compiled import mixtures
from compiler_trainer.planning.estimate import Estimate, Rank, estimates
from compiler_trainer.planning.space import Candidate, PlanRequest, Sizes, candidates, sizes_of
from compiler_trainer.training.speed import peak_flops
from passes.ir.ir import CompileError

T = TypeVar("T")
GIB = 2**30
ROUNDS = 3  # of compiling settings; the results of a round correct the closed forms for the next
SLOW = 1.5  # times the fastest setting that fits; slower ones are not considered
WORTH = 0.99  # of the fastest time: a mixture of two recomputations has to be faster to be worth compiling both
TRIES = 3  # more rounds if no compiled setting fits

Outcome = tuple[Estimate, ...] | str  # estimates of a setting for each job, or the reason why a pass refused it
Compile = Callable[[Sequence[Candidate]], list[Outcome]]


@dataclass(frozen=True)
class Plan:
    """The result of a search over `count` settings.

    `ranked` are compiled settings that fit, fastest first, `too_large` those that do not fit. `forms` are closed forms,
    fastest first. `refused` are settings that a pass cannot compile, with the reason. `left` counts the settings left
    out from the start.
    """

    request: PlanRequest
    flops_per_token: int
    ranked: list[Estimate]
    too_large: list[Estimate]
    refused: dict[Candidate, str]
    forms: list[Estimate]
    count: int
    left: dict[str, int] = field(default_factory=dict)

    @property
    def best(self) -> Estimate:
        """The fastest setting that fits."""
        return self.ranked[0]

    def tokens_per_s(self, estimate: Estimate) -> float:
        """Return the tokens per second of one GPU."""
        train = self.request.cfg.train
        return train.global_batch_size * train.seq_len / self.request.gpus / estimate.step_s

    def mfu(self, estimate: Estimate) -> float:
        """Return the MFU, relative to the peak in the dtype of computation."""
        return self.flops_per_token * self.tokens_per_s(estimate) / peak_flops(self.request.cfg)


def room(request: PlanRequest) -> float:
    """Return the bytes of tensors that fit on a GPU, without its context, communicators and the allocator's loss."""
    return GIB * usable_gib(request.cfg.cluster, is_alone=request.gpus == 1)


def all_forms(request: PlanRequest, sizes: Sizes, left: Counter[str] | None = None) -> list[Estimate]:
    """Return the closed forms of every setting, fastest first; count the settings left out in `left`."""
    cluster, forms = cluster_of(request.cfg.cluster), list[Estimate]()
    groups: dict[tuple, list[Candidate]] = {}
    for candidate in candidates(request, sizes, Counter() if left is None else left):
        groups.setdefault((candidate.mesh, candidate.microbatches, candidate.float8), []).append(candidate)
    for key, candidates_of_rank in groups.items():
        forms += estimates(Rank(request.cfg, sizes, cluster, *key), candidates_of_rank)
    return sorted(forms, key=lambda e: e.step_s)


@dataclass
class SearchState:
    """The search for one job: its closed forms, and the compiled settings so far."""

    request: PlanRequest
    flops_per_token: int
    plain: list[Estimate]
    count: int
    left: Counter[str]
    layers: tuple[str, ...] = ()
    estimates: dict[Candidate, Estimate] = field(default_factory=dict)
    refused: dict[Candidate, str] = field(default_factory=dict)

    def next(self, turn: int) -> list[Candidate]:
        """Return the settings to compile in a round: a part of `plan.compile`, and more as long as none fits."""
        count, limit, done = self.request.cfg.plan.compile, room(self.request), {*self.estimates, *self.refused}
        batch_size = -(-count // ROUNDS)
        if turn < ROUNDS:
            batch_size = min(batch_size, count - len(done))
        elif any(e.bytes <= limit for e in self.estimates.values()):
            return []
        forms = correct(self.plain, self.estimates)
        ends = self.ends_to_compile(forms) if turn == ROUNDS - 1 else []
        return list(dict.fromkeys((*ends, *shortlist(forms, limit, done, batch_size))))[:batch_size]

    def mixed(self) -> list[Estimate]:
        """Return the estimates that fit between compiled settings that differ only in recomputation."""
        return [mixture.estimate for mixture in mixtures(self.estimates.values(), room(self.request), self.layers)]

    def ends_to_compile(self, forms: list[Estimate]) -> list[Candidate]:
        """Return the settings to compile for the mixture of two that is predicted to be the fastest that fits."""
        limit = room(self.request)
        fastest = min(
            (e.step_s for e in (*self.estimates.values(), *self.mixed()) if e.bytes <= limit), default=math.inf
        )
        for mixture in mixtures((self.estimates.get(e.candidate, e) for e in forms), limit, self.layers):
            not_compiled = [end for end in mixture.ends if end not in self.estimates and end not in self.refused]
            if not_compiled and mixture.estimate.step_s < WORTH * fastest:
                return not_compiled
        return []

    def plan(self) -> Plan:
        """Return the plan; raise UserError if nothing fits, with the missing memory and the options to change."""
        limit = room(self.request)
        by_speed = sorted((*self.estimates.values(), *self.mixed()), key=lambda e: e.step_s)
        ranked = [e for e in by_speed if e.bytes <= limit]
        if not ranked and not by_speed:
            raise UserError("plan", f"every compiled setting is refused: {next(iter(self.refused.values()))}")
        if not ranked:
            raise nothing_fits(self.request, min(by_speed, key=lambda e: e.bytes))
        too_large = [e for e in by_speed if e.bytes > limit]
        forms = correct(self.plain, self.estimates)
        counts = (self.count, dict(self.left))
        return Plan(self.request, self.flops_per_token, ranked, too_large, self.refused, forms, *counts)


def start_search(request: PlanRequest) -> SearchState:
    """Return the search for a job with all closed forms; raise UserError if there is no setting, or none can fit."""
    trained, left = subject(request.cfg), Counter[str]()
    sizes = sizes_of(request.cfg, trained.module)
    forms = all_forms(request, sizes, left)
    if not forms:
        reasons = "; ".join(left) or "no mesh with the stated axes has that many ranks"
        raise UserError(
            "train.global_batch_size", f"leaves no possible setting: {reasons}; change the batch or cluster.gpus"
        )
    least = min(forms, key=lambda e: e.bytes)
    if all(e.least_bytes > room(request) for e in forms):
        raise nothing_fits(request, least)
    flops = trained.flops_per_token(request.cfg.train.seq_len)
    return SearchState(request, flops, possible_best(forms, room(request)), len(forms), left, sizes.names)


def possible_best(forms: list[Estimate], limit: float) -> list[Estimate]:
    """Return the settings that may become the best, and the fastest and the smallest of each mesh for the report."""
    fitting = next((e.step_s for e in forms if e.bytes <= limit), math.inf)
    kept_ids = {id(e) for e in forms if e.step_s <= SLOW * fitting}
    for order in (forms, sorted(forms, key=lambda e: e.bytes)):
        fastest: dict[MeshConfig, Estimate] = {}
        for estimate in order:
            fastest.setdefault(estimate.candidate.mesh, estimate)
        kept_ids |= set(map(id, fastest.values()))
    return [e for e in forms if id(e) in kept_ids]


def search(request: PlanRequest, compile_all: Compile) -> Plan:
    """Return a plan for a job; raise UserError if nothing fits."""
    (plan,) = search_all([request], compile_all)
    if isinstance(plan, UserError):
        raise plan
    return plan


def search_all(jobs: Sequence[PlanRequest], compile_all: Compile) -> list[Plan | UserError]:
    """Return a plan for each of several jobs that differ only in the cluster, or the error that nothing fits."""
    started = [result_of(partial(start_search, request)) for request in jobs]
    states = {i: state for i, state in enumerate(started) if isinstance(state, SearchState)}
    for turn in range(ROUNDS + TRIES):
        chosen = list(dict.fromkeys(candidate for state in states.values() for candidate in state.next(turn)))
        for candidate, outcome in zip(chosen, compile_all(chosen) if chosen else [], strict=True):
            for i, state in states.items():
                if isinstance(outcome, str):
                    state.refused[candidate] = outcome
                else:
                    state.estimates[candidate] = outcome[i]
    return [result_of(state.plan) if isinstance(state, SearchState) else state for state in started]


def result_of(work: Callable[[], T]) -> T | UserError:
    """Return the result of `work`, or the UserError that it raises."""
    try:
        return work()
    except UserError as error:
        return error


def shortlist(forms: Iterable[Estimate], limit: float, done: set[Candidate], count: int) -> list[Candidate]:
    """Return the fastest settings that may fit, one of each kind, then those that need least memory."""
    possible = (form for form in forms if form.least_bytes <= limit)
    order = sorted(possible, key=lambda e: (e.bytes > limit, e.step_s if e.bytes <= limit else e.bytes))
    chosen: dict[object, Candidate] = {}
    for form in order:
        if form.candidate not in done and len(chosen) < count:
            chosen.setdefault(kind_of(form.candidate), form.candidate)
    return list(chosen.values())


def correct(forms: list[Estimate], actual_by_candidate: dict[Candidate, Estimate]) -> list[Estimate]:
    """Return closed forms multiplied by the median error of compiled settings of the same recomputation and kind."""
    if not actual_by_candidate:
        return forms
    errors: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for form in forms:
        if (actual := actual_by_candidate.get(form.candidate)) is not None:
            for key in ((), (form.candidate.recompute,), kind_of(form.candidate)):
                errors.setdefault(key, []).append((actual.step_s / form.step_s, actual.bytes / form.bytes))
    factors = {key: tuple(statistics.median(f) for f in zip(*pairs)) for key, pairs in errors.items()}

    def corrected(form: Estimate) -> Estimate:
        candidate = form.candidate
        keys = (kind_of(candidate), (candidate.recompute,), ())
        time, size = next(factors[key] for key in keys if key in factors)
        exposed = {axis: s * time for axis, s in form.exposed_s.items()}
        memory = {kind: n * size for kind, n in form.memory.items()}
        changes = {"step_s": form.step_s * time, "compute_s": form.compute_s * time, "bytes": form.bytes * size}
        return replace(form, exposed_s=exposed, memory=memory, **changes)

    return sorted(map(corrected, forms), key=lambda e: e.step_s)


def kind_of(candidate: Candidate) -> tuple[str, ...]:
    """Return the kind of a setting: closed forms have similar errors for settings of a kind."""
    parallel = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    axes = "".join(axis for axis in parallel if getattr(candidate.mesh, axis) > 1)
    return candidate.recompute, str(candidate.regather), str(candidate.collectives), candidate.method, axes


def nothing_fits(request: PlanRequest, least: Estimate) -> UserError:
    """Return the error with the setting that needs least memory, the memory it lacks, and the options to change."""
    cfg, needed_gib, gpu_gib = request.cfg, least.bytes / GIB, room(request) / GIB
    largest = max(least.memory, key=lambda kind: least.memory[kind])
    setting = f"{least.candidate.axes()}, {least.candidate.recomputes()}"
    smallest = f"the least is {needed_gib:,.1f} GiB ({setting}), most of it {largest}"
    reserved = "cluster.context_gib, communicator_gib and allocator_loss"
    limit = f"a GPU of {cfg.cluster.name} has {gpu_gib:,.1f} GiB after {reserved}"
    is_activation = {"activations", "update"} & {largest}
    change = "a shorter train.seq_len" if is_activation else "more GPUs, or optim=adamw8bit"
    return UserError(
        "plan", f"nothing fits: {smallest}, and {limit}, {needed_gib - gpu_gib:,.1f} GiB too few; plan for {change}"
    )


# ---- compiling side by side ---------------------------------------------------------------------------


def compile_one(jobs: Sequence[PlanRequest], candidate: Candidate) -> Outcome:
    """Return the estimates of a compiled setting for each job, or the reason why a pass refused it or failed."""
    try:
        return compiled.estimate(jobs[0].cfg, candidate, [request.cfg.cluster for request in jobs])
    except (UserError, CompileError) as error:
        return one_line(error)


@contextmanager
def compile_in_parallel(jobs: Sequence[PlanRequest]) -> Iterator[Compile]:
    """Return a context in which settings are compiled in parallel processes, one a core.

    They are forks of this process, so that nothing is imported again.
    """
    plan = jobs[0].cfg.plan
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = multiprocessing.get_context("fork")
    count = min(plan.processes or cores, plan.compile)
    with ProcessPoolExecutor(count, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def compile_all(chosen: Sequence[Candidate]) -> list[Outcome]:
            order = sorted(range(len(chosen)), key=lambda i: (chosen[i].float8, chosen[i].microbatches))
            try:
                outcomes = dict(zip(order, pool.map(compile_one, [jobs] * len(chosen), [chosen[i] for i in order])))
            except BrokenProcessPool as error:
                problem = f"{count} processes compiled at once, and one was killed, probably for lack of memory"
                raise UserError("plan.processes", f"{problem}; set it to fewer") from error
            return [outcomes[i] for i in range(len(chosen))]

        yield compile_all
