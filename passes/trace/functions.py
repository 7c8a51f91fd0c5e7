"""Operators that stand for bodies: custom autograd functions, and local operators defined for one program.

    y = fn::Quantize_0(x, w)        one operator a call in the captured graph
becomes, once placed (`passes/sharding/custom.py`),
    y, *saved = local::Quantize_0(x, all_gather(w))     and, in the joint graph, both bodies inlined

A body that communicates (a ring of attention) is inlined only in the finished program: until then it is one operator,
which remat keeps or repeats as one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.torch_private import OpOverload
from passes.trace.editor import Editor, inline, layout, own_memory, replace_by


@dataclass(frozen=True)
class Function:
    """A call of a custom function, closed over its constants.

    `forward(*tensors)` returns `results` tensors and then the saved ones; `backward(*tensors, *all outputs of forward,
    *gradients of results)` returns a gradient or None for each tensor.
    """

    name: str
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    results: int


@dataclass(frozen=True)
class LocalFunction:
    """The local body of an operator of a local program; `communicates` is True if the body does.

    An operator that is another way to compute a value has a `meaning`: the operators that it replaced.
    """

    body: Callable[..., Any]
    communicates: bool = False
    meaning: Callable[..., Any] | None = None


# By name, because an operator may appear as either of two objects. PyTorch registers operators for a whole process;
# no two programs share one.
_operators: dict[str, Function | LocalFunction] = {}
_program = 0  # number of the last captured program, whose namespaces have it: `fn7` and `local7`
_numbers = itertools.count()  # of operators within one captured program


def restart() -> None:
    """Begin with another program: its operators are numbered from 0 again, in new namespaces.

    So a program prints the same however many came before it: namespaces are printed without their number.
    """
    global _program, _numbers
    _program, _numbers = _program + 1, itertools.count()


def function_of(node: fx.Node) -> Function | None:
    """Return the custom function that a node of a captured graph calls, or None."""
    return entry if isinstance(entry := _registered(node), Function) else None


def body_of(node: fx.Node) -> Callable[..., Any] | None:
    """Return the local body that a node of a local program stands for, or None."""
    return entry.body if isinstance(entry := _registered(node), LocalFunction) else None


def _registered(node: fx.Node) -> Function | LocalFunction | None:
    return _operators.get(node.target.name()) if isinstance(node.target, OpOverload) else None


def remember(
    op: Any, body: Callable[..., Any], communicates: bool = False, meaning: Callable[..., Any] | None = None
) -> None:
    """Register an operator of a local program as standing for a body of local operators.

    Args:
        op: the operator, an OpOverload.
        body: a function of its arguments that computes it by local operators.
        communicates: True if the body has collectives.
        meaning: a function of its arguments that computes the same value in the usual way, for the verifier.
    """
    _operators[op.name()] = LocalFunction(body, communicates, meaning)


def communicates(node: fx.Node) -> bool:
    """Return True if a node of a local program stands for a body that communicates."""
    return isinstance(entry := _registered(node), LocalFunction) and entry.communicates


def meaning_of(node: fx.Node) -> Callable[..., Any] | None:
    """Return the meaning of a node of a local program that is another way to compute a value."""
    return entry.meaning if isinstance(entry := _registered(node), LocalFunction) else None


def record(op: Any, function: Function) -> None:
    """Register an operator of a captured graph as a call of the function."""
    _operators[op.name()] = function


def define(namespace: str, name: str, body: Callable[..., Any], tensors: int, results: int) -> Any:
    """Define an operator that takes `tensors` tensors and returns a tuple of `results` tensors."""
    arguments = ", ".join(f"Tensor t{i}" for i in range(tensors))
    returns = ", ".join(["Tensor"] * results)
    space, unique = f"{namespace}{_program}", f"{name}_{next(_numbers)}"
    op = torch.library.custom_op(
        f"{space}::{unique}", _fresh(body), mutates_args=(), schema=f"({arguments}) -> ({returns})"
    )
    op.register_fake(_shapes(body))
    return getattr(getattr(torch.ops, space), unique).default


def _fresh(body: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a body so that it never returns its operands' memory, nor one tensor twice: operators must not."""

    def run(*tensors: Tensor) -> Any:
        out = tuple(t.clone(memory_format=torch.contiguous_format) for t in body(*tensors))
        return out if len(out) > 1 else out[0]

    return run


def _shapes(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fake kernel for `_fresh(body)`; it runs the body once for each layout of operands."""
    answers: dict[Any, list[tuple[torch.Size, torch.dtype, torch.device]]] = {}

    def run(*tensors: Tensor) -> Any:
        key = tuple(map(layout, tensors))
        if key not in answers:
            answers[key] = [(t.shape, t.dtype, t.device) for t in body(*tensors)]
        out = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in answers[key])
        return out if len(out) > 1 else out[0]

    return run


def inline_functions(program: ir.Program, ctx: ir.Context, but: Callable[[fx.Node], bool]) -> None:
    """Inline the bodies of local functions, except those with `but(node)`, each traced once; changes the graph."""
    for node in list(program.calls()):
        body = body_of(node)
        if body is not None and not but(node):
            own_memory(inline(node, results_of(body), ctx, alike=True), ctx)


def as_meant(program: ir.Program, ctx: ir.Context) -> ir.Program:
    """Replace operators that have a meaning by it; return the same program if there are none."""
    if not any(map(meaning_of, program.calls())):
        return program
    program = program.copy()
    edit = Editor(ctx, program.graph)
    for node in [node for node in program.calls() if meaning_of(node)]:
        meaning: Any = meaning_of(node)
        results = edit.moved_to(node, node).trace(meaning, *node.args, key=node.target)
        replace_by(node, results if len(results) > 1 else results[0])
    return program


def results_of(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body with results laid out as its operator's: contiguous, a tuple only if there are several."""

    def run(*tensors: Tensor) -> Any:
        contiguous = tuple(t.contiguous() for t in body(*tensors))
        return contiguous if len(contiguous) > 1 else contiguous[0]

    return run
