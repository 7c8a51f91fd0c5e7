"""Turn a finished program into a callable: Inductor's kernels, or an interpreter that names the node that fails."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.bodies import calls_of, flatten
from passes.ir.stages import Stage
from passes.lower.calls import Around, Calls, Executable
from passes.lower.inductor import ALONE, Tell, Workers, compile_bodies, silent
from passes.lower.segment import Segment
from passes.trace.abstract_eval import laid_out


class NamingInterpreter(fx.Interpreter):
    """Runs a graph node by node, each operator within `around` its name.

    Raises CompileError with the node, its source line and its operands' shapes if an operator fails.
    """

    around: Around = nullcontext

    def __call__(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the results; keep no value until the next call."""
        try:
            with torch.no_grad():
                return tuple(self.run(*values, enable_io_processing=False))
        finally:
            self.args_iter, self.env = iter(()), {}

    def run_node(self, node: fx.Node) -> Any:
        """Run one operator."""
        try:
            with self.around(node.name):
                result = super().run_node(node)
            return laid_out(result, ir.value(node)) if node.op == "call_function" else result
        except Exception as error:
            shapes = [tuple(ir.example(n).shape) for n in node.all_input_nodes if ir.is_tensor(n)]
            message = f"{node.target} on {shapes}: {type(error).__name__}: {error}"
            raise ir.CompileError("eager", node, message) from error


def lower_eager(program: ir.Program, ctx: ir.Context, workers: Workers = ALONE, tell: Tell = silent) -> Executable:
    """Return an interpreter that runs the program operator by operator."""
    return NamingInterpreter(flatten(program).module)


def lower_inductor(program: ir.Program, ctx: ir.Context, workers: Workers = ALONE, tell: Tell = silent) -> Executable:
    """Compile the program's bodies with Inductor (C++ on CPU, Triton on CUDA), divided among the workers."""
    if program.stage is not Stage.SEGMENTED:
        program, _ = Segment(max_nodes=None)(program, ctx)
    return Calls(program, compile_bodies(list(calls_of(program)), ctx, workers, tell))


BACKENDS = {"eager": lower_eager, "inductor": lower_inductor}
