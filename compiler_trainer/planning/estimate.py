"""Closed forms: time and memory of a setting by arithmetic alone, without a graph. They select the settings to compile.

`RankCosts` has the costs of one rank before recomputation; each quantity is computed once and shared by many settings.
Factors that no formula gives, such as how often elementwise kernels read and write a value, come from compiled programs
of Llama 3 8B (docs/guides/plan.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from compiler_trainer.config.schema import Config, MeshConfig, OptimConfig
from compiler_trainer.pipeline import build_optimizer
from compiler_trainer.planning.space import Candidate, Sizes
from compiler_trainer.training.speed import compute_dtype
from passes.cost.accounting import SENT
from passes.cost.cluster import Cluster, collective_seconds
from passes.ir.machine import reach
from passes.ir.mesh import Mesh

# Fitted to compiled programs of Llama 3 8B: how often elementwise kernels read and write a layer's features, forward
# and backward. Without it steps are a tenth too short, and recomputation of everything but matmuls costs nothing.
ELEMENTWISE = (1.8, 3.7)
# Per entry: an update reads parameter, gradient and moments, and writes all but the gradient; each microbatch adds its
# gradient. Without the latter, plans of 70B on 64 GPUs compile pipelines of 64 microbatches first, 25 % slower.
UPDATE_BYTES, ACCUMULATE_BYTES = 36, 24
# Fitted too: bytes kept without recomputation, relative to the outputs of matmuls. Without it, settings that do not fit
# are compiled first.
ALL_KEPT = 2.52
NEAREST = {"every_n": "full", "budget": "full", "offload": "full"}
RINGS, EXCHANGES = ("ring", "hybrid"), ("ulysses", "hybrid")
GATHERED_AHEAD = 3  # layers whose parameters are gathered when the backward begins


@dataclass(frozen=True)
class Estimate:
    """The cost of a setting: seconds of a step, computing and waiting by axis, and bytes at the peak by kind.

    Compiled settings also have the bytes that a rank sends, by axis and link, and the place of the peak; closed forms
    have a lower bound of the bytes of any program.
    """

    candidate: Candidate
    compute_s: float
    exposed_s: Mapping[str, float]
    memory: Mapping[str, float]
    step_s: float
    bytes: float
    sent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    place: str = ""
    least_bytes: float = 0.0

    @property
    def is_compiled(self) -> bool:
        """True if the estimate comes from compiled programs."""
        return bool(self.place)


def estimates(rank: Rank, candidates: list[Candidate]) -> Iterator[Estimate]:
    """Yield the estimates of settings of the same rank, which differ in recomputation and method of attention."""
    for candidate in candidates:
        compute, exposed, memory = *seconds(rank, candidate), peak_bytes(rank, candidate)
        waits = {axis: s for axis, s in exposed.items() if s > 0}
        step = compute + sum(waits.values())
        least = least_bytes(rank, candidate)
        yield Estimate(candidate, compute, waits, memory, step, sum(memory.values()), least_bytes=least)


# ---- time ---------------------------------------------------------------------------------------------


def seconds(rank: Rank, candidate: Candidate) -> tuple[float, dict[str, float]]:
    """Return (seconds of a step that are computed, seconds waited for each axis)."""
    times, layers, axes = candidate.microbatches, rank.layers, rank.axes
    if axes.pp > 1:
        return piped_seconds(rank, candidate)
    forward, backward = layer_seconds(rank, candidate)
    update_bytes = UPDATE_BYTES + (ACCUMULATE_BYTES * times if times > 1 else 0)
    update_s = rank.local_entries * update_bytes / rank.memory_bytes_per_s
    gather_again_s = rank.gather_s if candidate.regather else 0.0
    waits = max(0.0, rank.gather_s - forward) + max(0.0, gather_again_s + rank.reduce_s - backward)
    along_tp = layers * (11 if candidate.collectives else 8) + 6
    hidden = min(rank.gather_s, forward) + min(gather_again_s + rank.reduce_s + rank.sum_s, backward)
    slowed = hidden * (1 / rank.cluster.beside.computing - 1)
    return times * (layers * (forward + backward + slowed) + rank.head_s) + update_s, {
        "fsdp": times * (layers * waits + rank.tables_s),
        "dp_replicate": times * (layers * max(0.0, rank.sum_s - backward) + rank.sum_tables_s),
        "tp": times * along_tp * rank.sequence_s,
        "cp": times * layers * rank.context_s[candidate.method] if axes.cp > 1 else 0.0,
        "ep": times * layers * rank.dispatch_s if axes.ep > 1 else 0.0,
    }


def piped_seconds(rank: Rank, candidate: Candidate) -> tuple[float, dict[str, float]]:
    """Return `seconds` for a rank of a pipeline: parameters are gathered and gradients reduced once, not overlapped."""
    times, layers, axes = candidate.microbatches, rank.layers, rank.axes
    computing = layers * sum(layer_seconds(rank, candidate)) + rank.head_s / axes.pp
    update_bytes = UPDATE_BYTES * rank.local_entries + ACCUMULATE_BYTES * times * rank.local_entries * rank.stored_over
    along_tp = layers * (11 if candidate.collectives else 8) + 6 / axes.pp
    waits_inside = {
        "tp": along_tp * rank.sequence_s,
        "cp": layers * rank.context_s[candidate.method] if axes.cp > 1 else 0.0,
        "ep": layers * rank.dispatch_s if axes.ep > 1 else 0.0,
    }
    bubble = (axes.pp - 1) / (candidate.chunks or 1) * (computing + sum(waits_inside.values()))
    return times * computing + update_bytes / rank.memory_bytes_per_s, {
        "fsdp": layers * (rank.gather_s + rank.reduce_s) + rank.tables_s / axes.pp,
        "dp_replicate": layers * rank.sum_s + rank.sum_tables_s / axes.pp,
        "pp": bubble,
    } | {axis: times * s for axis, s in waits_inside.items()}


def layer_seconds(rank: Rank, candidate: Candidate) -> tuple[float, float]:
    """Return the seconds that a layer computes for a microbatch, (forward, backward with recomputation)."""
    computes_masked_half = candidate.method == "all_gather" and rank.axes.cp > 1  # computes the masked half, too
    attention, backward_attention = (
        s * (2 if computes_masked_half else 1) for s in (rank.attention_s, rank.attention_backward_s)
    )
    elementwise_s = [times * rank.moved_s for times in ELEMENTWISE]
    forward = rank.matmuls_s + attention + elementwise_s[0]
    recompute_s = recompute_seconds(rank, candidate, 0.0 if candidate.method in RINGS else attention)  # rings are kept
    gradients_s = (1 + rank.sizes.trained_share) * rank.matmuls_s
    return forward, gradients_s + backward_attention + elementwise_s[1] + recompute_s


def recompute_seconds(rank: Rank, candidate: Candidate, attention: float) -> float:
    """Return the seconds of a layer's forward that the backward recomputes."""
    policy, elementwise_s = policy_of(rank, candidate), ELEMENTWISE[0] * rank.moved_s
    if policy == "none":
        return 0.0
    if policy == "selective":
        return elementwise_s / 2
    # the output of the last matmul is not needed
    matmuls_s = rank.matmuls_s * (1 - rank.sizes.last_matmul_entries / max(rank.sizes.active_entries, 1.0))
    return matmuls_s + elementwise_s + (0.0 if policy == "attention" else attention)


