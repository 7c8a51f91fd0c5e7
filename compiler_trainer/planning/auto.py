"""`mesh=auto` and `train.microbatches=auto` at the start of a job; and a note if another mesh would be faster.

Nothing else is chosen here: recomputation and precision are as the options say.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from compiler_trainer.config.device import device_name, for_predicting, for_running
from compiler_trainer.config.jobs import as_override
from compiler_trainer.config.options import flat, tables
from compiler_trainer.config.schema import AUTO, AUTOMATIC, PLANNED, Config, is_open, open_axes
from compiler_trainer.config.validate import dry_world_size, resolve_mesh, stated
from compiler_trainer.models.subject import Subject, subject
from compiler_trainer.planning import answer
from compiler_trainer.planning.search import GIB, Outcome, Plan, all_forms, compile_one, room, search
from compiler_trainer.planning.space import Candidate, PlanRequest, replace_nested, sizes_of
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.step.ranks import from_rank_0, gather, rank, start_ranks
from compiler_trainer.training.loggers import announce

FEW = 4  # settings to compile while a job waits
SPARE = 0.8  # share of the memory to plan with, because closed forms are approximate
FASTER = 1.1


def choose_automatic(cfg: Config) -> Config:
    """Return `cfg` with all automatic options chosen, the same on all ranks; raise UserError if nothing fits."""
    if not is_open(cfg):
        return cfg
    ranks = dry_world_size(cfg) if cfg.run.dry else start_ranks()
    cfg = for_predicting(cfg) if cfg.run.dry else for_running(cfg)
    if stated(cfg.mesh) == ranks:  # the stated axes take all ranks
        cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **dict.fromkeys(open_axes(cfg.mesh), 1)))
    if not is_open(cfg):
        return cfg
    if len(open_axes(cfg.mesh)) > 1:
        candidate = fastest_by_search(plan_request(cfg, ranks))
    else:
        candidate = fastest_by_forms(plan_request(dataclasses.replace(cfg, mesh=resolve_mesh(cfg.mesh, ranks)), ranks))
    mesh, microbatches = from_rank_0(lambda: (candidate.mesh, candidate.microbatches))
    return dataclasses.replace(cfg, mesh=mesh, train=dataclasses.replace(cfg.train, microbatches=microbatches))


def fastest_by_search(request: PlanRequest) -> Candidate:
    """Return the fastest setting that fits, among compiled ones; announce it."""
    plan = search(request, lambda chosen: compiled_by_ranks(request, chosen))
    announce(choice(plan))
    return plan.best.candidate


def fastest_by_forms(request: PlanRequest) -> Candidate:
    """Return the fastest setting by closed forms that fits with room to spare, otherwise the smallest; announce it."""
    forms = all_forms(request, sizes_of(request.cfg, subject(request.cfg).module))
    if not forms:  # sequences do not divide among data ranks: padded batches are not accumulated
        return Candidate(request.cfg.mesh)
    fitting = (form for form in forms if form.bytes <= SPARE * room(request))
    best = next(fitting, None) or min(forms, key=lambda form: form.bytes)
    size = f"about {best.bytes / GIB:,.3g} of {room(request) / GIB:,.3g} GiB on {request.cfg.cluster.name}"
    announce(f"train.microbatches=auto: {best.candidate.microbatches}, {size}")
    return best.candidate


def plan_request(cfg: Config, ranks: int) -> PlanRequest:
    """Return the job to find a mesh or microbatches for; all other options stay as they are."""
    cluster = dataclasses.replace(cfg.cluster, gpus=ranks)
    plan = dataclasses.replace(cfg.plan, compile=min(FEW, cfg.plan.compile))
    open_of_mesh = open_axes(cfg.mesh)
    stated = {"mesh"} if not open_of_mesh else {f"mesh.{axis}" for axis in (*PLANNED, "pp") if axis not in open_of_mesh}
    if open_of_mesh and cfg.mesh.ep != 1:
        stated.add("mesh.ep")
    stated |= {f"train.{field.name}" for field in dataclasses.fields(cfg.train) if field.name != "microbatches"}
    stated |= set() if cfg.train.microbatches == AUTOMATIC else {"train.microbatches"}
    return PlanRequest(dataclasses.replace(cfg, cluster=cluster, plan=plan), frozenset(stated | {"passes"}))


def compiled_by_ranks(request: PlanRequest, chosen: Sequence[Candidate]) -> list[Outcome]:
    """Compile settings, each on one rank; return the results of all on all ranks."""
    ranks = request.gpus if dist.is_initialized() else 1
    by_rank = gather([compile_one([request], candidate) for candidate in chosen[rank() :: ranks]])
    return [by_rank[i % ranks][i // ranks] for i in range(len(chosen))]


def choice(plan: Plan) -> str:
    """Return the chosen setting, and the best other one with its reason, in one line."""
    best = plan.best
    speed = f"{plan.tokens_per_s(best):,.0f} tokens/s/GPU"
    size = f"{best.bytes / GIB:,.2f} of {room(plan.request) / GIB:,.2f} GiB"
    setting = f"{best.candidate.axes()}, microbatches {best.candidate.microbatches}"
    chosen = f"mesh=auto: {setting}, predicted {speed} and {size} on {plan.request.cfg.cluster.name}"
    others = answer.others_with_reasons(plan, 1)
    return f"{chosen}; next, {others[0][0].candidate.axes()}: {others[0][1]}" if others else chosen


def remark(cfg: Config, trained: Subject) -> str:
    """Return a note that the job is predicted not to fit, or to be slower than on another mesh; empty if neither.

    The prediction is by closed forms.
    """
    mesh = cfg.mesh
    ranks = mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp
    if not cfg.plan.suggest or cfg.cluster.device != device_name():
        return ""
    request = plan_request(dataclasses.replace(cfg, mesh=AUTO), ranks)
    forms = all_forms(request, sizes_of(cfg, trained.module))
    current = next((form for form in forms if form.candidate.mesh == mesh), None)
    if current is not None and current.bytes > room(request):
        size = f"about {current.bytes / GIB:,.1f} of {room(request) / GIB:,.1f} GiB"
        return f"note: this is predicted not to fit on {cfg.cluster.name}: {size}; {what_fits(cfg)}"
    best = next((form for form in forms if form.bytes <= room(request)), None)
    if current is None or best is None or current.step_s < FASTER * best.step_s:
        return ""
    faster = f"{current.step_s / best.step_s - 1:.0%} faster on {cfg.cluster.name}"
    return (
        f"note: {best.candidate.axes()} is predicted to be {faster} than {current.candidate.axes()}; mesh=auto takes it"
    )


def what_fits(cfg: Config) -> str:
    """Return the options that let a job fit, the fastest by closed forms; or a text that nothing fits."""
    train = {f"train.{field.name}" for field in dataclasses.fields(cfg.train) if field.name != "microbatches"}
    ranks = mesh_of(cfg.mesh).world_size
    request = PlanRequest(
        replace_nested(cfg, {"cluster": {"gpus": ranks}}), frozenset(train | {"passes.cast", "passes.context"})
    )
    forms = all_forms(request, sizes_of(cfg, subject(cfg).module))
    best = next((form for form in forms if form.bytes <= SPARE * room(request)), None)
    if best is None:
        return "no mesh, microbatches and recomputation fit; use more GPUs, shorter sequences, or optim=adamw8bit"
    changes = " ".join(differing(best.candidate.applied(cfg), cfg))
    return f"this fits: {changes} (about {best.bytes / GIB:,.1f} GiB); compiler-trainer plan searches further"


def differing(other: Config, cfg: Config) -> Iterator[str]:
    """Yield the options in which another job differs, as overrides to paste into a command line."""
    undivided = set(tables(cfg))
    options, other_options = (flat(dataclasses.asdict(config), undivided) for config in (cfg, other))
    for name, value in other_options.items():
        if value != options.get(name):
            yield shlex.quote(f"{name}={as_override(value)}")
