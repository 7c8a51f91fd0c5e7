"""The search: estimate every setting by closed forms, compile the best, and rank the compiled ones.

Settings are compiled in rounds. The first third are the best by closed forms, of different kinds; their results correct
the closed forms for the next third, and so on.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from compiler_trainer.config.clusters import cluster_of
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import MeshConfig
from compiler_trainer.models.subject import subject
from compiler_trainer.planning import compiled
from compiler_trainer.planning.estimate import Estimate, estimates
from compiler_trainer.planning.mix import mixtures
from compiler_trainer.planning.rank import Rank
from compiler_trainer.planning.sizes import Sizes, sizes_of
from compiler_trainer.planning.space import Asked, Candidate, Left, candidates
from compiler_trainer.training.speed import peak_flops

GIB = 2**30
ROUNDS = 3  # of compiling settings; the results of a round correct the closed forms for the next
SLOW = 1.5  # times the fastest setting that fits; slower ones are not considered
WORTH = 0.99  # of the fastest time: a mixture of two recomputations has to be faster to be worth compiling both
TRIES = 3  # more rounds if no compiled setting fits

Found = tuple[Estimate, ...] | str  # estimates of a setting for each job, or the reason why a pass refused it
Compile = Callable[[Sequence[Candidate]], list[Found]]


@dataclass(frozen=True)
class Plan:
    """The result of a search over `count` settings.

    `ranked` are compiled settings that fit, fastest first, `too_large` those that do not fit. `forms` are closed forms,
    fastest first. `refused` are settings that a pass cannot compile, with the reason. `left` counts the settings left
    out from the start.
    """

    asked: Asked
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

    def tokens_per_s(self, found: Estimate) -> float:
        """Return the tokens per second of one GPU."""
        train = self.asked.cfg.train
        return train.global_batch_size * train.seq_len / self.asked.gpus / found.step_s

    def mfu(self, found: Estimate) -> float:
        """Return the MFU, relative to the peak in the dtype of computation."""
        return self.flops_per_token * self.tokens_per_s(found) / peak_flops(self.asked.cfg)


def room(asked: Asked) -> float:
    """Return the bytes of tensors that fit on a GPU, without its context, communicators and the allocator's loss."""
    cluster = asked.cfg.cluster
    beside = cluster.context_gib + (cluster.communicator_gib if asked.gpus > 1 else 0.0)
    return GIB * (cluster.hbm_gib - beside) / (1 + cluster.allocator_loss)


def all_forms(asked: Asked, sizes: Sizes, left: Left) -> list[Estimate]:
    """Return the closed forms of every setting, fastest first; count the settings left out in `left`."""
    cluster, found = cluster_of(asked.cfg.cluster), list[Estimate]()
    groups: dict[tuple, list[Candidate]] = {}
    for candidate in candidates(asked, sizes, left):
        groups.setdefault((candidate.mesh, candidate.microbatches, candidate.float8), []).append(candidate)
    for key, alike in groups.items():
        found += estimates(Rank(asked.cfg, sizes, cluster, *key), alike)
    return sorted(found, key=lambda e: e.step_s)