def policy_of(rank: Rank, candidate: Candidate) -> str:
    """Return the policy of recomputation, or the nearest in `space.POLICIES`."""
    policy = rank.cfg.passes.remat.policy if candidate.recompute == "as given" else candidate.recompute
    return NEAREST.get(policy, policy)


# ---- memory -------------------------------------------------------------------------------------------


def least_bytes(rank: Rank, candidate: Candidate) -> float:
    """Return a lower bound of the peak bytes of the fullest rank, whatever the passes do.

    Trained parameters and moments are inputs of the update; a rank holds at least its share of them, more with padding
    and unsharded parameters. All gradients are alive at once if they are clipped by their norm (it needs the last
    gradient before the first is applied) or summed over microbatches. When a forward ends, the input of each layer is
    still needed by its backward. These inputs are not counted for a pipeline, or if options state the recomputation.
    """
    sizes, axes, optim = rank.sizes, rank.axes, rank.cfg.optim
    share = 1 / (axes.pp * axes.tp * rank.stored_over)
    state = share * (sizes.trained_bytes + sizes.trained_entries * (rank.moment_bytes + rank.average_bytes))
    state += rank.frozen_bytes
    gradients = share * sizes.trained_entries * min(rank.compute_bytes, rank.reduce_bytes, rank.master_bytes)
    summed = gradients if candidate.microbatches > 1 else 0.0
    inputs = (sizes.layers - 1) * rank.tokens / axes.tp * sizes.dim * rank.compute_bytes
    is_counted = axes.pp == 1 and candidate.recompute != "as given" and sizes.heads.queries > 0
    return state + max(gradients if optim.max_norm is not None else 0.0, summed + inputs * is_counted)


