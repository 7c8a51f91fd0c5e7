"""Find the pass and the node at which a run goes wrong.

The model, its loss and one batch go through the pipeline pass by pass, in fp64 unless `passes.cast` says otherwise.
After each pass the program is run, all ranks in this process, and held to the one before it. The first pass after
which results differ, become infinite, or cannot be computed is at fault; of its program the first node is that whose
value is wrong while all before it are right, or, if only gradients are wrong, the first on the way back. What is left
is cut to the smallest program that still shows it, and written as a script that exits with 1 until that is mended.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from compiler_trainer.bisect import locate
from compiler_trainer.bisect.locate import Fault, Stages
from compiler_trainer.bisect.piece import Piece
from compiler_trainer.bisect.shrink import Source, closed, everything, smallest
from compiler_trainer.bisect.values import Mismatch, Recorded, nodes_of, record, spec_of, total_gradient, whole_value
from compiler_trainer.capture.capture import capture
from compiler_trainer.config.device import passes_on
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import MeshConfig, OptimConfig, PassesConfig
from compiler_trainer.pipeline import DTYPES, FORWARD, Pipeline, build_pipeline
from compiler_trainer.request import CompileRequest, LossFn
from passes.check.composed import verify_composed
from passes.check.numeric import Results, coarsest, compare
from passes.check.runner import apply_pass
from passes.check.verify import neighbours, verify_spec
from passes.program import ir
from passes.program.mesh import Mesh, MeshError
from passes.program.spec import Spec
from passes.program.stages import Stage

Kind = Literal["crash", "differs", "illegal", "not finite"]
GIB = 2**30
# What is held at most, measured on decoders of 3 to 20 million parameters with AdamW, on 1 to 4 ranks, to a fifth:
HELD, UPDATED = 20, 80  # times the values of the captured program, and times the trained parameters on each rank


@dataclass(frozen=True)
class Finding:
    """What went wrong: after which pass of which program, at which node, in what way, and a piece that shows it.

    `node` is of the program that the pass left (of the one it was given, if it left none); `origin` is the node
    of the program before, or of the whole one, that it should agree with.
    """

    kind: Kind
    program: str
    pass_name: str
    message: str
    node: fx.Node | None = None
    origin: fx.Node | None = None
    mismatch: Mismatch | None = None
    details: tuple[str, ...] = ()
    piece: Piece | None = None

    def __str__(self) -> str:
        lines = [f"{self.kind}: pass {self.pass_name} of program {self.program}: {self.message}"]
        if self.node is not None:
            place = " ".join(filter(None, (ir.source(self.node), ir.module_path(self.node), ir.phase(self.node))))
            lines.append(f"at       %{self.node.name} ({place})")
        lines += [f"from     %{self.origin.name} of the program before"] if self.origin else []
        lines += [f"where    {self.mismatch}"] if self.mismatch else []
        lines += [*self.details, *([neighbours(self.node)] if self.node is not None else [])]
        return "\n".join(lines)


def bisect(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Mapping[str, Tensor],
    *,
    mesh: Mapping[str, int] | MeshConfig | None = None,
    passes: Mapping[str, Any] | PassesConfig | Pipeline | None = None,
    optim: Mapping[str, Any] | OptimConfig | None = None,
    microbatches: int = 1,
    seed: int = 0,
    tell: Callable[[str], None] = lambda what: None,
) -> Finding | None:
    """The first pass and node at which numbers change, become infinite or cannot be computed; None if nowhere.

    Everything is run as given: use a model of float64 and a small batch. `passes` may be options, or a pipeline of
    one's own. `tell` is called with what it needs, and with each pass that begins. Raises UserError where the input is
    refused.
    """
    update = optim if isinstance(optim, OptimConfig) else build(OptimConfig, dict(optim or {}), "optim")
    part = {key: value[: len(value) // microbatches] for key, value in batch.items()}
    dtype = None
    if isinstance(passes, Pipeline):
        pipeline = passes
    else:
        options = passes if isinstance(passes, PassesConfig) else build(PassesConfig, dict(passes or {}), "passes")
        options = passes_on(options, on_gpu=False)
        request = CompileRequest(
            model=model, loss_fn=loss_fn, batch=part, passes=options, optim=update, microbatches=microbatches
        )
        dtype, pipeline = DTYPES[options.cast.param_dtype], build_pipeline(request)
    sizes = dataclasses.asdict(mesh) if isinstance(mesh, MeshConfig) else dict(mesh or {})
    if sizes.get("pp", 1) > 1:
        what = f"is {sizes['pp']}, and bisect follows one program from pass to pass; set mesh.pp=1"
        raise UserError("mesh.pp", what)
    if pipeline.is_cut:
        what = "bisect follows one program from pass to pass; set it to microbatch"
        raise UserError("passes.accumulate.gather", what)
    if any(step.name == "batch_overlap" for step in pipeline[FORWARD].passes):
        raise UserError("passes.communication.batch_overlap", "bisect follows one microbatch; set it to 1")
    program, ctx = capture(model, loss_fn, part, torch.device("cpu"), dtype)
    try:
        program = dataclasses.replace(program, mesh=Mesh.of(sizes))
    except MeshError as error:
        raise UserError(error.option, error.problem) from error
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    scalars = {"lr": torch.tensor(update.lr), "seed": torch.tensor(seed)}
    held = "every value of all ranks, before and after a pass"
    tell(f"needs about {needed_bytes(program) / GIB:,.2f} GiB: {held} (measured on 3 to 20 million parameters)")
    return Search(ctx, {**state, **part, **scalars}, tell).through(program, pipeline)


def needed_bytes(program: ir.Program) -> float:
    """About how much memory is taken where a captured program goes through the passes of a training step."""
    sizes = {node: ir.example(node).nbytes for node in program.graph.nodes if ir.is_tensor(node)}
    trained = sum(sizes[n] for n, i in zip(program.placeholders(), program.inputs) if i.kind == "parameter")
    return HELD * sum(sizes.values()) + UPDATED * trained * program.mesh.world_size


class Search:
    """Runs a program through passes, one at a time, until one is at fault."""

    def __init__(self, ctx: ir.Context, inputs: Mapping[str, Tensor], tell: Callable[[str], None]):
        self.ctx, self.inputs, self.tell = ctx, inputs, tell

    def through(self, program: ir.Program, pipeline: Pipeline) -> Finding | None:
        """The first fault of the forward passes and of those of each training program."""
        branches = {FORWARD: pipeline[FORWARD].passes} | pipeline.training()
        number, last = itertools.count(1), 1 + sum(map(len, branches.values()))
        self.tell(f"{next(number)} of {last}: capture")
        captured = self.start(program)
        if isinstance(captured, Finding):
            return captured
        start = whole = captured
        results = captured.results
        for name, steps in branches.items():
            current, held = start, results
            for step in steps:
                self.tell(f"{next(number)} of {last}: {name}, {step.name}")
                found = self.apply(name, step, current, whole, held)
                if isinstance(found, Finding):
                    return found
                current, held = found, (found.results if found.program.has_backward else held | found.results)
                whole = whole if current.program.stage >= Stage.LOCAL else current
            if name == "forward":
                start, results = current, held
        return None

    def start(self, program: ir.Program) -> Recorded | Finding:
        """The captured program's own numbers, which have to be finite."""
        captured = record(program, self.ctx, self.inputs)
        lost = [result for result in captured.results.values() if not result.value.isfinite().all()]
        if not lost:
            return captured
        ends = [end for end in program.results() if isinstance(end, fx.Node)]
        fault = locate.first_not_finite(captured, ends) or locate.first_gradient_not_finite(captured)
        message = "the model on one device, before any pass, gives no finite numbers"
        return self.finding("not finite", ("forward", "capture"), message, fault, None)

    def apply(
        self, name: str, step: ir.Pass, before: Recorded, whole: Recorded, results: Results
    ) -> Recorded | Finding:
        """What a pass leaves, run; or what is wrong with it."""
        stage = (name, step.name)
        kind: Literal["crash", "illegal"] = "crash"
        try:
            program, _ = apply_pass(step, before.program, self.ctx)
            program = verify_composed(step.name, before.program, program)
            after = record(program, self.ctx, self.inputs)
            stages = Stages(whole, before, after, max(coarsest(before.program), coarsest(program)) ** 0.5)
            if wrong := wrong_results(step.name, results, after.results, stages.tolerance):
                return self.locate(stage, step, stages, wrong, source_of(before, program, self.inputs))
            kind = "illegal"
            verify_spec(program, self.ctx, pass_name=step.name)
        except ir.Refused as error:
            raise UserError(error.pass_name, error.located) from error
        except ir.CompileError as error:
            return self.refused(kind, stage, step, error, source_of(before, None, self.inputs))
        return after

    def refused(
        self,
        kind: Literal["crash", "illegal"],
        stage: tuple[str, str],
        step: ir.Pass,
        error: ir.CompileError,
        source: Source,
    ) -> Finding:
        """What raised, in the pass, in what it left or in the verifier, and the smallest piece that does."""
        known = {node.name: node for node in source.program.calls()}
        at = error.node or raised_at(error.__cause__ or error)
        node = known.get(at.name) or known.get(ir.stands_for(at)) if at is not None else None
        piece = smallest(source, step, kind, str(error), node, False) if node is not None else everything(source, step)
        message = str(error).partition("\n")[0]
        return Finding(kind, *stage, message, at, node, piece=piece if piece is not None and piece.kind else None)

    def locate(
        self, stage: tuple[str, str], step: ir.Pass, stages: Stages, wrong: dict[tuple[str, str], str], source: Source
    ) -> Finding:
        """The first wrong node, by values if any but gradients are wrong or gradients are nodes, and its piece."""
        program = stages.after.program
        has_backward = program.has_backward
        message = next(iter(wrong.values()))
        ends = [n for key in wrong if has_backward or key[0] != "gradient" for n in ends_of(program, *key)]
        if fault := locate.first_wrong_value(stages, ends):
            kind: Kind = "not finite" if lost_in(stages.after, fault.node) else "differs"
            return self.finding(kind, stage, message, fault, self.piece(source, step, fault, False))
        if not has_backward and (fault := locate.first_wrong_gradient(stages)):
            return self.finding("differs", stage, message, fault, self.piece(source, step, fault, True))
        if not stages.before.program.has_backward and (found := wrong_derivative(source, step)):
            fault = Fault(found[0], None, "its gradient in the joint graph is not its derivative")
            return self.finding("differs", stage, message, fault, found[1])
        fault = locate.first_not_finite(stages.after, ends)
        return self.finding("not finite" if fault else "differs", stage, message, fault, everything(source, step))

    def piece(self, source: Source, step: ir.Pass, fault: Fault, is_gradient: bool) -> Piece | None:
        """The smallest piece around the node from which the fault comes."""
        name = fault.origin.name if fault.origin is not None else fault.node.name
        nodes = {node.name: node for node in source.program.graph.nodes}
        around = nodes.get(fault.node.name if source.program.stage >= Stage.LOCAL else name)
        return smallest(source, step, "differs", "", around, is_gradient) if around is not None else None

    def finding(
        self, kind: Kind, stage: tuple[str, str], message: str, fault: Fault | None, piece: Piece | None
    ) -> Finding:
        """The finding of a fault, if its node is known."""
        if fault is None:
            return Finding(kind, *stage, message, piece=piece)
        details = (fault.message, *fault.details)
        return Finding(kind, *stage, message, fault.node, fault.origin, fault.mismatch, details, piece)


