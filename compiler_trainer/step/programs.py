"""From a plain model to the programs that every rank runs, not yet lowered: what training and a dry run share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn

from compiler_trainer.capture.capture import LossFn, capture
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import MeshConfig, PassesConfig
from compiler_trainer.pipeline import DTYPES, Passes, Pipeline
from passes.check.numeric import Results
from passes.check.runner import Observer, PassRecord, run_passes
from passes.lower.cudagraphs import breaks
from passes.program import ir
from passes.program.alone import alone, cone_of
from passes.program.mesh import Mesh
from passes.program.stages import Stage
from passes.sharding.normalize import draws, drops, is_dropout
from passes.sharding.place import Place

T = TypeVar("T")
LOOK_UPS = (torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor)
POSITIONS = "positions"  # the entry of a batch that counts tokens from the beginning of their document


class Captured(NamedTuple):
    """A program and the context its values live in."""

    program: ir.Program
    ctx: ir.Context


@dataclass
class Reporter:
    """Collects what every pass did and how long compilation took; `key` is what the programs are stored under.

    Programs that were read (`is_read`) were compiled by an earlier start.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    passes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    key: str = ""
    is_read: bool = False

    def add(self, stage: str, records: Iterable[PassRecord]) -> None:
        """Record the passes of one program."""
        for record in records:
            self.seconds[f"{stage}.{record.name}"] = record.seconds
            self.passes.append({"program": stage, **record.as_dict()})

    def time(self, name: str, work: Callable[[], T]) -> T:
        """Do something and record how long it took."""
        started = time.perf_counter()
        done = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        return done

    def finish(self) -> dict[str, Any]:
        """The report: seconds by pass, each pass's counts, notes, communication and memory, and notes on the whole."""
        seconds = {name: round(s, 4) for name, s in self.seconds.items()}
        stored = {"stored_as": self.key, "read": self.is_read}
        return {"seconds": seconds, "program": stored, "passes": self.passes, "notes": self.notes}


@dataclass(frozen=True)
class Compilation:
    """One model on its way through a pipeline; `batch` is one microbatch of global shapes.

    `whole` are the inputs on which `passes.verify=numeric` runs each program, `results` what that gave, by stage.
    Numbers of a batch's entries stay `below` some. `single` is the model on one device, where it is captured already.
    """

    model: nn.Module
    loss_fn: LossFn
    batch: Mapping[str, Tensor]
    mesh: Mesh
    pipeline: Pipeline
    options: PassesConfig
    device: torch.device
    observe: Observer | None = None
    tell: Callable[[str], None] = lambda what: None
    whole: Mapping[str, Tensor] | None = None
    below: Mapping[str, int] = field(default_factory=dict)
    single: Captured | None = None
    report: Reporter = field(default_factory=Reporter)
    results: dict[str, Results] = field(default_factory=dict)

    def programs(self, evaluate: bool) -> tuple[dict[str, Captured], Reporter]:
        """The programs of a training step, with that of evaluation if asked for, and the report.

        Where what passes made of a layer cannot be repeated, all is done again with every layer.
        """
        seen: list[tuple[ir.Program, PassRecord]] = []  # held back from the first program with layers left out

        def observe(program: ir.Program, record: PassRecord) -> None:
            if program.roll or seen:
                seen.append((program, record))
            elif self.observe:
                self.observe(program, record)

        first = replace(self, observe=self.observe and observe, report=Reporter())
        try:
            found, report = first.all_of(evaluate), first.report
        except ir.Uneven as error:
            seen.clear()
            again = replace(self, pipeline=replace(self.pipeline, rolling=None), report=Reporter())
            again.report.notes.append(f"no layer stands for others: {error}")
            found, report = again.all_of(evaluate), again.report
        finally:
            for stage in seen:
                self.observe(*stage)  # type: ignore[misc]
        return found, report

    def all_of(self, evaluate: bool) -> dict[str, Captured]:
        """The programs, each layer as the pipeline has it."""
        single = self.capture() if self.single is None else on_mesh(self.single, self.mesh)
        forward = self.run("forward", self.pipeline.forward, single)
        return self.train(forward) | ({"evaluate": self.evaluate(single, forward)} if evaluate else {})

    def capture(self) -> Captured:
        """The model and its loss on one device."""
        self.tell("capture")
        dtype = DTYPES[self.options.cast.param_dtype]
        program, ctx = self.report.time(
            "capture", lambda: capture(self.model, self.loss_fn, self.batch, self.device, dtype, self.pipeline.rolling)
        )
        check_look_ups(program, self.below)
        return on_mesh(Captured(program, ctx), self.mesh)

    def run(self, stage: str, steps: Passes, given: Captured, known: Results | None = None) -> Captured:
        """A program, of which some results are known, after some passes; raises UserError where one refuses."""
        if given.program.roll and any(step.gives is Stage.SEGMENTED for step in steps):
            steps = (*steps, self.pipeline.unroll)
        how: dict[str, Any] = {"verify": self.options.verify, "observe": self.observe, "inputs": self.whole}
        how |= {"known": known, "tell": lambda what: self.tell(f"{stage}: {what}")}
        try:
            program, records = run_passes(stage, steps, given.program, given.ctx, **how)
        except ir.Refused as error:
            raise UserError(*str(error).split(": ", 1)) from error
        self.report.add(stage, records)
        self.results[stage] = records[-1].results if records else {}
        return Captured(program, given.ctx)

    def train(self, forward: Captured) -> dict[str, Captured]:
        """The programs of a training step, by name, from the forward that every rank runs."""
        known = self.results["forward"]  # gradients, too, that the forward of a custom function does not tell
        return {name: self.run(name, steps, forward, known) for name, steps in self.pipeline.train.items()}

    def evaluate(self, single: Captured, forward: Captured) -> Captured:
        """The program of evaluation: the forward, captured anew where it is another in eval mode.

        It reads what training stores, where that lies.
        """
        if depends_on_mode(single.program):
            stored = {i.name: replace(i.spec, varying=()) for i in forward.program.inputs if i.kind == "parameter"}
            steps = (replace(s, stored=stored) if isinstance(s, Place) else s for s in self.pipeline.forward)
            with evaluating(self.model):
                forward = self.run("forward_eval", tuple(steps), self.capture())
        return self.run("evaluate", self.pipeline.evaluate, forward)