@dataclass
class Sought:
    """The search for one job: its closed forms, and the compiled settings so far."""

    asked: Asked
    flops_per_token: int
    plain: list[Estimate]
    count: int
    left: Left
    layers: tuple[str, ...] = ()
    known: dict[Candidate, Estimate] = field(default_factory=dict)
    refused: dict[Candidate, str] = field(default_factory=dict)

    def next(self, turn: int) -> list[Candidate]:
        """Return the settings to compile in a round: a part of `plan.compile`, and more as long as none fits."""
        count, limit, done = self.asked.cfg.plan.compile, room(self.asked), {*self.known, *self.refused}
        wanted = -(-count // ROUNDS)
        if turn < ROUNDS:
            wanted = min(wanted, count - len(done))
        elif any(e.bytes <= limit for e in self.known.values()):
            return []
        forms = correct(self.plain, self.known)
        ends = self.worth_mixing(forms) if turn == ROUNDS - 1 else []
        return list(dict.fromkeys((*ends, *shortlist(forms, limit, done, wanted))))[:wanted]

    def mixed(self) -> list[Estimate]:
        """Return the estimates that fit between compiled settings that differ only in recomputation."""
        return [found.estimate for found in mixtures(self.known.values(), room(self.asked), self.layers)]

    def worth_mixing(self, forms: list[Estimate]) -> list[Candidate]:
        """Return the settings to compile for the mixture of two that is predicted to be the fastest that fits."""
        limit = room(self.asked)
        fastest = min((e.step_s for e in (*self.known.values(), *self.mixed()) if e.bytes <= limit), default=math.inf)
        for mixture in mixtures((self.known.get(e.candidate, e) for e in forms), limit, self.layers):
            unknown = [end for end in mixture.ends if end not in self.known and end not in self.refused]
            if unknown and mixture.estimate.step_s < WORTH * fastest:
                return unknown
        return []

    def plan(self) -> Plan:
        """Return the plan; raise UserError if nothing fits, with the missing memory and the options to change."""
        limit = room(self.asked)
        by_speed = sorted((*self.known.values(), *self.mixed()), key=lambda e: e.step_s)
        ranked = [e for e in by_speed if e.bytes <= limit]
        if not ranked and not by_speed:
            raise UserError("plan", f"every setting that was compiled is refused: {next(iter(self.refused.values()))}")
        if not ranked:
            raise nothing_fits(self.asked, min(by_speed, key=lambda e: e.bytes))
        too_large = [e for e in by_speed if e.bytes > limit]
        forms = correct(self.plain, self.known)
        counts = (self.count, self.left.count)
        return Plan(self.asked, self.flops_per_token, ranked, too_large, self.refused, forms, *counts)


def sought(asked: Asked) -> Sought:
    """Return the search for a job with the closed forms of every setting; raise UserError if none exists or none can fit."""
    trained, left = subject(asked.cfg), Left()
    sizes = sizes_of(asked.cfg, trained.module)
    forms = all_forms(asked, sizes, left)
    if not forms:
        what = "; ".join(left.count) or "no mesh has that many ranks with the axes that are stated"
        raise UserError("train.global_batch_size", f"leaves no setting: {what}; change the batch, or cluster.gpus")
    least = min(forms, key=lambda e: e.bytes)
    if all(e.least_bytes > room(asked) for e in forms):
        raise nothing_fits(asked, least)
    flops = trained.flops_per_token(asked.cfg.train.seq_len)
    return Sought(asked, flops, worth_keeping(forms, room(asked)), len(forms), left, sizes.names)


def worth_keeping(forms: list[Estimate], limit: float) -> list[Estimate]:
    """Return the settings that may become the best, and the fastest and the smallest of each mesh for the report."""
    fitting = next((e.step_s for e in forms if e.bytes <= limit), math.inf)
    chosen = {id(e) for e in forms if e.step_s <= SLOW * fitting}
    for order in (forms, sorted(forms, key=lambda e: e.bytes)):
        first: dict[MeshConfig, Estimate] = {}
        for one in order:
            first.setdefault(one.candidate.mesh, one)
        chosen |= set(map(id, first.values()))
    return [e for e in forms if id(e) in chosen]


def search(jobs: Sequence[Asked], compile_all: Compile) -> list[Plan]:
    """Return a plan for each of several jobs that differ only in the cluster; raise UserError if nothing fits."""
    all_sought = [sought(asked) for asked in jobs]
    for turn in range(ROUNDS + TRIES):
        chosen = list(dict.fromkeys(candidate for job in all_sought for candidate in job.next(turn)))
        for candidate, found in zip(chosen, compile_all(chosen) if chosen else [], strict=True):
            for i, job in enumerate(all_sought):
                if isinstance(found, str):
                    job.refused[candidate] = found
                else:
                    job.known[candidate] = found[i]
    return [job.plan() for job in all_sought]


def shortlist(forms: Iterable[Estimate], limit: float, known: set[Candidate], count: int) -> list[Candidate]:
    """Return the fastest settings that may fit, one of each kind, then those that need least memory."""
    possible = (form for form in forms if form.least_bytes <= limit)
    order = sorted(possible, key=lambda e: (e.bytes > limit, e.step_s if e.bytes <= limit else e.bytes))
    chosen: dict[object, Candidate] = {}
    for found in order:
        if found.candidate not in known and len(chosen) < count:
            chosen.setdefault(kind_of(found.candidate), found.candidate)
    return list(chosen.values())


def correct(forms: list[Estimate], known: dict[Candidate, Estimate]) -> list[Estimate]:
    """Return closed forms multiplied by the median error of compiled settings of the same recomputation and kind."""
    if not known:
        return forms
    off: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for form in forms:
        if (real := known.get(form.candidate)) is not None:
            for key in ((), (form.candidate.recompute,), kind_of(form.candidate)):
                off.setdefault(key, []).append((real.step_s / form.step_s, real.bytes / form.bytes))
    factors = {key: tuple(statistics.median(f) for f in zip(*pairs)) for key, pairs in off.items()}

    def corrected(form: Estimate) -> Estimate:
        candidate = form.candidate
        keys = (kind_of(candidate), (candidate.recompute,), ())
        time, size = next(factors[key] for key in keys if key in factors)
        exposed = {axis: s * time for axis, s in form.exposed_s.items()}
        memory = {kind: n * size for kind, n in form.memory.items()}
        how = {"step_s": form.step_s * time, "compute_s": form.compute_s * time, "bytes": form.bytes * size}
        return replace(form, exposed_s=exposed, memory=memory, **how)

    return sorted(map(corrected, forms), key=lambda e: e.step_s)


def kind_of(candidate: Candidate) -> tuple[str, ...]:
    """Return the kind of a setting: closed forms have similar errors for settings of a kind."""
    parallel = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    axes = "".join(axis for axis in parallel if getattr(candidate.mesh, axis) > 1)
    return candidate.recompute, str(candidate.regather), str(candidate.collectives), candidate.method, axes


def nothing_fits(asked: Asked, least: Estimate) -> UserError:
    """Return the error with the setting that needs least memory, the memory it lacks, and the options to change."""
    cfg, need, there = asked.cfg, least.bytes / GIB, room(asked) / GIB
    largest = max(least.memory, key=lambda kind: least.memory[kind])
    setting = f"{least.candidate.axes()}, {least.candidate.recomputes()}"
    what = f"the least is {need:,.1f} GiB ({setting}), most of it {largest}"
    beside = "cluster.context_gib, communicator_gib and allocator_loss"
    have = f"a GPU of {cfg.cluster.name} has {there:,.1f} GiB beside {beside}"
    fixed = {"activations", "update"} & {largest}
    change = "a shorter train.seq_len" if fixed else "more GPUs, or optim=adamw8bit"
    return UserError("plan", f"nothing fits: {what}, and {have}, {need - there:,.1f} too few; plan for {change}")


# ---- compiling side by side ---------------------------------------------------------------------------


def one(jobs: Sequence[Asked], candidate: Candidate) -> Found:
    """Return the estimates of a compiled setting for each job, or the reason why a pass refused it."""
    try:
        return compiled.estimate(jobs[0].cfg, candidate, [asked.cfg.cluster for asked in jobs])
    except UserError as error:
        return str(error)


@contextmanager
def side_by_side(jobs: Sequence[Asked]) -> Iterator[Compile]:
    """Return a context in which settings are compiled in parallel processes, one a core.

    They are forks of this process, so that nothing is imported again.
    """
    plan = jobs[0].cfg.plan
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    how = multiprocessing.get_context("fork")
    count = min(plan.processes or cores, plan.compile)
    with ProcessPoolExecutor(count, mp_context=how, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def compile_all(chosen: Sequence[Candidate]) -> list[Found]:
            order = sorted(range(len(chosen)), key=lambda i: (chosen[i].float8, chosen[i].microbatches))
            found = dict(zip(order, pool.map(one, [jobs] * len(chosen), [chosen[i] for i in order])))
            return [found[i] for i in range(len(chosen))]

        yield compile_all