def peak_bytes(rank: Rank, candidate: Candidate) -> dict[str, float]:
    """Return the bytes of a rank at the peak, by kind.

    The peak is at the end of the forward, in the backward of the head, at the end of the backward, or in the update.
    """
    if rank.axes.pp > 1:
        return piped_bytes(rank, candidate)
    sizes, layer, is_stored = rank.sizes, rank.layer_entries, rank.stored_over > 1
    gradients = {"gradients": rank.master_bytes * rank.local_entries}
    table = max(sizes.head_entries, sizes.embedding_entries) / rank.axes.tp
    weights = table * rank.compute_bytes if is_stored else 0.0
    if is_stored and not candidate.regather:
        weights += sizes.layers * layer * rank.compute_bytes
    stored = {**rank.state, **(gradients if candidate.microbatches > 1 else {})}
    layers = sizes.layers * kept_bytes(rank, candidate, policy_of(rank, candidate))
    forward = stored | {"activations": layers + rank.logits, "gathered weights": weights}
    gathered_ahead = weights + (
        GATHERED_AHEAD * layer * rank.compute_bytes if is_stored and candidate.regather else 0.0
    )
    head_backward = stored | {
        "activations": layers,
        "gathered weights": gathered_ahead,
        "head": 4 * sizes.trained_share * table,
    }
    reduce_bytes = sizes.trained_share * rank.reduce_bytes
    communication = 2 * layer * (rank.compute_bytes + reduce_bytes) if is_stored else 0.0
    communication += table * reduce_bytes
    end = {**rank.state, **gradients}
    backward = end | {"communication": communication, "activations": kept_bytes(rank, candidate, "selective")}
    update = end | {"update": 6 * rank.master_bytes * sizes.trained_share * table / rank.stored_over}
    return max((forward, head_backward, backward, update), key=lambda at: sum(at.values()))


def piped_bytes(rank: Rank, candidate: Candidate) -> dict[str, float]:
    """Return `peak_bytes` for the first rank of a pipeline, which keeps most microbatches, all unsharded."""
    pp, chunks = rank.axes.pp, candidate.chunks or 1
    entries = rank.layers * rank.layer_entries + rank.sizes.embedding_entries / rank.axes.tp
    forwards_kept = min(candidate.microbatches * chunks, (chunks - 1) * pp + 2 * pp - 1 if chunks > 1 else pp)
    layers = rank.layers * kept_bytes(rank, candidate, policy_of(rank, candidate))
    return {
        **rank.state,
        "gradients": rank.master_bytes * rank.sizes.trained_share * entries,
        "gathered weights": rank.compute_bytes * entries if rank.stored_over > 1 else 0.0,
        "activations": forwards_kept / chunks * layers + kept_bytes(rank, candidate, "none"),
    }


def kept_bytes(rank: Rank, candidate: Candidate, policy: str) -> float:
    """Return the bytes that a layer keeps of a microbatch for its backward."""
    sizes, heads, entry_bytes, tp = rank.sizes, rank.sizes.heads, rank.compute_bytes, rank.axes.tp
    tokens = rank.tokens / tp
    input_bytes, matmul_bytes = tokens * sizes.dim * entry_bytes, tokens * sizes.output_features * entry_bytes
    attention_bytes = tokens * heads.queries * (heads.value_dim * entry_bytes + 4)
    gathered_bytes = 2 * rank.tokens * sizes.dim * entry_bytes if tp > 1 and not candidate.collectives else 0.0
    if candidate.method == "all_gather" and rank.axes.cp > 1:
        gathered_bytes += rank.tokens * rank.axes.cp * heads.keys / tp * 2 * heads.key_dim * entry_bytes
    gathered_bytes += rank.expert_rows
    exchanged_bytes = attention_bytes if rank.axes.cp > 1 and candidate.method in EXCHANGES else 0.0
    if policy == "selective":
        return matmul_bytes + attention_bytes + exchanged_bytes + gathered_bytes
    sent_bytes = tokens * (heads.queries * heads.key_dim + heads.keys * (heads.key_dim + heads.value_dim)) * entry_bytes
    sent_bytes = sent_bytes if exchanged_bytes else 0.0  # results of communication are not recomputed
    if policy == "attention":
        return input_bytes + attention_bytes + exchanged_bytes + sent_bytes + gathered_bytes
    ring_bytes = attention_bytes if candidate.method in RINGS else 0.0
    if policy == "none":
        return (1 + (ALL_KEPT - 1) * sizes.trained_share) * matmul_bytes + exchanged_bytes + gathered_bytes + ring_bytes
    return input_bytes * (2 if tp > 1 else 1) + exchanged_bytes + sent_bytes + gathered_bytes + ring_bytes