def wrong_results(pass_name: str, before: Results, after: Results, tolerance: float) -> dict[tuple[str, str], str]:
    """What is said of each result that differs by more than rounding explains, by kind and name."""
    wrong = {}
    for key in after:
        try:
            compare(pass_name, before, {key: after[key]}, tolerance)
        except ir.CompileError as error:
            wrong[key] = str(error).partition("\n")[0]
    return wrong


def ends_of(program: ir.Program, kind: str, name: str) -> list[fx.Node]:
    """The node that a result leaves by: what is returned, or the input that is written."""
    returned = zip(program.results(), program.outputs, strict=True)
    written = zip(program.placeholders(), program.inputs, strict=True)
    found = [node for node, output in returned if (output.kind, output.name) == (kind, name)]
    return found + [node for node, given in written if (given.kind, given.name) == (kind, name)]


def lost_in(recorded: Recorded, node: fx.Node) -> bool:
    """Whether a node yields an entry that is infinite or NaN."""
    return any(not value.isfinite().all() for value in recorded.values[node.name])


def wrong_derivative(source: Source, step: ir.Pass) -> tuple[fx.Node, Piece] | None:
    """Going back from the loss, the first operator that the pass differentiates wrongly, by itself."""
    for node in reversed(list(source.program.calls())):
        nodes = with_terms(node, source)
        leaves = {n for m in nodes for n in m.all_input_nodes if n not in nodes and locate.is_float(n)}
        piece = closed(source, step, nodes, leaves) if leaves else None
        if piece is not None and piece.kind == "differs":
            return node, piece
    return None


