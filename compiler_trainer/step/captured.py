"""The inputs and outputs of a compilation, without the passes, which a restart does not import."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import LowerConfig, MeshConfig
from compiler_trainer.step.effects import effects_of
from passes.ir import ir
from passes.ir.mesh import Mesh, MeshError
from passes.ir.task import Task
from passes.lower.host_reads import find_breaks
from passes.lower.offsets import overflows
from passes.lower.runs import describe_recordings

if TYPE_CHECKING:
    from passes.check.runner import PassRecord

T = TypeVar("T")


class Captured(NamedTuple):
    """A program and the context of its values."""

    program: ir.Program
    ctx: ir.Context


@dataclass
class Reporter:
    """A recorder of each pass and of compile times; `key` is the key under which the programs are stored.

    Programs that were read (`is_read`) were compiled by an earlier start.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    passes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    key: str = ""
    is_read: bool = False
    read_from: str = ""  # the folder of the stored programs

    def add(self, stage: str, records: Sequence[PassRecord], elapsed_s: float) -> None:
        """Record the passes of one program; the rest of its `elapsed_s` was spent on checks and dumps."""
        for record in records:
            self.seconds[f"{stage}.{record.name}"] = record.seconds
            self.passes.append({"program": stage, **record.as_dict()})
        checks_s = elapsed_s - sum(record.seconds for record in records)
        self.seconds["checks"] = self.seconds.get("checks", 0.0) + checks_s

    def restart(self, note: str) -> None:
        """Discard everything except the notes, and add a note."""
        self.seconds, self.passes = {}, []
        self.notes.append(note)

    def time(self, name: str, work: Callable[[], T]) -> T:
        """Call `work`, record its duration, and return its result."""
        started = time.perf_counter()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        return result

    def flops(self, program: str) -> int:
        """Return the FLOPs of a program after its last pass, or 0 if there is no such program."""
        record = [record for record in self.passes if record["program"] == program]
        return sum(record[-1]["accounting"]["flops"].values()) if record else 0

    def cost(self, task: Task) -> float:
        """Return the relative cost of a pipeline stage's task."""
        return 1.0 + self.flops(str(task))

    def finish(self) -> dict[str, Any]:
        """Return the report: seconds by pass, passes with their accounting, notes, remarks, effects, stored program."""
        seconds = {name: round(s, 4) for name, s in self.seconds.items()}
        program = {"stored_as": self.key, "read": self.is_read, "from": self.read_from}
        remarks = dict.fromkeys(remark for record in self.passes for remark in record["report"]["remarks"])
        effects = [dataclasses.asdict(effect) for effect in effects_of(self.passes)]
        report = {"passes": self.passes, "notes": self.notes, "remarks": [*remarks], "effects": effects}
        return {"seconds": seconds, "program": program, **report}


@dataclass(frozen=True)
class StepPrograms:
    """The finished programs of a step by name, not yet lowered, and the report of their compilation."""

    programs: dict[str, Captured]
    report: Reporter


def check_recordable(programs: Mapping[str, Captured], compiled: bool = True) -> None:
    """Raise UserError naming each node, with its source line, that a CUDA graph cannot record."""
    problems = [
        f"{name}: {problem}" for name, (program, _) in programs.items() for problem in find_breaks(program, compiled)
    ]
    if problems:
        fix = "lower.cudagraphs=auto records the parts around it"
        raise UserError("lower.cudagraphs", f"cannot record {'; '.join(problems)}; {fix}")


def check_offsets(programs: Mapping[str, Captured]) -> None:
    """Raise UserError naming the first call of CUDA programs whose indices exceed its kernel's limit."""
    for name, (program, _) in programs.items():
        for overflow in overflows(program):
            raise UserError(overflow.narrow.option, f"{name}: {overflow}. To fix it, {overflow.narrow.fix}")


def why_nothing_is_recorded(device: torch.device) -> str:
    """Return why no program can be recorded on a device, or an empty string."""
    return "" if device.type == "cuda" else f"the step runs on {device.type}"


def recorded(
    programs: Mapping[str, Captured], lower: LowerConfig, device: torch.device, interpreted: bool = False
) -> list[str]:
    """Return sentences on the parts of the training programs that are recorded as CUDA graphs, and why others are not.

    Raises UserError if everything must be recorded and something cannot.
    """
    if not lower.cudagraphs:
        return []
    training = {name: captured for name, captured in programs.items() if not captured.program.evaluates}
    compiled = lower.backend == "inductor"
    if lower.cudagraphs is True:
        check_recordable(training, compiled)
    if reason := "ranks in lockstep are interpreted" if interpreted else why_nothing_is_recorded(device):
        return [f"nothing is recorded: {reason}"]
    return describe_recordings({name: program for name, (program, _) in training.items()}, compiled)


def mesh_of(sizes: Mapping[str, int] | MeshConfig | None) -> Mesh:
    """Return the mesh of a configuration; raise UserError for an invalid axis or size."""
    sizes = dataclasses.asdict(sizes) if isinstance(sizes, MeshConfig) else dict(sizes or {})
    try:
        return Mesh.of(sizes)
    except MeshError as error:
        raise UserError(error.option, error.problem) from error


def one_microbatch(batch: Mapping[str, Tensor], microbatches: int, number: int = 0) -> dict[str, Tensor]:
    """Return a microbatch of a batch; the shapes of the first are compiled."""
    if microbatches < 1:
        raise UserError("microbatches", f"is {microbatches}; must be at least 1")
    first = next(iter(batch), "")
    for key, value in batch.items():
        if not value.dim():
            raise UserError(f"batch[{key!r}]", "is a scalar; give it an entry for each sequence")
        if microbatches > 1 and len(value) != len(batch[first]):
            problem = f"has {len(value)} rows and batch[{first!r}] {len(batch[first])}; a microbatch has parts of both"
            fix = "give each an entry for each sequence, make it a buffer of the model, or set microbatches=1"
            raise UserError(f"batch[{key!r}]", f"{problem}; {fix}")
        if value.shape[0] % microbatches:
            raise UserError(
                "microbatches", f"{microbatches} does not divide the {value.shape[0]} rows of batch[{key!r}]"
            )
    return {key: value.chunk(microbatches)[number] for key, value in batch.items()}
