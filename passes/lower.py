"""Turn a finished program into something to call: Inductor's kernels, or an interpreter that names what fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.communication.overlap import products_to_wait_for
from passes.program import ir
from passes.program.rewrite import trace
from passes.program.torch_private import compile_inner, inductor_decompositions, keep_after

Executable = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


class NamingInterpreter(fx.Interpreter):
    """Runs a graph node by node; an error names the node, its source line and its operands' shapes."""

    def run_node(self, node: fx.Node) -> Any:
        """One operator."""
        try:
            return super().run_node(node)
        except Exception as error:
            shapes = [tuple(ir.example(n).shape) for n in node.all_input_nodes if ir.is_tensor(n)]
            message = f"{node.target} on {shapes}: {type(error).__name__}: {error}"
            raise ir.CompileError("eager", node, message) from error


def lower_eager(program: ir.Program, ctx: ir.Context) -> Executable:
    """The program interpreted operator by operator."""
    interpreter = NamingInterpreter(program.module)

    def run(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(interpreter.run(*values, enable_io_processing=False))

    return run


def decompose(program: ir.Program, ctx: ir.Context) -> fx.GraphModule:
    """The program in the operators that Inductor takes, one flat graph of placeholders and a tuple."""
    interpreter = fx.Interpreter(program.module)
    values = [ir.example(n) for n in program.placeholders()]
    with torch.no_grad():
        return trace(
            lambda *v: tuple(interpreter.run(*v, enable_io_processing=False)),
            values,
            ctx,
            inductor_decompositions(),
            pre_dispatch=False,
        )


def lower_inductor(program: ir.Program, ctx: ir.Context) -> Executable:
    """The program compiled by Inductor (C++ on CPU, Triton on CUDA)."""
    module = decompose(program, ctx)
    # fusion moves a wait to where the first operator of the kernel that needs it stood; with nothing beside it, it may
    keep_after(module.graph, products_to_wait_for(module.graph))
    compiled = compile_inner(
        module, [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"], ctx.fake_mode
    )
    return lambda values: tuple(compiled(list(values)))


BACKENDS = {"eager": lower_eager, "inductor": lower_inductor}