def with_terms(node: fx.Node, source: Source) -> list[fx.Node]:
    """The node, and before it what computes the terms of sums that it takes: a sum is no input, its terms would be."""
    nodes = [node]
    for operand in node.all_input_nodes:
        spec = source.specs.get(operand.name)
        if spec is not None and spec.partial and operand.op == "call_function":
            nodes = [*(n for n in with_terms(operand, source) if n not in nodes), *nodes]
    return nodes


def raised_at(error: BaseException) -> fx.Node | None:
    """The node in the hands of the innermost function that had one when an exception was raised."""
    found, frame = None, error.__traceback__
    while frame is not None:
        values = frame.tb_frame.f_locals
        nodes = [v for v in (values.get("node"), *values.values()) if isinstance(v, fx.Node)]
        found, frame = (nodes[0] if nodes else found), frame.tb_next
    return found


def source_of(recorded: Recorded, after: ir.Program | None, inputs: Mapping[str, Tensor]) -> Source:
    """Where pieces of a recorded program come from; its values are placed as the program `after` the pass has them."""
    nodes = [node for node in nodes_of(recorded) if recorded.program.stage < Stage.LOCAL or ir.spec(node)]
    wholes = {node.name: whole_value(node, recorded) for node in nodes}
    specs = {node.name: spec_of(node, recorded) for node in nodes}
    gradients = {
        node.name: total_gradient(recorded.gradients[node.name], specs[node.name], recorded.mesh)
        for node in nodes
        if node.name in recorded.gradients
    }
    if after is not None and recorded.program.stage < Stage.LOCAL:
        specs |= placed_in(after)
    return Source(recorded.program, wholes | dict(inputs), specs, gradients)


def placed_in(program: ir.Program) -> dict[str, Spec]:
    """How a local program places the values of the whole one, by name there: as first found complete, if ever."""
    found: dict[str, Spec] = {}
    for node in program.graph.nodes:
        name, spec = ir.stands_for(node), ir.spec(node)
        if name and spec is not None and (name not in found or (found[name].partial and not spec.partial)):
            found[name] = spec
    return found
