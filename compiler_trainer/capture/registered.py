"""Turn operators with a registered gradient (`torch.library.register_autograd`) into custom functions.

    %y = my::swish(%x, 1.5)     becomes     %y = fn::swish_0(%x)

The forward body is the operator, the backward body what its author registered. Rules then place both. If the operator
were differentiated inside a rank's program instead, its backward would get terms of gradients, and those of padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from passes.idioms.experts import GROUPED_MATMULS
from passes.ir import ir
from passes.ir.operators import name_of
from passes.rules import is_ours
from passes.torch_private import OpOverload, has_autograd_kernel
from passes.trace import functions


def as_functions(program: ir.Program) -> None:
    """Replace each call of such an operator by a custom function; changes the graph."""
    for node in list(program.calls()):
        if not isinstance(node.target, OpOverload) or is_known(node) or not has_autograd_kernel(node.target):
            continue
        function, values = function_of_call(node), [ir.value(n) for n in operands_of(node)]
        outputs = ir.value(node) if isinstance(ir.value(node), (tuple, list)) else [ir.value(node)]
        if not all(isinstance(value, Tensor) for value in (*values, *outputs)) or not has_gradient(function, values):
            continue
        op = functions.define("fn", function.name, function.forward, len(values), function.results)
        functions.record(op, function)
        node.args, node.kwargs, node.target = tuple(operands_of(node)), {}, op
    program.module.recompile()


def is_known(node: fx.Node) -> bool:
    """Return True if passes know the gradient of a node's operator: PyTorch's, or a matmul of experts' rows."""
    return is_ours(node) or name_of(node) in GROUPED_MATMULS


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among a call's arguments, with repetitions, in order."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), nodes.append)
    return nodes


def function_of_call(node: fx.Node) -> functions.Function:
    """Return the call as a function of its tensors, with the registered gradient."""
    operator, arguments, count = node.target, (node.args, node.kwargs), len(operands_of(node))

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = iter(tensors)
        args, kwargs = fx.map_arg(arguments, lambda _: next(values))
        outputs = operator(*args, **kwargs)  # type: ignore[operator]
        return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)

    def backward(*tensors: Tensor) -> tuple[Tensor | None, ...]:
        arriving = tensors[count + (len(tensors) - count) // 2 :]
        operands = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors[:count]]
        differentiable = [i for i, x in enumerate(operands) if x.requires_grad]
        with torch.enable_grad():  # the repeated forward is dropped unless the gradient reads its result
            pairs = [(y, g) for y, g in zip(forward(*operands), arriving) if y.requires_grad]
            ends, gradients = zip(*pairs) if pairs else ((), ())
            operand_gradients = torch.autograd.grad(
                ends, [operands[i] for i in differentiable], gradients, allow_unused=True
            )
        return tuple(dict(zip(differentiable, operand_gradients)).get(i) for i in range(count))

    value = ir.value(node)
    results = len(value) if isinstance(value, (tuple, list)) else 1
    return functions.Function(operator._opname, forward, backward, results)  # type: ignore[union-attr]


def has_gradient(function: functions.Function, values: Sequence[Tensor]) -> bool:
    """Return True if a function's operator has a gradient on fake operands; its author may have registered none."""
    try:
        outputs = function.forward(*values)
        return any(g is not None for g in function.backward(*values, *outputs, *outputs))
    except RuntimeError:  # from autograd; differentiating the step reports it with its line if the gradient is needed
        return False