# ---- costs of a rank -----------------------------------------------------------------------------------

MASTER = {"float32": 4, "bfloat16": 2}
MOMENTS = {"adamw": 2, "muon": 1}
CODES = {"adamw8bit": 2, "adamwfp8": 2}  # bytes of an entry's quantized moments, whatever its dtype
LOGITS_ALIVE = 2.4  # written copies of a chunk of logits that are alive at once
SPLIT_ALIVE = 5.4  # the same with classes split over tp, where scatters keep the operators of a loss apart
ATTENTION_BACKWARD = 2.5  # FLOPs of the forward


def moments_of(optim: OptimConfig) -> int:
    """Return the number of moments of an entry, in an optimizer that does not quantize them."""
    if optim.name == "custom":
        return len(build_optimizer(optim, None).moments)
    return MOMENTS.get(optim.name, int(optim.momentum > 0))


@dataclass(frozen=True, eq=False)
class Rank:
    """A rank of a job on a cluster and a mesh, with a number of microbatches, and matmuls in float8 or not."""

    cfg: Config
    sizes: Sizes
    cluster: Cluster
    axes: MeshConfig
    microbatches: int
    float8: bool

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.of(dataclasses.asdict(self.axes))

    @cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch that the ranks of a `tp` group compute together."""
        ranks = self.axes.dp_replicate * self.axes.dp_shard
        sequences = math.ceil(self.cfg.train.global_batch_size / self.microbatches / ranks)
        folded = 2 * self.axes.cp if self.axes.cp > 1 else 1
        return sequences * math.ceil(self.cfg.train.seq_len / folded) * folded // self.axes.cp

    @cached_property
    def compute_bytes(self) -> int:
        """Bytes of an entry in the dtype of computation."""
        return 2 if compute_dtype(self.cfg) == "bfloat16" else 4

    @cached_property
    def reduce_bytes(self) -> int:
        """Bytes of an entry of a gradient in the dtype in which it is sent."""
        return 4 if self.cfg.passes.cast.reduce_dtype == "float32" else self.compute_bytes

    @cached_property
    def master_bytes(self) -> int:
        """Bytes of a stored entry."""
        return MASTER[self.cfg.train.dtype]

    @cached_property
    def stored_over(self) -> int:
        """The number of ranks that shard a parameter, without `tp`."""
        return self.axes.dp_shard * self.axes.cp

    @cached_property
    def layers(self) -> float:
        """Layers of one rank of the pipeline."""
        return self.sizes.layers / self.axes.pp

    @cached_property
    def local_entries(self) -> float:
        """Entries of trained parameters that a rank stores."""
        return self.sizes.trained_entries / (self.axes.pp * self.axes.tp * self.stored_over)

    @cached_property
    def layer_entries(self) -> float:
        """Entries of a layer on one rank of `tp` (and `ep`), when gathered."""
        return (self.sizes.dense + self.sizes.experts / self.axes.ep) / self.axes.tp

    @cached_property
    def table_entries(self) -> float:
        """Entries of embedding and head on one rank of `tp`, when gathered."""
        tables = self.sizes.embedding_entries + (0 if self.sizes.is_tied else self.sizes.head_entries)
        return tables / self.axes.tp

    @cached_property
    def frozen_bytes(self) -> float:
        """Bytes of the parameters that are not trained, which have no masters."""
        return self.compute_bytes * (self.sizes.entries / self.sizes.trained_entries - 1) * self.local_entries

    # -- computing, seconds ---------------------------------------------------------------------------

    @cached_property
    def matmuls_s(self) -> float:
        """Seconds of a layer's matmuls, forward."""
        in_float8 = self.float8 or self.cfg.passes.cast.float8 is not None
        return self.matmul_s(2 * self.tokens * self.sizes.active_entries / self.axes.tp, in_float8)

    def matmul_s(self, flops: float, in_float8: bool = False) -> float:
        """Return the seconds of a layer's matmuls of `flops` FLOPs in total, each of mean size."""
        rates = self.cluster.rates.products[torch.float8_e4m3fn if in_float8 else self.dtype]
        return flops / rates.at(max(1.0, flops / self.sizes.matmuls))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of computation."""
        return torch.bfloat16 if self.compute_bytes == 2 else torch.float32

    @cached_property
    def attention_s(self) -> float:
        """Seconds of a layer's causal attention, forward."""
        return self.attention_flops / self.cluster.rates.attention.at(self.keys)

    @cached_property
    def attention_backward_s(self) -> float:
        """Seconds of a layer's causal attention, backward."""
        return ATTENTION_BACKWARD * self.attention_flops / self.cluster.rates.attention_backward.at(self.keys)

    @cached_property
    def attention_flops(self) -> float:
        """FLOPs of a layer's causal attention: half of the pairs, whole heads a rank."""
        heads, length = self.sizes.heads, self.cfg.train.seq_len
        return self.tokens * length * math.ceil(heads.queries / self.axes.tp) * (heads.key_dim + heads.value_dim)

    @cached_property
    def keys(self) -> float:
        """The number of keys in one call of the attention kernel."""
        return max(1.0, self.cfg.train.seq_len / self.axes.cp)

    @cached_property
    def memory_bytes_per_s(self) -> float:
        """Bytes per second of elementwise kernels that read or write the input of a layer."""
        return self.cluster.rates.memory.at(max(1, self.tokens * self.sizes.dim * self.compute_bytes))

    @cached_property
    def moved_s(self) -> float:
        """Seconds to read the inputs and write the outputs of a layer's matmuls once."""
        features = (self.sizes.output_features + self.sizes.input_features) / self.axes.tp
        return self.tokens * features * self.compute_bytes / self.memory_bytes_per_s

    @cached_property
    def head_s(self) -> float:
        """Seconds of the head and the loss, forward and backward."""
        return (2 + self.sizes.trained_share) * self.matmul_s(2 * self.tokens * self.sizes.head_entries / self.axes.tp)

    # -- communication, seconds -----------------------------------------------------------------------

    def seconds(self, kind: str, payload: float, axis: str | None, calls: float = 1) -> float:
        """Return the seconds of a collective with `payload` bytes of each rank, divided among `calls` calls."""
        if axis is None or axis not in self.mesh.names or payload <= 0:
            return 0.0
        sent = SENT[kind](int(payload / calls), self.mesh[axis])
        among = reach(self.mesh, axis, self.cluster.gpus_per_node)
        return calls * collective_seconds(kind, sent, among, self.cluster.links)

    def buckets(self, size: float) -> float:
        """Return the number of buckets for `size` bytes of a layer on a rank; a parameter is never divided."""
        bucket = max(self.cfg.passes.communication.bucket_mib, 1e-3) * 2**20
        return min(max(1.0, math.ceil(size / bucket)), max(1.0, self.sizes.matmuls))

    @cached_property
    def gather_s(self) -> float:
        """Seconds to gather a layer's parameters."""
        size = self.layer_entries * self.compute_bytes
        return self.seconds("all_gather", size / self.stored_over, self.mesh.stored_over, self.buckets(size))

    @cached_property
    def reduce_s(self) -> float:
        """Seconds to reduce-scatter a layer's gradients."""
        size = self.sizes.trained_share * self.layer_entries * self.reduce_bytes
        return self.seconds("reduce_scatter", size, self.mesh.stored_over, self.buckets(size))

    @cached_property
    def tables_s(self) -> float:
        """Seconds to gather embedding and head and to reduce their gradients; nothing hides them."""
        tables = self.table_entries
        gather = self.seconds("all_gather", tables * self.compute_bytes / self.stored_over, self.mesh.stored_over, 2)
        reduced_bytes = self.sizes.trained_share * tables * self.reduce_bytes
        return gather + self.seconds("reduce_scatter", reduced_bytes, self.mesh.stored_over, 2)

    @cached_property
    def sum_s(self) -> float:
        """Seconds to sum a layer's gradients over replicas."""
        size = self.sizes.trained_share * self.layer_entries * self.reduce_bytes / self.stored_over
        return self.seconds("all_reduce", size, "dp_replicate", self.buckets(size))

    @cached_property
    def sum_tables_s(self) -> float:
        """Seconds to sum the gradients of embedding and head over replicas."""
        size = self.sizes.trained_share * self.table_entries * self.reduce_bytes / self.stored_over
        return self.seconds("all_reduce", size, "dp_replicate", 2)

    @cached_property
    def sequence_s(self) -> float:
        """Seconds of one gather or one reduction of a layer's input over `tp`."""
        part = self.tokens * self.sizes.dim * self.compute_bytes / self.axes.tp
        return self.seconds("all_gather", part, "tp")

    @cached_property
    def context_s(self) -> Mapping[str, float]:
        """Seconds that a layer waits for each method of context parallelism, forward and backward."""
        heads, ranks = self.sizes.heads, self.axes.cp
        queries, keys = (math.ceil(n / self.axes.tp) for n in (heads.queries, heads.keys))
        features = heads.key_dim + heads.value_dim
        key_value_bytes = self.tokens * keys * features * self.compute_bytes
        exchanged_bytes = self.tokens * queries * features * self.compute_bytes + key_value_bytes * max(
            1, ranks // max(keys, 1)
        )
        ring = (2 * (ranks - 1) + ranks * 4 / self.compute_bytes) * self.seconds("shift", key_value_bytes, "cp")
        swapped = 2 * self.seconds("all_to_all", exchanged_bytes, "cp", 4)
        waits = {"ring": max(0.0, ring - (self.attention_s + self.attention_backward_s)), "ulysses": swapped}
        waits["all_gather"] = 2 * self.seconds("all_gather", key_value_bytes, "cp")
        waits["hybrid"] = swapped / 2 + max(0.0, ring / 2 - (self.attention_s + self.attention_backward_s))
        return waits | {"auto": min(waits.values())}

    @cached_property
    def dispatch_s(self) -> float:
        """Seconds to send a layer's tokens to experts and back, forward and backward."""
        axis = self.mesh.experts_over
        tokens = self.tokens * min(self.sizes.routed, self.axes.ep)
        return 4 * self.seconds("all_to_all", tokens * self.sizes.dim * self.compute_bytes, axis)

    # -- memory, bytes --------------------------------------------------------------------------------

    @cached_property
    def state(self) -> Mapping[str, float]:
        """Bytes of the state between steps, by kind."""
        return {
            "parameters": self.master_bytes * self.local_entries + self.frozen_bytes,
            "optimizer": self.moment_bytes * self.local_entries,
            "averages": self.average_bytes * self.local_entries,
        }

    @cached_property
    def moment_bytes(self) -> int:
        """Bytes of the moments of an entry, without the scales of 8-bit moments."""
        optim = self.cfg.optim
        return CODES.get(optim.name) or moments_of(optim) * MASTER[optim.state or self.cfg.train.dtype]

    @cached_property
    def average_bytes(self) -> int:
        """Bytes of the average of an entry (`train.ema`)."""
        return 0 if self.cfg.train.ema is None else 4

    @cached_property
    def expert_rows(self) -> float:
        """Bytes of a layer's tokens received from other ranks, in buffers bounded by the capacity factor."""
        moe, others = self.cfg.passes.moe, 1 - 1 / self.axes.ep
        shares = moe.capacity_factor if moe.dispatch == "bounded" else 0.0
        return shares * others * self.tokens * self.sizes.routed * self.sizes.dim * self.compute_bytes

    @cached_property
    def logits(self) -> float:
        """Bytes of logits and of values computed from them, in chunks if they are large."""
        head = self.sizes.trained_share * self.sizes.head_entries / self.axes.tp
        weight = head * (4 + self.compute_bytes) if self.chunk[1] > 1 else 0.0
        return (SPLIT_ALIVE if self.axes.tp > 1 else LOGITS_ALIVE) * self.chunk[0] + weight

    @cached_property
    def chunk(self) -> tuple[float, int]:
        """(bytes of a chunk of logits, number of chunks)."""
        logits_bytes = self.tokens * self.sizes.vocabulary * self.compute_bytes / self.axes.tp
        options = self.cfg.passes.chunk_loss
        chunks = options.chunks or max(1, math.ceil(logits_bytes / (options.logits_mib * 2**20)))
        return logits_bytes / chunks, chunks
