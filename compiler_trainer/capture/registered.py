"""Operators with a gradient of their own (`torch.library.register_autograd`) as custom functions.

    %y = my::swish(%x, 1.5)     becomes     %y = fn::swish_0(%x)

The body of the forward is the operator, that of the backward what its author registered. Both are then placed by rules:
differentiated as it stands in a rank's program, the operator would be given terms of gradients, and those of padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from passes.program import functions, ir
from passes.program.operators import name_of
from passes.program.torch_private import OpOverload, has_autograd_kernel
from passes.rules import is_ours
from passes.sharding.experts import PRODUCTS


def as_functions(program: ir.Program) -> None:
    """Put a custom function in place of each call of such an operator; changes the graph."""
    for node in list(program.calls()):
        if not isinstance(node.target, OpOverload) or is_known(node) or not has_autograd_kernel(node.target):
            continue
        function, values = function_of_call(node), [ir.value(n) for n in operands_of(node)]
        made = ir.value(node) if isinstance(ir.value(node), (tuple, list)) else [ir.value(node)]
        if not all(isinstance(value, Tensor) for value in (*values, *made)) or not has_gradient(function, values):
            continue
        op = functions.define("fn", function.name, function.forward, len(values), function.results)
        functions.record(op, function)
        node.args, node.kwargs, node.target = tuple(operands_of(node)), {}, op
    program.module.recompile()


def is_known(node: fx.Node) -> bool:
    """Whether a node's operator has a gradient that the passes know: PyTorch's, or a product of experts' rows."""
    return is_ours(node) or name_of(node) in PRODUCTS


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments, as often as they occur, in order."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def function_of_call(node: fx.Node) -> functions.Function:
    """The call as a function of its tensors; its gradient is that which is registered."""
    operator, arguments, count = node.target, (node.args, node.kwargs), len(operands_of(node))

    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        supply = iter(given)
        args, kwargs = fx.map_arg(arguments, lambda _: next(supply))
        found = operator(*args, **kwargs)  # type: ignore[operator]
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)

    def backward(*given: Tensor) -> tuple[Tensor | None, ...]:
        arriving = given[count + (len(given) - count) // 2 :]
        operands = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in given[:count]]
        asked = [i for i, x in enumerate(operands) if x.requires_grad]
        with torch.enable_grad():  # what is called again is dropped, unless its gradient reads its result
            pairs = [(y, g) for y, g in zip(forward(*operands), arriving) if y.requires_grad]
            ends, gradients = zip(*pairs) if pairs else ((), ())
            found = torch.autograd.grad(ends, [operands[i] for i in asked], gradients, allow_unused=True)
        return tuple(dict(zip(asked, found)).get(i) for i in range(count))

    value = ir.value(node)
    results = len(value) if isinstance(value, (tuple, list)) else 1
    return functions.Function(operator._opname, forward, backward, results)  # type: ignore[union-attr]


def has_gradient(function: functions.Function, values: Sequence[Tensor]) -> bool:
    """Whether the operator of a function on fake operands has a gradient: its author may have registered none."""
    try:
        made = function.forward(*values)
        return any(g is not None for g in function.backward(*values, *made, *made))
    except RuntimeError:  # of autograd: what needs the gradient says so, with its line, when the step is differentiated
        return False
