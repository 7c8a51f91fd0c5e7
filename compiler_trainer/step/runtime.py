"""Execution of local programs: this process is one rank of a torchrun job, or plays all ranks in lockstep."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import LowerConfig
from compiler_trainer.step.agree import agree
from compiler_trainer.step.captured import why_nothing_is_recorded
from compiler_trainer.step.messages import Ways
from compiler_trainer.step.ranks import gather, new_group, place_on_node
from compiler_trainer.step.turns import sent_between
from passes.check.simulate import Lockstep
from passes.ir import ir
from passes.ir.bodies import body_of_call, calls_of
from passes.ir.mesh import Mesh
from passes.ir.operators import axis_of, communicator_of
from passes.lower import inductor
from passes.lower.backends import BACKENDS
from passes.lower.calls import Executable
from passes.lower.cudagraphs import InSlots, Recorder
from passes.lower.inductor import ALONE, Workers
from passes.sharding.place import place_batch
from passes.torch_private import register_axis_group

T = TypeVar("T")
ByRank = Mapping[int, Sequence[Tensor]]


class Runtime:
    """The base that compiles a program and runs it for the ranks of this process.

    What it does itself is right if all ranks are in this process.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    ways: Ways | None = None  # process groups for values between pipeline ranks

    @abstractmethod
    def compile(self, name: str, program: ir.Program, ctx: ir.Context) -> Any:
        """Return the compiled program."""

    @abstractmethod
    def run(self, compiled: Any, inputs: ByRank, slot: int | None = None) -> dict[int, tuple[Tensor, ...]]:
        """Return the outputs of the ranks that have inputs: all ranks of this process, or those of a pipeline stage."""

    @abstractmethod
    def all_locals(self, local: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the local tensors of all ranks that have one, by rank."""

    @abstractmethod
    def of_stage(self, local: Mapping[int, Tensor], stage: int, like: Tensor) -> list[Tensor]:
        """Return the local tensors of a stage's ranks, by rank."""

    @abstractmethod
    def send(self, local: Mapping[int, Tensor], source: int, to: Collection[int], like: Tensor) -> None:
        """Copy one rank's local tensor to other ranks, in place."""

    @property
    def ranks_per_stage(self) -> int:
        """The number of ranks of a stage, which is the distance of a rank to its counterpart in the next stage."""
        return self.mesh.world_size // self.mesh["pp"]

    def stage_of(self, rank: int) -> int:
        """Return the pipeline rank of a rank."""
        return rank // self.ranks_per_stage

    def begin(self) -> None:
        """Begin a step."""

    def meet(self, programs: Mapping[str, Any]) -> None:
        """Connect this process with those that it exchanges values with."""

    def build(self, programs: Iterable[ir.Program], ctx: ir.Context) -> None:
        """Start to compile programs ahead of `compile`."""

    def numbers(self, values: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Return the values of all stages."""
        return dict(values)

    def share(self, values: dict[str, T]) -> dict[str, T]:
        """Return the values of all stages."""
        return values

    def total(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return sums over the samples of all processes."""
        return dict(values)


def axes_of_samples(programs: Iterable[ir.Program]) -> tuple[str, ...]:
    """Return the axes over which a batch's samples are divided."""
    shapes = [(i.spec.shape[0], program.mesh) for program in programs for i in program.inputs if i.kind == "batch"]
    return place_batch(shapes[0][:1], shapes[0][1]).dims[0][0].axes if shapes else ()


def all_calls(program: ir.Program) -> Iterator[fx.Node]:
    """Yield the operators of a program in order, those of a compiled region at each of its calls."""
    for node in program.calls():
        body = body_of_call(node)
        yield from (n for n in body.graph.nodes if n.op == "call_function") if body else (node,)


class LockstepRanks(Runtime):
    """All ranks in this process, interpreted node by node."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.ranks = mesh, tuple(range(mesh.world_size))

    def compile(self, name: str, program: ir.Program, ctx: ir.Context) -> Lockstep:
        """Return the simulator of a program."""
        return Lockstep(program)

    def run(self, compiled: Lockstep, inputs: ByRank, slot: int | None = None) -> dict[int, tuple[Tensor, ...]]:
        """Return the outputs of the ranks that have inputs: all ranks, or those of a pipeline stage."""
        ranks = sorted(inputs)
        with torch.no_grad():
            return dict(zip(ranks, compiled.run([inputs[rank] for rank in ranks]), strict=True))

    def of_stage(self, local: Mapping[int, Tensor], stage: int, like: Tensor) -> list[Tensor]:
        """Return the local tensors of a stage's ranks, by rank."""
        return [local[rank] for rank in self.ranks if self.stage_of(rank) == stage]

    def all_locals(self, local: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the local tensors of all ranks that have one, by rank."""
        return [local[rank] for rank in sorted(local)]

    def send(self, local: Mapping[int, Tensor], source: int, to: Collection[int], like: Tensor) -> None:
        """Copy one rank's local tensor to other ranks, in place."""
        for rank in to:
            local[rank].copy_(local[source])


class ProcessRanks(Runtime):
    """One rank of a job with an initialized process group, or the only rank without one."""

    def __init__(self, mesh: Mesh, lower: LowerConfig, device: torch.device, tell: Callable[[str], None]):
        self.mesh, self.lower, self.device, self.tell = mesh, lower, device, tell
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if world_size != mesh.world_size:
            raise UserError("mesh", f"{dict(mesh.sizes)} is for {mesh.world_size} ranks, but {world_size} are running")
        self.ranks: tuple[int, ...] = (rank,)
        self.groups: dict[str, dist.ProcessGroup] = {}  # by the communicator's name in programs
        records = lower.cudagraphs and not why_nothing_is_recorded(device)
        self.recorder = Recorder() if records else None
        self.axis_groups: dict[str, dist.ProcessGroup] = {}  # the first one of each axis
        self.sample_groups: list[dist.ProcessGroup] = []  # of ranks that have different samples, one for each axis
        self.ways: Ways | None = None
        self.stages: dist.ProcessGroup | None = None  # this rank and its counterparts in other stages
        if self.distributed and mesh["pp"] > 1:
            self.ways, self.stages = Ways(new_group(), new_group()), new_group(self.neighbours("pp"))
        workers = self.share_out() if self.distributed else ALONE
        self.workers = replace(workers, fast=lower.fast_start)

    def share_out(self) -> Workers:
        """Return the ranks of this node and stage, which share the compilation of programs; every rank must call this.

        A rank compiles alone if it sees GPUs other than its own, because its code then contains its GPU's number.
        """
        (rank,), (local, count) = self.ranks, place_on_node()
        if self.device.type == "cuda" and torch.cuda.device_count() > 1:
            return ALONE
        if self.mesh["pp"] == 1:
            return Workers(local, count, dist.barrier)
        first = self.stage_of(rank) * self.ranks_per_stage
        group = new_group(range(first, first + self.ranks_per_stage))
        local_ranks = [r for r in range(rank - local, rank - local + count) if self.stage_of(r) == self.stage_of(rank)]
        return Workers(local_ranks.index(rank), len(local_ranks), partial(dist.barrier, group))

    def compile(self, name: str, program: ir.Program, ctx: ir.Context) -> Executable:
        """Compile a program; the ranks of a node share the compiled regions, so every rank must call this."""
        try:
            run = self.start(name, program, ctx)
        except ir.Refused as error:
            raise UserError(error.pass_name, error.located) from error
        if self.recorder is None or program.evaluates:  # evaluation is too rare to reserve graph memory for
            return run
        return self.recorder.recorded(program, run)

    def start(self, name: str, program: ir.Program, ctx: ir.Context) -> Executable:
        """Lower a program by the backend, with its process groups registered."""
        lower = BACKENDS[self.lower.backend]

        def tell(task: str) -> None:
            self.tell(f"{name}: {task}")

        if self.distributed:
            self.name_groups()
        return lower(program, ctx, self.workers, tell)

    def begin(self) -> None:
        """Begin a training step; no transfer between ranks is in flight."""
        if self.recorder is not None:
            self.name_groups()
            self.recorder.begin()

    def run(self, compiled: Executable, inputs: ByRank, slot: int | None = None) -> dict[int, tuple[Tensor, ...]]:
        """Return this rank's outputs; a recorded program runs in a slot."""
        (rank,) = self.ranks
        self.name_groups()
        values = inputs[rank]
        return {rank: compiled(values, slot) if isinstance(compiled, InSlots) else compiled(values)}

    def make_groups(self, program: ir.Program) -> None:
        """Create the process groups of communicators that no earlier program named, in the program's order."""
        for name, axis in {communicator_of(node): axis_of(node) for node in all_calls(program)}.items():
            if name is not None and axis is not None and name not in self.groups:
                self.groups[name] = new_group(self.neighbours(axis))
                self.axis_groups.setdefault(axis, self.groups[name])

    def group_of(self, axis: str) -> dist.ProcessGroup:
        """Return a group of the ranks along an axis: that of a communicator if there is one, or a new group."""
        if axis not in self.axis_groups:
            self.axis_groups[axis] = new_group(self.neighbours(axis))
        return self.axis_groups[axis]

    def neighbours(self, axis: str) -> list[int]:
        """Return the ranks that differ from this one only in their coordinate on an axis."""
        (rank,) = self.ranks
        return self.mesh.group(axis, rank)

    def name_groups(self) -> None:
        """Register the groups under their communicators' names, as another step may have registered another mesh's."""
        for name, group in self.groups.items():
            register_axis_group(name, group)

    def all_locals(self, local: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the local tensors of all ranks, by rank; every rank must call this."""
        (mine,) = local.values()
        if not self.distributed:
            return [mine]
        tensors = [torch.empty_like(mine) for _ in range(self.mesh.world_size)]
        dist.all_gather(tensors, mine.contiguous())
        return tensors

    def of_stage(self, local: Mapping[int, Tensor], stage: int, like: Tensor) -> list[Tensor]:
        """Return the local tensors of a stage's ranks, shaped `like`, by rank; every rank must call this."""
        (rank,) = self.ranks
        mine = local[rank] if rank in local else torch.empty_like(like, device=self.device)
        return self.all_locals({rank: mine})[stage * self.ranks_per_stage : (stage + 1) * self.ranks_per_stage]

    def meet(self, programs: Mapping[str, ir.Program]) -> None:
        """Check that all ranks hold the same programs, and create their process groups; every rank must call this."""
        if self.distributed:
            for name, program in programs.items():
                agree(name, program)
                self.make_groups(program)
            self.sample_groups = [self.group_of(axis) for axis in axes_of_samples(programs.values())]
        if self.recorder is not None and self.mesh["pp"] > 1:
            self.recorder.sent = sent_between(p for p in programs.values() if not p.evaluates)

    def build(self, programs: Iterable[ir.Program], ctx: ir.Context) -> None:
        """Compile the regions of several stages' programs, each once per machine; every rank must call this."""
        if self.distributed and self.mesh["pp"] > 1 and self.lower.backend == "inductor":
            self.name_groups()
            bodies = dict.fromkeys(body for program in programs for body in calls_of(program))
            workers = Workers(*place_on_node(), dist.barrier, self.lower.fast_start)
            inductor.compile_share(list(bodies), ctx, workers, self.tell)

    def numbers(self, values: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Return the numbers of all stages, fp64[] each, on the device of `values`; every rank must call this.

        `names` are those of all stages, in a common order. If several stages have a number, the last one's is returned.
        """
        if self.stages is None:
            return dict(values)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        mine = torch.stack([values.get(name, zero) for name in names] + [zero + (name in values) for name in names])
        rows = [torch.empty_like(mine) for _ in range(self.mesh["pp"])]
        dist.all_gather(rows, mine, self.stages)
        numbers, is_given = torch.stack(rows).chunk(2, dim=1)
        order = torch.arange(1, len(rows) + 1, device=self.device)[:, None]
        last = (is_given * order).argmax(0, keepdim=True)
        return dict(zip(names, numbers.gather(0, last)[0], strict=True))

    def share(self, values: dict[str, T]) -> dict[str, T]:
        """Return the values of all stages, of any type; every rank must call this."""
        if self.mesh["pp"] == 1:
            return values
        return {name: value for rank_values in gather(values, self.stages) for name, value in rank_values.items()}

    def total(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over all ranks' samples, fp64[] each, of those over a rank's own; all ranks must call this.

        Ranks that share their samples have the same values.
        """
        if not self.sample_groups or not values:
            return dict(values)
        sums = torch.stack([value.double() for value in values.values()])
        for group in self.sample_groups:
            dist.all_reduce(sums, group=group)
        return dict(zip(values, sums.unbind(), strict=True))

    def send(self, local: Mapping[int, Tensor], source: int, to: Collection[int], like: Tensor) -> None:
        """Copy one rank's local tensor, shaped `like`, to other ranks in place; every rank must call this."""
        (rank,) = self.ranks
        tensor = local[rank].detach() if rank in local else torch.empty_like(like, device=self.device)
        content = tensor.clone().reshape(-1).view(torch.uint8)  # works for any dtype
        dist.broadcast(content, source)
        if rank in to:
            tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))
