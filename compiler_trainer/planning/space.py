"""The choices of a plan (meshes, microbatches, recomputation, methods of context parallelism, precision) and its model.

The sizes of a model that closed forms need are read from the shapes of its parameters; nothing is captured.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import RECOMPUTE, Config, FolderConfig, MeshConfig, ModelConfig
from compiler_trainer.models.attention import head_dims
from compiler_trainer.models.folder import text_config_of
from compiler_trainer.models.place import folder_of
from compiler_trainer.models.quantized import entries_of
from passes.ir.layer import layer_names, layer_of

POLICIES = ("none", "selective", "attention", "full")  # of one layer
REPEATED = {"all_gather": "recompute", "reduce_scatter": "recompute"}
CHUNKS = (1, 2, 4)
METHODS = ("ring", "all_gather", "ulysses", "hybrid")


@dataclass(frozen=True)
class PlanRequest:
    """A job to plan for: its options, and the dotted names of the options (or groups) that the user has stated."""

    cfg: Config
    stated: frozenset[str] = frozenset()

    def is_fixed(self, name: str) -> bool:
        """Return True if an option, its group, or a part of it is stated."""
        return any(f"{name}.".startswith(f"{option}.") or f"{option}.".startswith(f"{name}.") for option in self.stated)

    @property
    def gpus(self) -> int:
        """The number of GPUs; raises UserError if cluster.gpus is not set."""
        if self.cfg.cluster.gpus is None:
            raise UserError("cluster.gpus", "is not set; state the number of GPUs to plan for, such as cluster.gpus=8")
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
            passes["remat"] = {"policy": self.recompute, "regather": self.regather, "budget_gib": None}
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
        return replace_nested(cfg, self.options())

    def axes(self) -> str:
        """Return the mesh as text: `dp_shard 4 x tp 2`."""
        sizes = dataclasses.asdict(self.mesh)
        named = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 rank"
        return f"{named} in {self.chunks} chunks" if (self.chunks or 1) > 1 else named

    def recomputes(self) -> str:
        """Return the recomputation as text."""
        weights = "" if self.regather else ", weights kept"
        first_layers = "" if self.first is None else f"{self.first.policy} in the first {self.first.layers}, else "
        return f"{first_layers}{self.recompute}{' + collectives' if self.collectives else ''}{weights}"


def replace_nested(options: Any, changes: Mapping[str, Any]) -> Any:
    """Return a dataclass with some fields replaced, also in nested dataclasses."""
    old = {name: getattr(options, name) for name in changes}
    new = {
        name: replace_nested(old[name], value) if dataclasses.is_dataclass(old[name]) else as_kept(value)
        for name, value in changes.items()
    }
    return dataclasses.replace(options, **new)


def as_kept(value: Any) -> Any:
    """Return a value as configurations hold it, with tuples in place of lists."""
    return tuple(value) if isinstance(value, list) else value


def candidates(request: PlanRequest, sizes: Sizes, left_out: Counter[str]) -> Iterator[Candidate]:
    """Yield every setting that the batch and the heads of the job allow; count the reasons for the others."""
    cfg, overlapped = request.cfg, request.cfg.passes.communication.batch_overlap
    for mesh in meshes(request, sizes):
        data_ranks, sequences = mesh.dp_replicate * mesh.dp_shard, cfg.train.global_batch_size
        if sequences % data_ranks:
            left_out[f"train.global_batch_size={sequences} is not divisible by the number of data ranks"] += 1
            continue
        if 2 * mesh.cp > cfg.train.seq_len or mesh.tp > max(sizes.heads.queries, sizes.heads.keys, 1) > 1:
            left_out["more cp ranks than chunks of the sequence, or more tp ranks than heads"] += 1
            continue
        for microbatch_count in microbatches(request, sequences // data_ranks):
            if microbatch_count < mesh.pp:
                left_out["fewer microbatches than pipeline stages"] += 1
                continue
            if microbatch_count % overlapped or overlapped > 1 < mesh.pp:
                left_out[f"microbatches do not fit passes.communication.batch_overlap={overlapped}"] += 1
                continue
            for choice in itertools.product(
                recomputations(request, mesh),
                methods(request, sizes, mesh),
                products(request),
                chunks(request, sizes, mesh),
            ):
                (recompute, collectives, regather), method, float8, stage_count = choice
                yield Candidate(
                    mesh, microbatch_count, recompute, collectives, regather, method, float8, None, stage_count
                )


def meshes(request: PlanRequest, sizes: Sizes) -> Iterator[MeshConfig]:
    """Yield every factorization of the ranks that keeps the stated axes."""
    mesh_options = request.cfg.mesh
    mesh_is_stated = "mesh" in request.stated
    stated = {
        axis: getattr(mesh_options, axis)
        for axis in ("dp_replicate", "dp_shard", "cp", "tp")
        if (mesh_is_stated or f"mesh.{axis}" in request.stated) and getattr(mesh_options, axis) != -1
    }
    for pp in pipelines(request, sizes):
        ranks = request.gpus // pp
        for tp in choices(stated, "tp", ranks):
            for cp in choices(stated, "cp", ranks // tp):
                for dp_shard in choices(stated, "dp_shard", ranks // tp // cp):
                    dp_replicate = ranks // tp // cp // dp_shard
                    if stated.get("dp_replicate", dp_replicate) == dp_replicate:
                        for ep in spreads(request, sizes, dp_shard, cp, tp):
                            yield MeshConfig(pp, dp_replicate, dp_shard, cp, tp, ep)


def pipelines(request: PlanRequest, sizes: Sizes) -> list[int]:
    """Return the possible numbers of pipeline stages.

    It is the stated one; otherwise 1 and the divisors of the number of nodes, up to the number of layers.
    """
    if request.is_fixed("mesh.pp"):
        return [request.cfg.mesh.pp]
    nodes = request.gpus // request.cfg.cluster.gpus_per_node
    fills_nodes = request.gpus % request.cfg.cluster.gpus_per_node == 0
    return [n for n in divisors(nodes) if n <= sizes.layers] if nodes and fills_nodes else [1]


def chunks(request: PlanRequest, sizes: Sizes, mesh: MeshConfig) -> list[int | None]:
    """Return the possible numbers of stages a pipeline rank."""
    if mesh.pp == 1 or request.is_fixed("passes.pipeline"):
        return [None]
    return [n for n in CHUNKS if mesh.pp * n <= sizes.layers]


def choices(stated: Mapping[str, int], axis: str, ranks: int) -> list[int]:
    """Return the possible sizes of an axis that divides `ranks` ranks."""
    return [n for n in divisors(ranks) if stated.get(axis, n) == n]


def divisors(count: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [n for n in range(1, count + 1) if count % n == 0]


def spreads(request: PlanRequest, sizes: Sizes, dp_shard: int, cp: int, tp: int) -> list[int]:
    """Return the possible numbers of ranks to spread experts over."""
    if request.is_fixed("mesh.ep"):
        return [request.cfg.mesh.ep]
    if sizes.expert_count == 1:
        return [1]
    over_shards = [n * cp for n in divisors(dp_shard) if 1 < n * cp <= sizes.expert_count]
    over_all_ranks = [dp_shard * cp * tp] if tp > 1 and dp_shard * cp * tp <= sizes.expert_count else []
    return sorted({1, *over_shards, *over_all_ranks})


def microbatches(request: PlanRequest, sequences: int) -> list[int]:
    """Return the possible numbers of microbatches for a rank's sequences."""
    if request.is_fixed("train.microbatches"):
        return [n for n in [request.cfg.train.microbatches] if sequences % n == 0]
    return divisors(sequences)