def on_mesh(given: Captured, mesh: Mesh) -> Captured:
    """A program for the ranks of a mesh, as yet the same as for one device."""
    return Captured(replace(given.program, mesh=mesh), given.ctx)


def check_recordable(programs: Mapping[str, Captured], compiled: bool = True) -> None:
    """Raises UserError naming each node, with its source line, that a CUDA graph cannot record."""
    found = [f"{name}: {what}" for name, (program, _) in programs.items() for what in breaks(program, compiled)]
    if found:
        raise UserError("lower.cudagraphs", f"cannot record {'; '.join(found)}")


def check_look_ups(program: ir.Program, below: Mapping[str, int]) -> None:
    """Raises UserError where an entry of the batch, or a position, is looked up in a table that is too short for it."""
    placeholders = list(zip(program.inputs, program.placeholders(), strict=True))
    bounds = {node: (i.name, below[i.name]) for i, node in placeholders if i.kind == "batch" and i.name in below}
    tables = {node for i, node in placeholders if i.kind in ("parameter", "buffer")}
    for node, table, entries in looked_up(program, tables):
        rows = ir.example(table).shape[0]
        name, bound = bounds.get(entries, ("", 0))
        if name and name != POSITIONS and bound > rows:
            found = f"{ir.source(node)} looks up in {rows} rows"
            raise UserError(f"batch[{name!r}]", f"has numbers below {bound}, which {found}; give the model as many")
        if (last := last_position(program, entries, below)) >= rows:
            length = ir.example(entries).shape[-1]
            fix = f"set train.seq_len={max(2, length - (last + 1 - rows))} or less, or give the model as many"
            what = f"rows of {length} tokens reach position {last}, and {ir.source(node)} looks up in {rows}"
            raise UserError("train.seq_len", f"{what}; {fix}")


def looked_up(program: ir.Program, tables: Set[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """(what looks up, the table, the numbers of its rows) of tables that a model stores."""
    for node in program.calls():
        if node.target in LOOK_UPS and node.args[0] in tables:
            table, entries = node.args[:2]
            numbers: Any = entries[0] if isinstance(entries, list | tuple) else entries  # aten.index takes one a dim
            if isinstance(numbers, fx.Node):
                yield node, table, numbers  # type: ignore[misc]


def last_position(program: ir.Program, entries: fx.Node, below: Mapping[str, int]) -> int:
    """The largest of numbers that are made of positions and constants alone; -1 where they are made of more."""
    ends = {node: i for node, i in zip(program.placeholders(), program.inputs)}
    given = [i for node, i in ends.items() if node in cone_of(entries, ends.keys())]
    known = {i.name: i.value for i in given if i.value is not None}
    if any(i.name == POSITIONS and i.kind == "batch" and POSITIONS in below for i in given):
        node = next(n for n, i in ends.items() if i.name == POSITIONS)
        shape, device = ir.example(node).shape, ir.example(node).device
        known[POSITIONS] = torch.arange(below[POSITIONS], device=device)[-shape[-1] :].expand(shape)
    if ir.example(entries).is_floating_point() or any(i.name not in known for i in given):
        return -1
    small = alone(program, ends, [entries])
    return int(small.module(*(known[i.name] for i in small.inputs))[0].max())


def depends_on_mode(program: ir.Program) -> bool:
    """Whether the captured forward may be another in eval mode: it draws random numbers, or changes buffers."""
    changes = any(o.kind == "buffer" for o in program.outputs)
    return changes or any(drops(n) or draws(n) and not is_dropout(n) for n in program.calls())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, each module's own mode restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def mesh_of(given: Mapping[str, int] | MeshConfig | None) -> Mesh:
    """The mesh of a configuration; raises UserError on an axis or a size that there is not."""
    sizes = dataclasses.asdict(given) if isinstance(given, MeshConfig) else dict(given or {})
    try:
        return Mesh.of(sizes)
    except ValueError as error:
        raise UserError(*str(error).split(": ", 1)) from error


def one_microbatch(batch: Mapping[str, Tensor], microbatches: int) -> dict[str, Tensor]:
    """The first rows of a batch: its shapes are those that are compiled."""
    if microbatches < 1:
        raise UserError("microbatches", f"is {microbatches}; must be at least 1")
    for key, value in batch.items():
        if value.shape[0] % microbatches:
            raise UserError(
                "microbatches", f"{microbatches} does not divide the {value.shape[0]} rows of batch[{key!r}]"
            )
    return {key: value[: value.shape[0] // microbatches] for key, value in batch.items()}
