"""From a plain model to the programs that every rank runs, not yet lowered: what training and a dry run share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from compiler_trainer.capture.capture import LossFn, capture
from compiler_trainer.config.cluster import AUTO_CLUSTER, ClusterConfig
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import OptimConfig, PassesConfig
from compiler_trainer.pipeline import DTYPES, Passes, Pipeline, Staged, build_pipeline
from compiler_trainer.step.given import EVALUATE, Captured, Reporter
from passes.check.numeric import Results, telling
from passes.check.runner import Observer, PassRecord, run_passes
from passes.pipeline.assign import Assign
from passes.pipeline.cut import cut, cut_gathers, cut_update
from passes.pipeline.tasks import own_name
from passes.program import ir
from passes.program.backward_slice import backward_slice, cone_of
from passes.program.mesh import Mesh
from passes.program.operators import is_random
from passes.program.stages import Stage
from passes.sharding.normalize import drops, is_dropout
from passes.sharding.place import Place

LOOK_UPS = (torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor)
POSITIONS = "positions"  # the entry of a batch that counts tokens from the beginning of their document


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
            if program.fold or seen:
                seen.append((program, record))
            elif self.observe:
                self.observe(program, record)

        first = replace(self, observe=self.observe and observe, report=Reporter())
        try:
            found, report = first.all_of(evaluate), first.report
        except ir.LayersDiffer as error:
            seen.clear()
            again = replace(self, pipeline=replace(self.pipeline, folding=None), report=Reporter())
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
        return self.train(forward) | (self.evaluate(single, forward) if evaluate else {})

    def capture(self) -> Captured:
        """The model and its loss on one device."""
        self.tell("capture")
        dtype, folding = DTYPES[self.options.cast.param_dtype], self.pipeline.folding
        if folding is not None:
            folding = folding.among(self.mesh.world_size)
        program, ctx = self.report.time(
            "capture", lambda: capture(self.model, self.loss_fn, self.batch, self.device, dtype, folding)
        )
        check_look_ups(program, self.below)
        if self.pipeline.trains and (of_rows := [o for o in program.outputs if o.kind == "rows"]):
            what = f"returns {of_rows[0].spec.shape} as the metric {of_rows[0].name!r}; it must be a scalar tensor"
            raise UserError("loss_fn", what)
        return on_mesh(Captured(program, ctx), self.mesh)

    def run(self, stage: str, steps: Passes, given: Captured, known: Results | None = None) -> Captured:
        """A program, of which some results are known, after some passes; raises UserError where one refuses."""
        if given.program.fold and any(step.gives is Stage.SEGMENTED for step in steps):
            steps = (*steps, self.pipeline.unfold)
        how: dict[str, Any] = {"verify": self.options.verify, "observe": self.observe, "inputs": self.whole}
        how |= {"known": known, "tell": lambda what: self.tell(f"{stage}: {what}")}
        began = time.perf_counter()
        try:
            program, records = run_passes(stage, steps, given.program, given.ctx, **how)
        except ir.Refused as error:
            raise UserError(*str(error).split(": ", 1)) from error
        self.report.add(stage, records, time.perf_counter() - began)
        self.results[stage] = records[-1].results if records else {}
        return Captured(program, given.ctx)

    def train(self, forward: Captured) -> dict[str, Captured]:
        """The programs of a training step, by name, from the forward that every rank runs."""
        known = self.results["forward"]  # gradients, too, that the forward of a custom function does not tell
        if not self.pipeline.trains:
            return {}
        if self.pipeline.joint:
            forward = self.run("joint", self.pipeline.joint, forward, known)
            known = self.results["joint"]
        if self.pipeline.staged is not None:
            return self.tasks(self.pipeline.staged, forward)
        return {name: self.run(name, steps, forward, known) for name, steps in self.pipeline.train.items()}

    def tasks(self, staged: Staged, joint: Captured) -> dict[str, Captured]:
        """The programs that are cut from one: all tasks of all pipeline stages, or gathers of parameters apart."""
        whole = self.run("microbatch", staged.whole, joint).program
        if staged.table is None:
            update = self.run("update", staged.update(0), joint).program
            found = cut_gathers(whole) | {"apply": update}
        else:
            tasks = cut(whole, staged.table.is_split, staged.gathers)
            for rank in range(staged.table.ranks):
                tasks |= cut_update(self.run(f"update{rank}", staged.update(rank), joint).program, rank)
            found = {str(task): program for task, program in tasks.items()}
        return {name: self.run(name, staged.finish, Captured(each, joint.ctx)) for name, each in found.items()}

    def evaluate(self, single: Captured, forward: Captured) -> dict[str, Captured]:
        """The program of evaluation, or those of its stages: the forward, captured anew where eval mode has another.

        It reads what training stores, where that lies.
        """
        if depends_on_mode(single.program):
            steps = over_same_state(self.pipeline.forward, forward.program)
            with evaluating(self.model):
                forward = self.run("forward_eval", steps, self.capture())
        if self.pipeline.staged is None or self.pipeline.staged.table is None:
            return {EVALUATE: self.run(EVALUATE, self.pipeline.evaluate, forward)}
        parts = {f"{EVALUATE}.{task}": each for task, each in cut(without_unread(forward.program)).items()}
        return {n: self.run(n, self.pipeline.evaluate, Captured(each, forward.ctx)) for n, each in parts.items()}


def without_unread(program: ir.Program) -> ir.Program:
    """The program without buffers that it does not read: training has them, of the stage that changes them."""
    program = program.copy()
    ends = list(zip(program.placeholders(), program.inputs, strict=True))
    unread = [node for node, given in ends if given.kind == "buffer" and not node.users]
    for node in unread:
        program.graph.erase_node(node)
    return replace(program, inputs=tuple(given for node, given in ends if node not in unread))


def over_same_state(steps: Passes, program: ir.Program) -> Passes:
    """Passes by which a program has state where another one changes it: on which ranks, of which stages."""
    held = [i for i in program.inputs if i.kind == "parameter"]
    places, stages = {i.name: replace(i.spec, replicate=()) for i in held}, {own_name(i.name): i.stages for i in held}
    for node, output in zip(program.results(), program.outputs, strict=True):
        stage = ir.pipeline_stage(node) if output.kind == "buffer" else None
        stages |= {} if stage is None else {output.name: (stage,)}
    stored = {Place: places, Assign: stages}
    return tuple(replace(s, stored=stored[type(s)]) if type(s) in stored else s for s in steps)  # type: ignore


def on_mesh(given: Captured, mesh: Mesh) -> Captured:
    """A program for the ranks of a mesh, as yet the same as for one device."""
    return Captured(replace(given.program, mesh=mesh), given.ctx)


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
    small = backward_slice(program, ends, [entries])
    return int(small.module(*(known[i.name] for i in small.inputs))[0].max())


def depends_on_mode(program: ir.Program) -> bool:
    """Whether the captured forward may be another in eval mode: it draws random numbers, or changes buffers."""
    changes = any(o.kind == "buffer" for o in program.outputs)
    return changes or any(drops(n) or is_random(n) and not is_dropout(n) for n in program.calls())


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


def compilation(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Mapping[str, Tensor],
    mesh: Mesh,
    options: PassesConfig,
    update: OptimConfig,
    device: torch.device,
    microbatches: int,
    skip_nonfinite: bool,
    train: bool,
    full: Mapping[str, Tensor] | None,
    seed: int,
    stages: int = 1,
    cluster: ClusterConfig = AUTO_CLUSTER,
) -> Compilation:
    """A model on its way through the passes that options ask for; `full` values are there to verify numbers with."""
    masters = {name: parameter.dtype for name, parameter in model.named_parameters()}
    pipeline = build_pipeline(options, update, masters, microbatches, skip_nonfinite, stages, cluster)
    pipeline = pipeline if train else replace(pipeline, train={}, trains=False)
    whole = None
    if full is not None:
        scalars = {"lr": torch.tensor(update.lr), "seed": torch.tensor(seed)}
        whole = {name: telling(value) for name, value in full.items()} | dict(batch) | scalars
    return Compilation(model, loss_fn, batch, mesh, pipeline, options, device, whole=whole)
