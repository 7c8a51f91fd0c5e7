"""What the programs of a step are made of, and how they are made: without passes imported where they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compiler_trainer.config.cluster import ClusterConfig
from compiler_trainer.config.clusters import balance_of
from compiler_trainer.config.device import described
from compiler_trainer.config.schema import OptimConfig, PassesConfig
from compiler_trainer.config.tables import build_table
from compiler_trainer.step.made_of import made_of, name_of_device, options_of
from compiler_trainer.step.shelf import Made, Shelf, stored_or_made
from passes.lower import inductor
from passes.pipeline.tables import Table, TaskCosts, unit
from passes.program.mesh import Mesh

if TYPE_CHECKING:
    from compiler_trainer.capture.capture import LossFn
    from passes.check.runner import Observer


@dataclass(frozen=True)
class Job:
    """A model, its loss and one microbatch of global shapes, for the ranks of a mesh, with all options that matter.

    `full` values of parameters are there where numbers are verified.
    """

    model: nn.Module
    loss_fn: LossFn
    batch: Mapping[str, Tensor]
    mesh: Mesh
    passes: PassesConfig
    optim: OptimConfig
    device: torch.device
    microbatches: int
    skip_nonfinite: bool
    train: bool
    evaluate: bool
    below: Mapping[str, int]
    full: Mapping[str, Tensor] | None
    seed: int
    cluster: ClusterConfig
    device_name: str = ""  # of one that is not here; else it is asked

    def table(self, costs: TaskCosts = unit) -> Table | None:
        """The order of the tasks of pipeline stages, given what each costs; None where there is one stage."""
        stages = self.mesh["pp"]
        return build_table(self.passes.pipeline, stages, self.microbatches, costs) if stages > 1 else None

    def programs(
        self, shelf: Shelf | None, check: bool, compiles: bool, observe: Observer | None, tell: Callable[[str], None]
    ) -> tuple[Made, Table | None]:
        """The programs, read where an earlier start of the very same made them, and the order of their tasks.

        Where this process `compiles` kernels, it gets ready for that beside the passes.
        """
        table = self.table()
        device, cluster = self.device_name or name_of_device(self.device), described(self.cluster)
        wanted = options_of(
            self.passes, self.optim, self.mesh, device, below=dict(self.below), train=self.train,
            evaluate=self.evaluate, microbatches=self.microbatches, skip=self.skip_nonfinite,
            cluster=cluster if self.passes.communication.async_tp == "auto" else None,
            balance=balance_of(cluster, self.passes.cast.param_dtype),
            tasks=(table.rank_of, table.is_split) if table else None,
        )  # fmt: skip
        what = partial(made_of, self.model, self.loss_fn, self.batch, wanted)
        make = partial(self.make, compiles, observe, tell)
        made = stored_or_made(shelf if self.full is None else None, what, make, check)
        return made, self.table(made[1].cost)

    def make(self, compiles: bool, observe: Observer | None, tell: Callable[[str], None]) -> Made:
        """The programs and the report of making them."""
        if compiles:
            inductor.get_ready(self.device)
        from compiler_trainer.step.programs import compilation

        given = self.model, self.loss_fn, self.batch, self.mesh.without("pp"), self.passes, self.optim, self.device
        how = self.microbatches, self.skip_nonfinite, self.train, self.full, self.seed, self.mesh["pp"], self.cluster
        return replace(compilation(*given, *how), observe=observe, tell=tell, below=self.below).programs(self.evaluate)
