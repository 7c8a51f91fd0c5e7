"""The machines that a prediction is for, with the tables of measured rates that `cluster.rates` holds or names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from compiler_trainer.config.options import (
    AtLeastOne,
    Chosen,
    Must,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    ShareOfPeak,
)


def are_points(points: tuple[tuple[float, float], ...]) -> bool:
    """Return True if all numbers of [size, figure] pairs are above 0 and sizes increase."""
    return bool(points) and min(map(min, points)) > 0 and all(a < b for (a, _), (b, _) in zip(points, points[1:]))


Points = Annotated[
    tuple[tuple[float, float], ...], Must("be pairs of numbers above 0, [size, figure], sizes growing", are_points)
]


@dataclass(frozen=True)
class ProductRates:
    """The TFLOP/s of matmuls, by their GFLOP; `grouped` ones, of experts, by the GFLOP of a group."""

    float32: Points
    bfloat16: Points
    float8: Points
    grouped: Points


@dataclass(frozen=True)
class AttentionRates:
    """The TFLOP/s of an attention kernel, by the number of keys. Causal attention counts half of the FLOPs."""

    kernel: str
    forward: Points
    backward: Points


@dataclass(frozen=True)
class CollectiveTimes:
    """The microseconds of a collective among `ranks` ranks of a node, by the MiB of the largest buffer of a rank."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift"]
    ranks: Annotated[int, Must("be at least 2", lambda n: n >= 2)]
    us: Points


@dataclass(frozen=True)
class ProtocolConfig:
    """The microseconds before the first byte and per hop, inside a node and between nodes; the share of bandwidth."""

    base_us: NonNegativeFloat
    intra_us: NonNegativeFloat
    inter_us: NonNegativeFloat
    share: ShareOfPeak


@dataclass(frozen=True)
class RatesConfig:
    """The measured rates: lists of [size, figure], sizes increasing, interpolated in logarithms.

    `protocols` are for collectives without a table, among them those between nodes.
    """

    products: ProductRates
    attention: tuple[AttentionRates, ...]
    memory: Points  # share of hbm_gb_s that a kernel reaches, by the MiB that it moves
    collectives: tuple[CollectiveTimes, ...]
    protocols: Annotated[tuple[ProtocolConfig, ...], Must("name at least one", bool)]


def kind_of_rates(value: Any) -> Any:
    """Return the type of the rates of a cluster: tables, or the name of a file of tables."""
    return RatesConfig if isinstance(value, Mapping) else str


RatesOrName = Annotated[RatesConfig | str, Chosen(kind_of_rates, "name | tables")]


# ---- clusters ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByDtype:
    """The peak TFLOP/s of matmuls by dtype; MFU is relative to it."""

    float32: PositiveFloat  # TFLOP/s in float32
    bfloat16: PositiveFloat  # TFLOP/s in bfloat16
    float8: PositiveFloat  # TFLOP/s in float8


@dataclass(frozen=True)
class ClusterConfig:
    """The machines that a dry run or plan predicts for; `auto`: machines with the GPU that is here.

    Rates are per GPU, bandwidths in one direction.
    """

    name: str = "h100"  # name of the cluster
    device: str | None = None  # name of its GPU by torch.cuda.get_device_name(), or cpu; there MFU is reported
    gpus: Positive | None = None  # number of GPUs; null: as many as the mesh has ranks
    gpus_per_node: Positive = 8  # GPUs per node
    rates: RatesOrName = "h100"  # measured speeds by size: a file of conf/cluster/rates, or its tables
    peak_tflops: ByDtype = ByDtype(67.0, 989.0, 1979.0)
    attention: str = "cudnn"  # attention kernel, one of those in rates
    throttle: ShareOfPeak = 0.95  # share of the measured TFLOP/s that a long step sustains
    kernel_us: NonNegativeFloat = 2.0  # least time of a kernel; added to kernels that only move memory
    launch_us: NonNegativeFloat = 6.0  # host time to launch a kernel or collective; none with lower.cudagraphs
    operator_us: NonNegativeFloat = 10.0  # host time of an operator of the eager backend, views included
    host_computes: bool = False  # the host is the device: it launches nothing while it computes
    hbm_gib: PositiveFloat = 80.0  # memory of a GPU
    hbm_gb_s: PositiveFloat = 3350.0  # memory bandwidth of a GPU
    intra_gb_s: PositiveFloat = 370.0  # bandwidth reached between GPUs of a node
    inter_gb_s: PositiveFloat = 48.5  # bandwidth reached between nodes, per GPU
    beside_computing: ShareOfPeak = 0.85  # share of its speed that a matmul or attention keeps next to a collective
    beside_moving: ShareOfPeak = 0.8  # share of its speed that a memory-bound kernel keeps next to a collective
    beside_sending: ShareOfPeak = 1.0  # share of its speed that a collective keeps next to a kernel
    context_gib: NonNegativeFloat = 0.6  # device memory for the driver and loaded kernels
    communicator_gib: NonNegativeFloat = 0.4  # device memory for the communicators' buffers of a rank
    allocator_loss: NonNegativeFloat = 0.1  # memory reserved beyond live tensors, as a share of them
    expert_load: AtLeastOne = 1.0  # load of the rank with the busiest experts, over the mean
    sources: dict[str, str] = field(default_factory=dict)  # source of each figure, for the report


AUTO_CLUSTER = ClusterConfig(name="auto")  # value of `cluster=auto` until the device is known
