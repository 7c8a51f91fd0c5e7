"""Export the model of a request and its loss on one device: the graphs that all programs are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from compiler_trainer.capture.capture import capture
from compiler_trainer.capture.modes import places_that_ask
from compiler_trainer.config.errors import UserError
from compiler_trainer.pipeline import DTYPES
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.captured import Captured
from compiler_trainer.step.look_ups import check_look_ups
from passes.ir import ir
from passes.ir.folds import Folding
from passes.ir.operators import is_random
from passes.sharding.normalize import drops_entries, is_dropout


class Exported(NamedTuple):
    """The captured model for training, and for evaluation if that may be a different program."""

    training: Captured
    evaluation: Captured | None = None


def export(request: CompileRequest, folding: Folding | None, tell: Callable[[str], None]) -> Exported:
    """Return the graphs of a request; `folding` decides which layers may stand for others.

    Raises UserError if the model cannot be captured, a look-up exceeds its table, or a metric of training is no scalar.
    """
    tell("capture")
    with places_that_ask() as places:
        training = export_once(request, folding)
    if not request.evaluate or not (places or depends_on_mode(training.program)):
        return Exported(training)
    with evaluating(request.model):
        evaluation = export_once(request, folding)
    return Exported(training) if is_same(training.program, evaluation.program) else Exported(training, evaluation)


def is_same(a: ir.Program, b: ir.Program) -> bool:
    """Return True if two programs have the same operators, inputs and outputs, under the same names."""
    return str(a.graph) == str(b.graph) and a.inputs == b.inputs and a.outputs == b.outputs


def export_once(request: CompileRequest, folding: Folding | None) -> Captured:
    """Return the graph of the model in its current mode."""
    mesh = request.mesh.without("pp")
    program, ctx = capture(
        request.model,
        request.loss_fn,
        request.batch,
        request.device,
        DTYPES[request.passes.cast.param_dtype],
        folding and folding.among(mesh.world_size),
    )
    check_look_ups(program, request.entry_bounds)
    row_outputs = [pair for pair in zip(program.results(), program.outputs) if pair[1].kind == "rows"]
    if request.train and row_outputs:
        value, name = ir.example(row_outputs[0][0]), row_outputs[0][1].name
        problem = f"returns {tuple(value.shape)} {value.dtype} as the metric {name!r}; it must be a scalar tensor"
        raise UserError("loss_fn", problem)
    return Captured(replace(program, mesh=mesh), ctx)


def depends_on_mode(program: ir.Program) -> bool:
    """Return True if eval mode may give a different program: the forward draws random numbers or changes buffers."""
    changes = any(o.kind == "buffer" for o in program.outputs)
    return changes or any(drops_entries(n) or is_random(n) and not is_dropout(n) for n in program.calls())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside the block, and restore each module's own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
