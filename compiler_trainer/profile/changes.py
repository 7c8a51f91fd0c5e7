"""Options that might shorten a step, with the time that each is predicted to save of the measured step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import AUTO, Config
from compiler_trainer.models.subject import subject
from compiler_trainer.planning.auto import differing, plan_request
from compiler_trainer.planning.search import all_forms, room
from compiler_trainer.planning.space import replace_nested, sizes_of
from compiler_trainer.profile.predicted import Predicted, predicted
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.training.trace import Spent

USUAL_MIB = 25.0  # size of a bucket
LIGHTER = {
    "full": ("selective", "none"),
    "attention": ("selective", "none"),
    "every_n": ("none",),
    "selective": ("none",),
}
ONCE = (("gather",), ("reduce",), ("gather", "reduce"))
LITTLE = 0.1  # share of the measured wait; below it, use the predicted time of collectives instead of their wait


@dataclass(frozen=True)
class Change:
    """Options as on a command line, the predicted saving of a measured step, and the memory they need.

    `refused` is the reason why a pass refuses them.
    """

    options: str
    saves_ms: float = 0.0
    device_bytes: int = 0
    fits: bool = False
    refused: str = ""


def changes(cfg: Config, measured: Spent, now: Predicted, stage: int) -> list[Change]:
    """Return the possible changes, the largest saving first."""
    possible = [changed(cfg, other, measured, now, stage) for other in others(cfg)]
    return sorted(possible, key=lambda change: -change.saves_ms)


def changed(cfg: Config, other: Config, measured: Spent, now: Predicted, stage: int) -> Change:
    """Return the predicted effect of another job's options."""
    options = " ".join(differing(other, cfg))
    try:
        after = predicted(other, stage if other.mesh.pp == cfg.mesh.pp else 0)
    except UserError as error:
        return Change(options, refused=str(error))
    return Change(options, saved_ms(measured, now, after), after.memory["device_bytes"], after.memory["fits"])


def saved_ms(measured: Spent, now: Predicted, other: Predicted) -> float:
    """Return the saving of a measured step: each measured part shrinks in proportion to its prediction.

    A new axis waits as much longer than predicted as the existing ones do.
    """
    slower = max(1.0, waiting(measured) / (waiting(now.spent) or math.inf))
    axes = {*now.spent.exposed_ms, *other.spent.exposed_ms, *measured.exposed_ms}
    parts = [(computing(measured), computing(now.spent), computing(other.spent))]
    parts += [(measured.host_ms, now.spent.host_ms, other.spent.host_ms)]
    for axis in axes:
        real, waits = (
            measured.exposed_ms.get(axis, 0.0),
            [each.spent.exposed_ms.get(axis, 0.0) for each in (now, other)],
        )
        travels = [each.travel_ms.get(axis, 0.0) for each in (now, other)]
        before, after = waits if waits[0] >= LITTLE * real else travels
        parts.append((real, before, after if before else slower * after))
    return sum(real * (1 - after / before) if before else -after for real, before, after in parts)


def waiting(spent: Spent) -> float:
    """Return the milliseconds of waiting for collectives."""
    return sum(spent.exposed_ms.values())


def computing(spent: Spent) -> float:
    """Return the milliseconds of computing."""
    return sum(spent.kinds.values())


# ---- possible changes ---------------------------------------------------------------------------------


def others(cfg: Config) -> Iterator[Config]:
    """Yield the job with one change each, if the change applies to it."""
    for options in (*of_communication(cfg), *of_microbatches(cfg), *of_computing(cfg)):
        yield replace_nested(cfg, options)
    yield from of_mesh(cfg)


def of_communication(cfg: Config) -> Iterator[Mapping[str, Any]]:
    """Yield changes of buckets, prefetching, overlapped microbatches, and gathering once."""
    if mesh_of(cfg.mesh).world_size == 1:
        return
    now = cfg.passes.communication
    for mib in (USUAL_MIB,) if now.bucket_mib < USUAL_MIB else (4 * now.bucket_mib,):
        yield passes(communication={"bucket_mib": mib})
    yield passes(communication={"prefetch": now.prefetch + 1})
    if cfg.mesh.pp == now.batch_overlap == 1 and cfg.mesh.tp * cfg.mesh.cp * cfg.mesh.ep > 1:
        parts = cfg.train.microbatches * (1 + cfg.train.microbatches % 2)
        yield {"train": {"microbatches": parts}, **passes(communication={"batch_overlap": 2})}
    if cfg.passes.remat.regather and cfg.mesh.dp_shard * cfg.mesh.cp > 1:
        yield passes(remat={"regather": False})


def of_microbatches(cfg: Config) -> Iterator[Mapping[str, Any]]:
    """Yield fewer microbatches, and communication once a step."""
    if cfg.train.microbatches == 1:
        return
    yield {"train": {"microbatches": cfg.train.microbatches // 2}}
    if cfg.mesh.pp == 1 and mesh_of(cfg.mesh).world_size > 1:
        yield from (passes(accumulate=dict.fromkeys(what, "step")) for what in ONCE)


def of_computing(cfg: Config) -> Iterator[Mapping[str, Any]]:
    """Yield less recomputation, compiled kernels, recorded launches, and a narrower dtype."""
    cast = cfg.passes.cast
    yield from (passes(remat={"policy": policy}) for policy in LIGHTER.get(cfg.passes.remat.policy, ()))
    if cfg.lower.backend == "eager":
        yield {"lower": {"backend": "inductor"}}
    if not cfg.cluster.host_computes and not cfg.lower.cudagraphs:
        yield {"lower": {"cudagraphs": True}}
    if not cfg.cluster.host_computes and cast.param_dtype is None and cfg.train.dtype == "float32":
        yield passes(cast={"param_dtype": "bfloat16"})


def of_mesh(cfg: Config) -> Iterator[Config]:
    """Yield the job on the fastest mesh that fits by closed forms, if it differs."""
    ranks = mesh_of(cfg.mesh).world_size
    if ranks == 1:
        return
    request = plan_request(dataclasses.replace(cfg, mesh=AUTO), ranks)
    forms = all_forms(request, sizes_of(cfg, subject(cfg).module))
    best = next((form for form in forms if form.bytes <= room(request)), None)
    if best is not None and best.candidate.mesh != cfg.mesh:
        yield best.candidate.applied(cfg)


def passes(**options: Any) -> Mapping[str, Any]:
    """Return options of passes."""
    return {"passes": options}
