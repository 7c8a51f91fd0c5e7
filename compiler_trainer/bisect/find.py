"""Find the pass and the node at which a run goes wrong.

The model, its loss and one batch go through the pipeline pass by pass, in fp64 unless `passes.cast` says otherwise.
After each pass, the program runs with all ranks in this process and is compared with the program before. The first pass
after which results differ, become infinite, or cannot be computed is at fault. The node at fault is the first in its
program whose value is wrong although all values before are right or, if only gradients are wrong, the first on the way
back. The program is then cut to the smallest piece that still fails, and written as a script that exits with 1 until
the fault is fixed.
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
from compiler_trainer.bisect.shrink import Source, cut_piece, everything, smallest
from compiler_trainer.bisect.values import Mismatch, Recorded, nodes_of, record, spec_of, total_gradient, whole_value
from compiler_trainer.capture.capture import capture
from compiler_trainer.config.device import passes_on
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import MeshConfig, OptimConfig, PassesConfig
from compiler_trainer.pipeline import DTYPES, FORWARD, Pipeline, build_pipeline
from compiler_trainer.request import CompileRequest, LossFn
from compiler_trainer.step.captured import mesh_of, one_microbatch
from passes.check.composed import verify_composed
from passes.check.numeric import Results, coarsest, compare, run
from passes.check.runner import apply_pass
from passes.check.verify import neighbours, verify_spec
from passes.ir import ir
from passes.ir.spec import Spec
from passes.ir.stages import Stage

Kind = Literal["crash", "differs", "illegal", "not finite"]
GIB = 2**30
# Peak memory, measured on decoders of 3 to 20 million parameters with AdamW on 1 to 4 ranks, accurate to a fifth:
HELD, UPDATED = 20, 80  # x the values of the captured program, x the trained parameters on each rank


@dataclass(frozen=True)
class Finding:
    """A fault: the program and pass, the node, the kind of error, and a piece that reproduces it.

    `node` belongs to the program after the pass (or before it, if the pass raised). `origin` is the node of the program
    before, or of the last global one, that it should agree with.
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
    """Return the first pass and node at which numbers change, become infinite or cannot be computed, if any.

    Everything runs on the CPU in the given dtypes: use a float64 model and a small batch.

    Args:
        model: a module for one device.
        loss_fn: a function of (model, batch), as for `compile_step`.
        batch: a global batch.
        mesh: sizes of the axes; one rank by default. `pp` must be 1.
        passes: options of the group `passes`, or a pipeline of passes.
        optim: options of the group `optim`.
        microbatches: the number of parts into which the first dim of the batch is split.
        seed: the key of random operators.
        tell: a function that gets the memory needed, and the name of each pass that begins.

    Raises:
        UserError: the input is refused.
    """
    update = build(OptimConfig, optim or {}, "optim")
    parts = [one_microbatch(batch, microbatches, number) for number in range(microbatches)]
    dtype = None
    if isinstance(passes, Pipeline):
        pipeline = passes
    else:
        options = passes_on(build(PassesConfig, passes or {}, "passes"), on_gpu=False)
        request = CompileRequest(
            model=model, loss_fn=loss_fn, batch=parts[0], passes=options, optim=update, microbatches=microbatches
        )
        dtype, pipeline = DTYPES[options.cast.param_dtype], build_pipeline(request)
    job_mesh = mesh_of(mesh)
    if job_mesh["pp"] > 1:
        problem = f"is {job_mesh['pp']}, but bisect follows a single program from pass to pass; set mesh.pp=1"
        raise UserError("mesh.pp", problem)
    if pipeline.is_cut:
        problem = "bisect follows a single program from pass to pass; set it to microbatch"
        raise UserError("passes.accumulate.gather", problem)
    if any(step.name == "batch_overlap" for step in pipeline[FORWARD].passes):
        raise UserError("passes.communication.batch_overlap", "bisect follows one microbatch; set it to 1")
    program, ctx = capture(model, loss_fn, parts[0], torch.device("cpu"), dtype)
    program = dataclasses.replace(program, mesh=job_mesh)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    scalars = {"lr": torch.tensor(update.lr), "seed": torch.tensor(seed)}
    contents = "every value of all ranks, before and after a pass"
    tell(f"needs about {needed_bytes(program) / GIB:,.2f} GiB: {contents} (measured on 3 to 20 million parameters)")
    inputs = [{**state, **part, **scalars} for part in parts]
    number = next((n for n in range(1, microbatches) if not is_finite(run(program, ctx, inputs[n]))), 0)
    if microbatches > 1:
        tell(f"microbatch {number + 1} of {microbatches} is followed")
    return Search(ctx, inputs[number], tell).through(program, pipeline)


