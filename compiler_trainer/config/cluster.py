"""The machines that a prediction is for."""

from __future__ import annotations

from dataclasses import dataclass, field

from compiler_trainer.config.kinds import AtLeastOne, NonNegativeFloat, Positive, PositiveFloat, ShareOfPeak
from compiler_trainer.config.rates import RatesOrName


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
    attention: str = "flash2"  # attention kernel, one of those in rates
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
