"""The costs of one rank in closed form, before recomputation: seconds and bytes of a microbatch on a mesh.

Factors that no formula gives, such as how often elementwise kernels read and write a value, come from compiled programs
of Llama 3 8B (docs/guides/plan.md). Each quantity is computed once and shared by many settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from compiler_trainer.config.schema import Config, MeshConfig, OptimConfig
from compiler_trainer.pipeline import build_optimizer
from compiler_trainer.planning.sizes import Sizes
from compiler_trainer.training.speed import computes_in
from passes.cost.accounting import SENT
from passes.cost.cluster import Cluster, collective_seconds
from passes.program.machine import reach
from passes.program.mesh import Mesh

MASTER = {"float32": 4, "bfloat16": 2}
MOMENTS = {"adamw": 2.0, "adamw8bit": 0.5, "adamwfp8": 0.5, "muon": 1.0}  # of the bytes of an entry
LOGITS_ALIVE, LOGITS_LATER = 5.4, 2.4  # copies of a chunk of logits that are alive at once
ATTENTION_BACKWARD = 2.5  # FLOPs of the forward


def moments_of(optim: OptimConfig) -> float:
    """Return the number of moments an entry of an optimizer; 8-bit moments count as their share of the bytes."""
    if optim.name == "custom":
        return len(build_optimizer(optim, None).moments)
    return MOMENTS.get(optim.name, float(optim.momentum > 0))


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
        return 2 if computes_in(self.cfg) == "bfloat16" else 4

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
        """Parameter entries that a rank stores."""
        return self.sizes.entries / (self.axes.pp * self.axes.tp * self.stored_over)

    @cached_property
    def layer_entries(self) -> float:
        """Entries of a layer on one rank of `tp` (and `ep`), when gathered."""
        return (self.sizes.dense + self.sizes.experts / self.axes.ep) / self.axes.tp

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
        return 3 * self.matmul_s(2 * self.tokens * self.sizes.head_entries / self.axes.tp)

    # -- communication, seconds -----------------------------------------------------------------------

    def seconds(self, kind: str, payload: float, axis: str | None, calls: float = 1) -> float:
        """Return the seconds of a collective with `payload` bytes of each rank, divided among `calls` calls."""
        if axis is None or axis not in self.mesh.names or payload <= 0:
            return 0.0
        sent = SENT[kind](int(payload / calls), self.mesh[axis])
        among = reach(self.mesh, axis, self.cluster.gpus_per_node)
        return calls * collective_seconds(kind, sent, among, self.cluster.links)

    def buckets(self, size: float) -> float:
        """Return the number of buckets for `size` bytes of a layer on a rank."""
        bucket = max(self.cfg.passes.communication.bucket_mib, 1e-3) * 2**20
        return max(1.0, math.ceil(size / bucket))

    @cached_property
    def gather_s(self) -> float:
        """Seconds to gather a layer's parameters."""
        size = self.layer_entries * self.compute_bytes
        return self.seconds("all_gather", size / self.stored_over, self.mesh.stored_over, self.buckets(size))

    @cached_property
    def reduce_s(self) -> float:
        """Seconds to reduce-scatter a layer's gradients."""
        size = self.layer_entries * self.reduce_bytes
        return self.seconds("reduce_scatter", size, self.mesh.stored_over, self.buckets(size))

    @cached_property
    def tables_s(self) -> float:
        """Seconds to gather embedding and head and to reduce their gradients; nothing hides them."""
        tables = (self.sizes.embedding_entries + (0 if self.sizes.is_tied else self.sizes.head_entries)) / self.axes.tp
        gather = self.seconds("all_gather", tables * self.compute_bytes / self.stored_over, self.mesh.stored_over, 2)
        return gather + self.seconds("reduce_scatter", tables * self.reduce_bytes, self.mesh.stored_over, 2)

    @cached_property
    def sum_s(self) -> float:
        """Seconds to sum a layer's gradients over replicas."""
        size = self.layer_entries * self.reduce_bytes / self.stored_over
        return self.seconds("all_reduce", size, "dp_replicate", self.buckets(size))

    @cached_property
    def sum_tables_s(self) -> float:
        """Seconds to sum the gradients of embedding and head over replicas."""
        tables = (self.sizes.embedding_entries + (0 if self.sizes.is_tied else self.sizes.head_entries)) / self.axes.tp
        return self.seconds("all_reduce", tables * self.reduce_bytes / self.stored_over, "dp_replicate", 2)

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
            "parameters": self.master_bytes * self.local_entries,
            "optimizer": self.moment_bytes * self.local_entries,
        }

    @cached_property
    def moment_bytes(self) -> float:
        """Bytes of the moments of an entry, without the scales of 8-bit moments."""
        optim = self.cfg.optim
        return moments_of(optim) * MASTER[optim.state or self.cfg.train.dtype]

    @cached_property
    def expert_rows(self) -> float:
        """Bytes of a layer's tokens received from other ranks, in buffers bounded by the capacity factor."""
        moe, others = self.cfg.passes.moe, 1 - 1 / self.axes.ep
        shares = moe.capacity_factor if moe.dispatch == "bounded" else 0.0
        return shares * others * self.tokens * self.sizes.routed * self.sizes.dim * self.compute_bytes

    @cached_property
    def logits(self) -> float:
        """Bytes of logits and of values computed from them, in chunks if they are large."""
        weight = self.sizes.head_entries / self.axes.tp * (4 + self.compute_bytes) if self.chunk[1] > 1 else 0.0
        return LOGITS_ALIVE * self.chunk[0] + weight

    @cached_property
    def logits_later(self) -> float:
        """Bytes left of them when the head's own gradient is computed."""
        return LOGITS_LATER * self.chunk[0]

    @cached_property
    def chunk(self) -> tuple[float, int]:
        """(bytes of a chunk of logits, number of chunks)."""
        logits_bytes = self.tokens * self.sizes.vocabulary * self.compute_bytes / self.axes.tp
        options = self.cfg.passes.chunk_loss
        chunks = options.chunks or max(1, math.ceil(logits_bytes / (options.logits_mib * 2**20)))
        return logits_bytes / chunks, chunks