def is_finite(results: Results) -> bool:
    """Return True if no result has an infinite or NaN entry."""
    return all(bool(result.value.isfinite().all()) for result in results.values())


def needed_bytes(program: ir.Program) -> float:
    """Return the approximate memory needed to run a captured program through the passes of a training step."""
    sizes = {node: ir.example(node).nbytes for node in program.graph.nodes if ir.is_tensor(node)}
    trained = sum(sizes[n] for n, i in zip(program.placeholders(), program.inputs) if i.kind == "parameter")
    return HELD * sum(sizes.values()) + UPDATED * trained * program.mesh.world_size


class Search:
    """Runs a program through passes, one at a time, until one is at fault."""

    def __init__(self, ctx: ir.Context, inputs: Mapping[str, Tensor], tell: Callable[[str], None]):
        self.ctx, self.inputs, self.tell = ctx, inputs, tell

    def through(self, program: ir.Program, pipeline: Pipeline) -> Finding | None:
        """Return the first fault in the forward passes and in those of each training program."""
        branches = {FORWARD: pipeline[FORWARD].passes} | pipeline.training()
        number, last = itertools.count(1), 1 + sum(map(len, branches.values()))
        self.tell(f"{next(number)} of {last}: capture")
        captured = self.start(program)
        if isinstance(captured, Finding):
            return captured
        start = whole = captured
        results = captured.results
        for name, steps in branches.items():
            current, earlier_results = start, results
            for step in steps:
                self.tell(f"{next(number)} of {last}: {name}, {step.name}")
                outcome = self.apply(name, step, current, whole, earlier_results)
                if isinstance(outcome, Finding):
                    return outcome
                current, earlier_results = (
                    outcome,
                    (outcome.results if outcome.program.has_backward else earlier_results | outcome.results),
                )
                whole = whole if current.program.stage >= Stage.LOCAL else current
            if name == "forward":
                start, results = current, earlier_results
        return None

    def start(self, program: ir.Program) -> Recorded | Finding:
        """Return the recorded captured program; a finding if its results are not finite."""
        captured = record(program, self.ctx, self.inputs)
        if is_finite(captured.results):
            return captured
        ends = [end for end in program.results() if isinstance(end, fx.Node)]
        fault = locate.first_not_finite(captured, ends) or locate.first_gradient_not_finite(captured)
        message = "the model on one device, before any pass, gives no finite numbers"
        return self.finding("not finite", ("forward", "capture"), message, fault, None)

    def apply(
        self, name: str, step: ir.Pass, before: Recorded, whole: Recorded, results: Results
    ) -> Recorded | Finding:
        """Return the recorded program after a pass, or the finding of its fault."""
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
        """Return the finding of an exception in the pass, its program or the verifier, with the smallest piece."""
        nodes = {node.name: node for node in source.program.calls()}
        at = error.node or raised_at(error.__cause__ or error)
        node = nodes.get(at.name) or nodes.get(ir.stands_for(at)) if at is not None else None
        piece = smallest(source, step, kind, str(error), node, False) if node is not None else everything(source, step)
        message = str(error).partition("\n")[0]
        return Finding(kind, *stage, message, at, node, piece=piece if piece is not None and piece.kind else None)

    def locate(
        self, stage: tuple[str, str], step: ir.Pass, stages: Stages, wrong: dict[tuple[str, str], str], source: Source
    ) -> Finding:
        """Return the finding of the first wrong node, with its piece.

        It searches by values if results other than gradients are wrong or gradients are nodes, otherwise by gradients.
        """
        program = stages.after.program
        has_backward = program.has_backward
        message = next(iter(wrong.values()))
        ends = [n for key in wrong if has_backward or key[0] != "gradient" for n in ends_of(program, *key)]
        if fault := locate.first_wrong_value(stages, ends):
            kind: Kind = "not finite" if lost_in(stages.after, fault.node) else "differs"
            return self.finding(kind, stage, message, fault, self.piece(source, step, fault, False))
        if not has_backward and (fault := locate.first_wrong_gradient(stages)):
            return self.finding("differs", stage, message, fault, self.piece(source, step, fault, True))
        if not stages.before.program.has_backward and (derivative := wrong_derivative(source, step)):
            fault = Fault(derivative[0], None, "its gradient in the joint graph is not its derivative")
            return self.finding("differs", stage, message, fault, derivative[1])
        fault = locate.first_not_finite(stages.after, ends)
        return self.finding("not finite" if fault else "differs", stage, message, fault, everything(source, step))

    def piece(self, source: Source, step: ir.Pass, fault: Fault, is_gradient: bool) -> Piece | None:
        """Return the smallest piece around the node at fault."""
        name = fault.origin.name if fault.origin is not None else fault.node.name
        nodes = {node.name: node for node in source.program.graph.nodes}
        center = nodes.get(fault.node.name if source.program.stage >= Stage.LOCAL else name)
        return smallest(source, step, "differs", "", center, is_gradient) if center is not None else None

    def finding(
        self, kind: Kind, stage: tuple[str, str], message: str, fault: Fault | None, piece: Piece | None
    ) -> Finding:
        """Return the finding of a fault, with its node if known."""
        if fault is None:
            return Finding(kind, *stage, message, piece=piece)
        details = (fault.message, *fault.details)
        return Finding(kind, *stage, message, fault.node, fault.origin, fault.mismatch, details, piece)