def recomputations(request: PlanRequest, mesh: MeshConfig) -> list[tuple[str, bool, bool]]:
    """Return the possible (policy, recompute collectives over `tp`, gather weights again in the backward)."""
    if request.is_fixed("passes.remat"):
        return [("as given", False, request.cfg.passes.remat.regather)]
    names = [name for name in RECOMPUTE if name in request.cfg.plan.recompute]
    regathers = (True, False) if mesh.dp_shard * mesh.cp > 1 and mesh.pp == 1 else (True,)
    policies = [
        (name, again) for name in names for again in ((False, True) if has_tp_collectives(name, mesh) else (False,))
    ]
    return [(name, again, regather) for name, again in policies for regather in regathers]


def has_tp_collectives(name: str, mesh: MeshConfig) -> bool:
    """Return True if a policy has collectives over `tp` to recompute."""
    return name != "none" and mesh.tp > 1


def methods(request: PlanRequest, sizes: Sizes, mesh: MeshConfig) -> list[str]:
    """Return the possible methods of attention over `cp`."""
    if mesh.cp == 1 or request.is_fixed("passes.context.method"):
        return ["auto"]
    heads, ranks = sizes.heads, mesh.tp * mesh.cp
    fits_ulysses = heads.queries % ranks == 0 and (heads.keys % ranks == 0 or ranks % max(heads.keys, 1) == 0)
    fits_hybrid = heads.queries % (2 * mesh.tp) == 0 and heads.keys % (2 * mesh.tp) == 0 and mesh.cp >= 4
    is_possible = {"ulysses": fits_ulysses, "hybrid": fits_hybrid}
    return [name for name in METHODS if is_possible.get(name, True)]


