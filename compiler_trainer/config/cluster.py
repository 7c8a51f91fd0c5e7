"""The machines that a prediction is for."""

from __future__ import annotations

from dataclasses import dataclass, field

from compiler_trainer.config.kinds import AtLeastOne, NonNegativeFloat, Positive, PositiveFloat, ShareOfPeak
from compiler_trainer.config.rates import RatesOrName


@dataclass(frozen=True)
class ByDtype:
    """A number for products of matrices in each dtype."""

    float32: PositiveFloat
    bfloat16: PositiveFloat
    float8: PositiveFloat


@dataclass(frozen=True)
class ClusterConfig:
    """The machines that a dry run predicts for; `auto` is those of the GPU here. Rates are of a GPU, links one way."""

    name: str = "h100"
    device: str | None = None  # what torch.cuda.get_device_name() says there, or cpu; MFU is of no other
    gpus: Positive | None = None  # how many there are; null: as many as the mesh has ranks
    gpus_per_node: Positive = 8
    rates: RatesOrName = "h100"  # what is reached by size: a file of conf/cluster/rates, or its tables
    peak_tflops: ByDtype = ByDtype(67.0, 989.0, 1979.0)  # what MFU is a share of
    attention: str = "flash2"  # the kernel, of those in rates
    throttle: ShareOfPeak = 0.95  # of the measured TFLOP/s, what a long step keeps
    kernel_us: NonNegativeFloat = 2.0  # the least a kernel takes, and added to those that only move memory
    launch_us: NonNegativeFloat = 6.0  # the host launches a kernel or collective; none with lower.cudagraphs
    operator_us: NonNegativeFloat = 10.0  # the host takes for an operator of the eager backend, views included
    host_computes: bool = False  # the host is the device: it launches nothing while it computes
    hbm_gib: PositiveFloat = 80.0
    hbm_gb_s: PositiveFloat = 3350.0
    intra_gb_s: PositiveFloat = 370.0  # reached between GPUs of a node
    inter_gb_s: PositiveFloat = 48.5  # reached between nodes
    beside_computing: ShareOfPeak = 0.85  # of its speed, what a product keeps beside a collective
    beside_moving: ShareOfPeak = 0.8  # what a kernel keeps that memory limits
    beside_sending: ShareOfPeak = 1.0  # what a collective keeps beside a kernel
    context_gib: NonNegativeFloat = 0.6  # of the device's memory, what the driver and loaded kernels take
    communicator_gib: NonNegativeFloat = 0.4  # buffers of the communicators of a rank
    allocator_loss: NonNegativeFloat = 0.1  # memory reserved beyond what is alive, as a share of that
    expert_load: AtLeastOne = 1.0  # rows of the rank whose experts get most, over the mean
    sources: dict[str, str] = field(default_factory=dict)  # where each of these comes from, for the report


AUTO_CLUSTER = ClusterConfig(name="auto")  # what `cluster=auto` stands for until the device is known
