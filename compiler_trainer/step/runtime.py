"""Where local programs run: this process is one rank of a torchrun job, or plays all ranks in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, fx

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import LowerConfig
from compiler_trainer.step.agree import agree
from compiler_trainer.step.ranks import place_on_node
from passes.check.simulate import Lockstep
from passes.cost.accounting import axis_of, communicator_of
from passes.lower.backends import BACKENDS
from passes.lower.calls import Executable
from passes.lower.cudagraphs import Replayed
from passes.lower.inductor import Workers
from passes.program import ir
from passes.program.bodies import body_of_call
from passes.program.mesh import Mesh
from passes.program.torch_private import register_axis_group

ByRank = Mapping[int, Sequence[Tensor]]


class Runtime(Protocol):
    """Compiles a program and runs it for the ranks that live here."""

    ranks: tuple[int, ...]

    def compile(self, name: str, program: ir.Program, ctx: ir.Context) -> Any: ...
    def run(self, compiled: Any, inputs: ByRank) -> dict[int, tuple[Tensor, ...]]: ...
    def all_locals(self, local: Mapping[int, Tensor]) -> list[Tensor]: ...
    def send(self, local: Mapping[int, Tensor], source: int, to: Collection[int]) -> None: ...


def all_calls(program: ir.Program) -> Iterator[fx.Node]:
    """The operators of a program in order, those of a body at each of its calls."""
    for node in program.calls():
        body = body_of_call(node)
        yield from (n for n in body.graph.nodes if n.op == "call_function") if body else (node,)


class LockstepRanks:
    """All ranks in this process, interpreted node by node."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.ranks = mesh, tuple(range(mesh.world_size))

    def compile(self, name: str, program: ir.Program, ctx: ir.Context) -> Lockstep:
        """The simulator of a program."""
        return Lockstep(program)

    def run(self, compiled: Lockstep, inputs: ByRank) -> dict[int, tuple[Tensor, ...]]:
        """Every rank's outputs."""
        with torch.no_grad():
            return dict(enumerate(compiled.run([inputs[rank] for rank in self.ranks])))

    def all_locals(self, local: Mapping[int, Tensor]) -> list[Tensor]:
        """The local tensors of all ranks, by rank."""
        return [local[rank] for rank in self.ranks]

    def send(self, local: Mapping[int, Tensor], source: int, to: Collection[int]) -> None:
        """Give some ranks the local tensor of another, in place."""
        for rank in to:
            local[rank].copy_(local[source])


class ProcessRanks:
    """One rank of a job whose process group is up (or the only rank, without one)."""

    def __init__(self, mesh: Mesh, lower: LowerConfig, tell: Callable[[str], None]):
        self.mesh, self.lower, self.tell = mesh, lower, tell
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if world_size != mesh.world_size:
            raise UserError("mesh", f"{dict(mesh.sizes)} is for {mesh.world_size} ranks, {world_size} are running")
        self.ranks: tuple[int, ...] = (rank,)
        self.groups: dict[str, dist.ProcessGroup] = {}  # of the communicators that programs name

    def compile(self, name: str, program: ir.Program, ctx: ir.Context) -> Executable:
        """The ranks of a node share out the bodies among them; every rank must call it."""
        try:
            run = self.start(name, program, ctx)
        except ir.Refused as error:
            raise UserError(*str(error).split(": ", 1)) from error
        training = name != "evaluate"  # evaluation runs too rarely to hold memory of its own
        return Replayed(run, program.inputs) if self.lower.cudagraphs and training else run

    def start(self, name: str, program: ir.Program, ctx: ir.Context) -> Executable:
        """The program lowered by the backend, its process groups made."""
        lower = BACKENDS[self.lower.backend]

        def tell(what: str) -> None:
            self.tell(f"{name}: {what}")

        if not self.distributed:
            return lower(program, ctx, tell=tell)
        agree(name, program)
        self.make_groups(program)
        self.name_groups()
        return lower(program, ctx, Workers(*place_on_node(), dist.barrier), tell)

    def run(self, compiled: Executable, inputs: ByRank) -> dict[int, tuple[Tensor, ...]]:
        """This rank's outputs."""
        (rank,) = self.ranks
        self.name_groups()
        return {rank: compiled(inputs[rank])}

    def make_groups(self, program: ir.Program) -> None:
        """Make the process groups that a program names first, by communicator; every rank makes all, in its order."""
        (rank,) = self.ranks
        for name, axis in {communicator_of(node): axis_of(node) for node in all_calls(program)}.items():
            if name is not None and axis is not None and name not in self.groups:
                made = [(members, dist.new_group(members)) for members in self.mesh.groups(axis)]
                self.groups[name] = next(group for members, group in made if rank in members)

    def name_groups(self) -> None:
        """Register the groups under their communicators' names: another step of this process may be of another mesh."""
        for name, group in self.groups.items():
            register_axis_group(name, group)

    def all_locals(self, local: Mapping[int, Tensor]) -> list[Tensor]:
        """The local tensors of all ranks, by rank; every rank must call it."""
        (mine,) = local.values()
        if not self.distributed:
            return [mine]
        found = [torch.empty_like(mine) for _ in range(self.mesh.world_size)]
        dist.all_gather(found, mine.contiguous())
        return found

    def send(self, local: Mapping[int, Tensor], source: int, to: Collection[int]) -> None:
        """Give some ranks the local tensor of another, in place; every rank must call it."""
        ((rank, mine),) = local.items()
        sent = mine.detach().clone().reshape(-1).view(torch.uint8)  # of any dtype
        dist.broadcast(sent, source)
        if rank in to:
            mine.detach().copy_(sent.view(mine.dtype).reshape(mine.shape))