def products(request: PlanRequest) -> list[bool]:
    """Return the choices for matmuls in float8: [False, True] or [False]."""
    cast, plan = request.cfg.passes.cast, request.cfg.plan
    float8_is_possible = plan.float8 and cast.float8 is None and cast.param_dtype == "bfloat16"
    return [False, True] if float8_is_possible else [False]


def depth_pattern(model: ModelConfig) -> tuple[int, int]:
    """Return (layers before the first repeated layer, period of the repetition)."""
    experts = model.experts
    every = experts.every if experts else 1
    return (experts.dense_layers if experts else 0), math.lcm(every, model.nope_every or 1)


# ---- sizes of a model ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """The attention of a layer: query heads, key heads, features of a key and of a value; 0 heads if unknown."""

    queries: int = 0
    keys: int = 0
    key_dim: int = 0
    value_dim: int = 0


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model for closed forms: `layers` layers like their mean, embedding tables, and a head.

    Entries are counts of numbers. A layer multiplies each token with `active_entries`, `last_matmul_entries` of them in
    its last matmul, and stores `dense` and `experts`. Its matmuls have `input_features` and `output_features` a token.
    """

    names: tuple[str, ...]  # of layers, in order
    dim: int
    active_entries: float
    last_matmul_entries: float
    dense: float
    experts: float
    expert_count: int
    routed: float  # experts that a token is sent to
    matmuls: float  # of a layer
    output_features: float
    input_features: float
    vocabulary: int
    embedding_entries: int
    head_entries: int
    is_tied: bool
    trained_bytes: int  # of parameters
    trained_entries: int
    entries: int
    heads: Heads

    @property
    def layers(self) -> int:
        """The number of layers; a model without any counts as one layer."""
        return max(1, len(self.names))

    @property
    def trained_share(self) -> float:
        """The share of the entries that are trained; the others have no gradients and moments."""
        return self.trained_entries / max(1, self.entries)


def sizes_of(cfg: Config, module: nn.Module) -> Sizes:
    """Return the sizes of the model that `cfg` trains."""
    tables = {id(m.weight): m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    parameters = dict(module.named_parameters())
    filters = {id(m.weight) for m in module.modules() if isinstance(m, nn.modules.conv._ConvNd)}
    shapes = {name: tuple(p.flatten(1).shape if id(p) in filters else p.shape) for name, p in parameters.items()}
    layers_of_model = layer_names(name.rpartition(".")[0] for name in shapes)
    layers = {name: str(layer) for name in shapes if (layer := layer_of(name, layers_of_model))}
    inside = {name: shapes[name] for name in layers}
    names = tuple(dict.fromkeys(layers.values()))
    count = max(1, len(names))
    routed = routed_rows(cfg)
    total, last = totals(inside, layers, routed)
    outside = [name for name, shape in shapes.items() if name not in inside and len(shape) > 1]
    heads = [shapes[name] for name in outside if id(parameters[name]) not in tables]
    table_shapes = [tuple(table.shape) for table in tables.values()]
    head = max(heads or table_shapes or [(1, 1)], key=lambda shape: shape[0])
    return Sizes(
        names=names,
        dim=head[1],
        active_entries=total["used"] / count,
        last_matmul_entries=last / count,
        dense=total["dense"] / count,
        experts=total["experts"] / count,
        expert_count=max([shape[0] for shape in inside.values() if len(shape) == 3], default=1),
        routed=routed,
        matmuls=max(1.0, total["products"] / count),
        output_features=total["made"] / count,
        input_features=total["read"] / count,
        vocabulary=head[0],
        embedding_entries=sum(table.numel() for table in tables.values()),
        head_entries=head[0] * head[1],
        is_tied=not heads and bool(tables),
        trained_bytes=sum(p.nbytes for p in module.parameters() if p.requires_grad),
        trained_entries=sum(p.numel() for p in module.parameters() if p.requires_grad),
        entries=entries_of(module),
        heads=heads_of(cfg),
    )


def totals(
    inside: Mapping[str, tuple[int, ...]], layers: Mapping[str, str], routed: float
) -> tuple[dict[str, float], float]:
    """Return (sums over all layers, sum over layers of the entries that a token uses of a layer's last matrix)."""
    total = dict.fromkeys(("used", "dense", "experts", "products", "made", "read"), 0.0)
    last: dict[str, float] = {}
    for name, shape in inside.items():
        entries = 1
        for size in shape:
            entries *= size
        total["experts" if len(shape) == 3 else "dense"] += entries
        if len(shape) < 2:
            continue
        rows = routed if len(shape) == 3 else 1.0
        outputs, read = (shape[2], shape[1]) if len(shape) == 3 else (shape[0], shape[1])
        total["products"] += 1
        total["used"] += rows * outputs * read
        total["made"] += rows * outputs
        total["read"] += rows * read
        last[layers[name]] = rows * outputs * read
    return total, sum(last.values())


def routed_rows(cfg: Config) -> float:
    """Return the number of experts that a token is sent to; 1 without experts."""
    if isinstance(cfg.model, ModelConfig):
        return float(cfg.model.experts.top_k) if cfg.model.experts else 1.0
    if isinstance(cfg.model, FolderConfig):
        return float(getattr(text_config_of(folder_of(cfg), cfg.sees), "num_experts_per_tok", None) or 1)
    return 1.0


def heads_of(cfg: Config) -> Heads:
    """Return the attention of a layer as the options or a config.json state it."""
    if isinstance(cfg.model, ModelConfig):
        return Heads(cfg.model.n_heads, cfg.model.n_kv_heads, *head_dims(cfg.model))
    if isinstance(cfg.model, FolderConfig):
        config: Any = text_config_of(folder_of(cfg), cfg.sees)
        config.allow_global_per_layer_attribute_access = True  # otherwise configs with unlike layers raise
        queries, keys = (getattr(config, f"num_{name}_heads", None) for name in ("attention", "key_value"))
        if not isinstance(queries, int) or not queries:  # none, or a number for each layer
            return Heads()
        dim = getattr(config, "head_dim", None) or config.hidden_size // queries
        return Heads(queries, keys if isinstance(keys, int) and keys else queries, dim, dim)
    return Heads()
