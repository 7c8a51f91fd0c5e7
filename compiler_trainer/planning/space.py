"""The choices of a plan: meshes, microbatches, recomputation, methods of context parallelism, precision.

Options that the user states stay fixed (`Asked.given`); all others are choices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import RECOMPUTE, Config, MeshConfig, ModelConfig
from compiler_trainer.planning.sizes import Sizes

POLICIES: Mapping[str, dict[str, Any]] = {
    "none": {"policy": "none"},
    "selective": {"policy": "selective"},
    "attention": {"policy": "attention"},
    "full": {"policy": "full"},
}
REPEATED = {"all_gather": "recompute", "reduce_scatter": "recompute"}
CHUNKS = (1, 2, 4)
METHODS = ("ring", "all_gather", "ulysses", "hybrid")


@dataclass(frozen=True)
class Asked:
    """A job to plan for: its options, and the dotted names of the options (or groups) that the user has stated."""

    cfg: Config
    given: frozenset[str] = frozenset()

    def fixed(self, name: str) -> bool:
        """Return True if an option, its group, or a part of it is stated."""
        return any(f"{name}.".startswith(f"{one}.") or f"{one}.".startswith(f"{name}.") for one in self.given)

    @property
    def gpus(self) -> int:
        """The number of GPUs; raises UserError if cluster.gpus is not set."""
        if self.cfg.cluster.gpus is None:
            raise UserError("cluster.gpus", "is not set, and a plan is for so many; set cluster.gpus=8, say")
        return self.cfg.cluster.gpus


class First(NamedTuple):
    """A policy of recomputation for the first `layers` of the layers with these `names`."""

    layers: int
    policy: str
    names: tuple[str, ...]

    def patterns(self) -> dict[str, str]:
        """Return the policy by patterns of names: `layers.[0-9]` and `layers.1[0-4]` for fifteen layers."""
        tens: dict[str, list[str]] = {}
        for name in self.names[: self.layers]:
            tens.setdefault(name[:-1], []).append(name[-1])
        return {f"{ten}[{''.join(digits)}]": self.policy for ten, digits in tens.items()}


@dataclass(frozen=True)
class Candidate:
    """One setting to run a job with.

    `recompute` is a name of `POLICIES`; with `collectives`, collectives over `tp` are recomputed too. A rank of the
    pipeline has `chunks` stages; None leaves that to the options.
    """

    mesh: MeshConfig
    microbatches: int = 1
    recompute: str = "as given"
    collectives: bool = False
    regather: bool = True
    method: str = "auto"
    float8: bool = False
    first: First | None = None
    chunks: int | None = None

    def options(self) -> dict[str, Any]:
        """Return the options that the setting changes, by group."""
        passes: dict[str, Any] = {}
        if self.recompute != "as given":
            passes["remat"] = {**POLICIES[self.recompute], "regather": self.regather}
            passes["remat"] |= {"ops": dict(REPEATED)} if self.collectives else {}
            passes["remat"] |= {"layers": self.first.patterns()} if self.first else {}
        if self.method != "auto":
            passes["context"] = {"method": self.method}
        passes |= {"cast": {"float8": "tensorwise"}} if self.float8 else {}
        if self.chunks is not None:
            schedule = "1f1b" if self.chunks == 1 else "interleaved"
            passes["pipeline"] = {"schedule": schedule, "chunks": max(2, self.chunks)}
        train = {"microbatches": self.microbatches}
        return {"mesh": dataclasses.asdict(self.mesh), "train": train} | ({"passes": passes} if passes else {})

    def applied(self, cfg: Config) -> Config:
        """Return `cfg` with the options of this setting."""
        return replaced(cfg, self.options())

    def axes(self) -> str:
        """Return the mesh as text: `dp_shard 4 x tp 2`."""
        sizes = dataclasses.asdict(self.mesh)
        named = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 rank"
        return f"{named} in {self.chunks} chunks" if (self.chunks or 1) > 1 else named

    def recomputes(self) -> str:
        """Return the recomputation as text."""
        kept = "" if self.regather else ", weights kept"
        some = "" if self.first is None else f"{self.first.policy} in the first {self.first.layers}, else "
        return f"{some}{self.recompute}{' + collectives' if self.collectives else ''}{kept}"


def replaced(options: Any, changes: Mapping[str, Any]) -> Any:
    """Return a dataclass with some fields replaced, also in nested dataclasses."""
    old = {name: getattr(options, name) for name in changes}
    new = {
        name: replaced(old[name], value) if dataclasses.is_dataclass(old[name]) else as_kept(value)
        for name, value in changes.items()
    }
    return dataclasses.replace(options, **new)


def as_kept(value: Any) -> Any:
    """Return a value as configurations hold it, with tuples in place of lists."""
    return tuple(value) if isinstance(value, list) else value


@dataclass
class Left:
    """The number of settings left out before any estimate, by reason."""

    count: dict[str, int] = field(default_factory=dict)

    def out(self, reason: str, times: int = 1) -> None:
        """Count `times` settings."""
        self.count[reason] = self.count.get(reason, 0) + times


def candidates(asked: Asked, sizes: Sizes, left: Left) -> Iterator[Candidate]:
    """Yield every setting that the batch and the heads of the job allow; count the others in `left`."""
    cfg, at_once = asked.cfg, asked.cfg.passes.communication.batch_overlap
    for mesh in meshes(asked, sizes):
        data, rows = mesh.dp_replicate * mesh.dp_shard, cfg.train.global_batch_size
        if rows % data:
            left.out(f"train.global_batch_size={rows} does not divide among the ranks of data")
            continue
        if 2 * mesh.cp > cfg.train.seq_len or mesh.tp > max(sizes.heads.queries, sizes.heads.keys, 1) > 1:
            left.out("more ranks than chunks of the sequence, or than heads")
            continue
        for count in microbatches(asked, rows // data):
            if count < mesh.pp:
                left.out("fewer microbatches than pipeline stages")
                continue
            if count % at_once or at_once > 1 < mesh.pp:
                left.out(f"microbatches that do not go by passes.communication.batch_overlap={at_once}")
                continue
            for rest in itertools.product(
                recomputations(asked, mesh), methods(asked, sizes, mesh), products(asked), chunks(asked, sizes, mesh)
            ):
                (recompute, collectives, regather), method, float8, parts = rest
                yield Candidate(mesh, count, recompute, collectives, regather, method, float8, None, parts)


def meshes(asked: Asked, sizes: Sizes) -> Iterator[MeshConfig]:
    """Yield every factorization of the ranks that keeps the stated axes."""
    given = asked.cfg.mesh
    wholly = "mesh" in asked.given
    known = {
        axis: getattr(given, axis)
        for axis in ("dp_replicate", "dp_shard", "cp", "tp")
        if (wholly or f"mesh.{axis}" in asked.given) and getattr(given, axis) != -1
    }
    for pp in pipelines(asked, sizes):
        inside = asked.gpus // pp
        for tp in choices(known, "tp", inside):
            for cp in choices(known, "cp", inside // tp):
                for shard in choices(known, "dp_shard", inside // tp // cp):
                    replicate = inside // tp // cp // shard
                    if known.get("dp_replicate", replicate) == replicate:
                        for ep in spreads(asked, sizes, shard, cp, tp):
                            yield MeshConfig(pp, replicate, shard, cp, tp, ep)


def pipelines(asked: Asked, sizes: Sizes) -> list[int]:
    """Return the possible numbers of pipeline stages.

    It is the stated one; otherwise 1 and the divisors of the number of nodes, up to the number of layers.
    """
    if asked.fixed("mesh.pp"):
        return [asked.cfg.mesh.pp]
    nodes = asked.gpus // asked.cfg.cluster.gpus_per_node
    whole = asked.gpus % asked.cfg.cluster.gpus_per_node == 0
    return [n for n in divisors(nodes) if n <= sizes.layers] if nodes and whole else [1]


def chunks(asked: Asked, sizes: Sizes, mesh: MeshConfig) -> list[int | None]:
    """Return the possible numbers of stages a pipeline rank."""
    if mesh.pp == 1 or asked.fixed("passes.pipeline"):
        return [None]
    return [n for n in CHUNKS if mesh.pp * n <= sizes.layers]


def choices(known: Mapping[str, int], axis: str, ranks: int) -> list[int]:
    """Return the possible sizes of an axis that divides `ranks` ranks."""
    return [n for n in divisors(ranks) if known.get(axis, n) == n]


def divisors(count: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [n for n in range(1, count + 1) if count % n == 0]


def spreads(asked: Asked, sizes: Sizes, shard: int, cp: int, tp: int) -> list[int]:
    """Return the possible numbers of ranks to spread experts over."""
    if asked.fixed("mesh.ep"):
        return [asked.cfg.mesh.ep]
    if sizes.expert_count == 1:
        return [1]
    found = [n * cp for n in divisors(shard) if 1 < n * cp <= sizes.expert_count]
    over_all = [shard * cp * tp] if tp > 1 and shard * cp * tp <= sizes.expert_count else []
    return sorted({1, *found, *over_all})


def microbatches(asked: Asked, rows: int) -> list[int]:
    """Return the possible numbers of microbatches for a rank's sequences."""
    if asked.fixed("train.microbatches"):
        return [n for n in [asked.cfg.train.microbatches] if rows % n == 0]
    return divisors(rows)


