"""`mesh=auto`: the mesh that a job starts with; and a word where another one is predicted to be faster.

Nothing but the mesh is chosen here: microbatches, recomputation and precision are as the options say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from compiler_trainer.config.schema import AUTO, Config, MeshConfig
from compiler_trainer.models.subject import Subject
from compiler_trainer.planning import answer
from compiler_trainer.planning.search import GIB, Found, Plan, all_forms, one, room, search
from compiler_trainer.planning.sizes import sizes_of
from compiler_trainer.planning.space import Asked, Candidate, Left
from compiler_trainer.step.ranks import from_rank_0, gather, rank, start_ranks
from compiler_trainer.training.progress import announce

FEW = 4  # settings that are compiled while a job waits
STATED = frozenset({"train", "passes"})
LARGE = 500_000_000  # parameters, from which on a mesh is worth a word
FASTER = 1.1


def settled(cfg: Config) -> Config:
    """`cfg` with its mesh, chosen on all ranks alike if it is to be; raises UserError where nothing fits."""
    if cfg.mesh != AUTO:
        return cfg
    ranks = (cfg.cluster.gpus or 1) if cfg.run.dry else start_ranks()
    asked = asked_of(cfg, ranks)
    if ranks == 1:
        return dataclasses.replace(cfg, mesh=MeshConfig())
    (plan,) = search([asked], lambda chosen: compiled_by_ranks(asked, chosen))
    announce(choice(plan))
    return dataclasses.replace(cfg, mesh=from_rank_0(lambda: plan.best.candidate.mesh))


def asked_of(cfg: Config, ranks: int) -> Asked:
    """The job as one to find a mesh for."""
    cluster = dataclasses.replace(cfg.cluster, gpus=ranks)
    plan = dataclasses.replace(cfg.plan, compile=min(FEW, cfg.plan.compile))
    return Asked(dataclasses.replace(cfg, cluster=cluster, plan=plan), STATED)


def compiled_by_ranks(asked: Asked, chosen: Sequence[Candidate]) -> list[Found]:
    """Compiled settings, each by one rank, known to all."""
    ranks = asked.gpus if dist.is_initialized() else 1
    by_rank = gather([one([asked], candidate) for candidate in chosen[rank() :: ranks]])
    return [by_rank[i % ranks][i // ranks] for i in range(len(chosen))]


def choice(plan: Plan) -> str:
    """What was taken, and why, in one line."""
    best = plan.best
    speed = f"{plan.tokens_per_s(best):,.0f} tokens/s/GPU"
    size = f"{best.bytes / GIB:,.2f} of {room(plan.asked) / GIB:,.2f} GiB"
    took = f"mesh=auto: {best.candidate.axes()}, predicted {speed} and {size} on {plan.asked.cfg.cluster.name}"
    others = answer.losers(plan, 1)
    return f"{took}; next, {others[0][0].candidate.axes()}: {others[0][1]}" if others else took


def remark(cfg: Config, trained: Subject) -> str:
    """That another mesh is predicted to be more than a tenth faster, by closed forms; else an empty string."""
    mesh = cfg.mesh
    ranks = mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp
    parameters = sum(p.numel() for p in trained.module.parameters())
    if not cfg.plan.suggest or ranks == 1 or parameters < LARGE or not describes_device(cfg):
        return ""
    asked = asked_of(cfg, ranks)
    forms = all_forms(asked, sizes_of(cfg, trained.module), Left())
    own = next((form for form in forms if form.candidate.mesh == mesh), None)
    best = next((form for form in forms if form.bytes <= room(asked)), None)
    if own is None or best is None or own.step_s < FASTER * best.step_s:
        return ""
    faster = f"{own.step_s / best.step_s - 1:.0%} faster on {cfg.cluster.name}"
    return f"note: {best.candidate.axes()} is predicted to be {faster} than {own.candidate.axes()}; mesh=auto takes it"


def describes_device(cfg: Config) -> bool:
    """Whether `cluster` is what this process computes on."""
    if torch.cuda.is_available():
        return cfg.cluster.name.upper() in torch.cuda.get_device_name()
    return cfg.cluster.name == "cpu"
