"""The request for the programs of a training step, with everything that decides them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from compiler_trainer.config.cluster import AUTO_CLUSTER, ClusterConfig
from compiler_trainer.config.device import balance_of, resolve_cluster
from compiler_trainer.config.schedules import build_schedule
from compiler_trainer.config.schema import OptimConfig, PassesConfig
from passes.ir.machine import Balance
from passes.ir.mesh import Mesh
from passes.pipeline.schedules import Schedule, TaskCosts, unit

Metrics = Mapping[str, Tensor]
LossFn = Callable[[nn.Module, dict[str, Tensor]], Tensor | tuple[Tensor, Metrics]]


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """A model with its loss, one microbatch of global shapes, a mesh, and the options of passes and optimizer.

    `microbatches` make a step. With `skip_nonfinite` a step whose gradient norm is not finite changes nothing. Programs
    of training and of evaluation are made if `train` and `evaluate` ask for them. Entries of the batch are integers
    below `entry_bounds`, if given. `passes.verify=numeric` runs with `values`, the real parameters and buffers, and
    with `seed`. `device_name` names a device that is not in this machine.
    """

    model: nn.Module
    loss_fn: LossFn
    batch: Mapping[str, Tensor]
    mesh: Mesh = Mesh()
    passes: PassesConfig = field(default_factory=PassesConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    device: torch.device = torch.device("cpu")
    cluster: ClusterConfig = AUTO_CLUSTER
    microbatches: int = 1
    skip_nonfinite: bool = False
    train: bool = True
    evaluate: bool = True
    entry_bounds: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Tensor] | None = None
    seed: int = 0
    device_name: str = ""

    @cached_property
    def parameter_dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the stored parameters, by name."""
        return {name: parameter.dtype for name, parameter in self.model.named_parameters()}

    @property
    def at_once(self) -> int:
        """The number of microbatches that are computed together."""
        return self.passes.communication.batch_overlap

    @cached_property
    def balance(self) -> Balance:
        """The cluster's speed of computing relative to that of its links."""
        return balance_of(resolve_cluster(self.cluster), self.passes.cast.param_dtype)

    def schedule(self, costs: TaskCosts = unit) -> Schedule | None:
        """Return the order of the tasks of pipeline stages, given their costs; None without stages."""
        stages = self.mesh["pp"]
        return build_schedule(self.passes.pipeline, stages, self.microbatches, costs) if stages > 1 else None