def recomputations(asked: Asked, mesh: MeshConfig) -> list[tuple[str, bool, bool]]:
    """Return the possible (policy, recompute collectives over `tp`, gather weights again in the backward)."""
    if asked.fixed("passes.remat"):
        return [("as given", False, asked.cfg.passes.remat.regather)]
    names = [name for name in RECOMPUTE if name in asked.cfg.plan.recompute]
    gathers = (True, False) if mesh.dp_shard * mesh.cp > 1 and mesh.pp == 1 else (True,)
    both = [(name, again) for name in names for again in ((False, True) if repeats(name, mesh) else (False,))]
    return [(name, again, regather) for name, again in both for regather in gathers]


def repeats(name: str, mesh: MeshConfig) -> bool:
    """Return True if a policy has collectives over `tp` to recompute."""
    return name != "none" and mesh.tp > 1


def methods(asked: Asked, sizes: Sizes, mesh: MeshConfig) -> list[str]:
    """Return the possible methods of attention over `cp`."""
    if mesh.cp == 1 or asked.fixed("passes.context.method"):
        return ["auto"]
    heads, ranks = sizes.heads, mesh.tp * mesh.cp
    even = heads.queries % ranks == 0 and (heads.keys % ranks == 0 or ranks % max(heads.keys, 1) == 0)
    partly = heads.queries % (2 * mesh.tp) == 0 and heads.keys % (2 * mesh.tp) == 0 and mesh.cp >= 4
    can = {"ulysses": even, "hybrid": partly}
    return [name for name in METHODS if can.get(name, True)]


def products(asked: Asked) -> list[bool]:
    """Return the choices for matmuls in float8: [False, True] or [False]."""
    cast, plan = asked.cfg.passes.cast, asked.cfg.plan
    may = plan.float8 and cast.float8 is None and cast.param_dtype == "bfloat16"
    return [False, True] if may else [False]


def depth_pattern(model: ModelConfig) -> tuple[int, int]:
    """Return (layers before the first repeated layer, period of the repetition)."""
    experts = model.experts
    every = experts.every if experts else 1
    return (experts.dense_layers if experts else 0), math.lcm(every, model.nope_every or 1)