def wrong_results(pass_name: str, before: Results, after: Results, tolerance: float) -> dict[tuple[str, str], str]:
    """Return the error text of each result that differs by more than rounding, by kind and name."""
    messages = {}
    for key in after:
        try:
            compare(pass_name, before, {key: after[key]}, tolerance)
        except ir.CompileError as error:
            messages[key] = str(error).partition("\n")[0]
    return messages


def ends_of(program: ir.Program, kind: str, name: str) -> list[fx.Node]:
    """Return the nodes of a result: the returned nodes, or the input that is written."""
    returned = zip(program.results(), program.outputs, strict=True)
    written = zip(program.placeholders(), program.inputs, strict=True)
    returned_nodes = [node for node, output in returned if (output.kind, output.name) == (kind, name)]
    return returned_nodes + [
        node for node, program_input in written if (program_input.kind, program_input.name) == (kind, name)
    ]


def lost_in(recorded: Recorded, node: fx.Node) -> bool:
    """Return True if a node's value has an infinite or NaN entry."""
    return any(not value.isfinite().all() for value in recorded.values[node.name])


def wrong_derivative(source: Source, step: ir.Pass) -> tuple[fx.Node, Piece] | None:
    """Return the first operator on the way back from the loss whose derivative the pass gets wrong, and its piece."""
    for node in reversed(list(source.program.calls())):
        nodes = with_terms(node, source)
        leaves = {n for m in nodes for n in m.all_input_nodes if n not in nodes and locate.is_float(n)}
        piece = cut_piece(source, step, nodes, leaves) if leaves else None
        if piece is not None and piece.kind == "differs":
            return node, piece
    return None


def with_terms(node: fx.Node, source: Source) -> list[fx.Node]:
    """Return the node, after the nodes that compute the terms of its partial operands, which cannot be inputs."""
    nodes = [node]
    for operand in node.all_input_nodes:
        spec = source.specs.get(operand.name)
        if spec is not None and spec.partial and operand.op == "call_function":
            nodes = [*(n for n in with_terms(operand, source) if n not in nodes), *nodes]
    return nodes


def raised_at(error: BaseException) -> fx.Node | None:
    """Return the node in the innermost function that had one when an exception was raised."""
    innermost, frame = None, error.__traceback__
    while frame is not None:
        values = frame.tb_frame.f_locals
        nodes = [v for v in (values.get("node"), *values.values()) if isinstance(v, fx.Node)]
        innermost, frame = (nodes[0] if nodes else innermost), frame.tb_next
    return innermost


def source_of(recorded: Recorded, after: ir.Program | None, inputs: Mapping[str, Tensor]) -> Source:
    """Return the source of pieces of a recorded program; values have the placements of the program `after` the pass."""
    nodes = [node for node in nodes_of(recorded) if recorded.program.stage < Stage.LOCAL or ir.spec(node)]
    full_values = {node.name: whole_value(node, recorded) for node in nodes}
    specs = {node.name: spec_of(node, recorded) for node in nodes}
    gradients = {
        node.name: total_gradient(recorded.gradients[node.name], specs[node.name], recorded.mesh)
        for node in nodes
        if node.name in recorded.gradients
    }
    if after is not None and recorded.program.stage < Stage.LOCAL:
        specs |= placed_in(after)
    return Source(recorded.program, full_values | dict(inputs), specs, gradients)


def placed_in(program: ir.Program) -> dict[str, Spec]:
    """Return the placements of global values in a local program, by name: the first complete one, if there is one."""
    specs: dict[str, Spec] = {}
    for node in program.graph.nodes:
        name, spec = ir.stands_for(node), ir.spec(node)
        if name and spec is not None and (name not in specs or (specs[name].partial and not spec.partial)):
            specs[name] = spec
    return specs
