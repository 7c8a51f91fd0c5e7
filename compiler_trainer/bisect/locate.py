"""The first wrong node of a program: values are compared in order, gradients on the way back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from compiler_trainer.bisect.values import (
    NEGLIGIBLE,
    Mismatch,
    Pair,
    Recorded,
    against_local,
    against_whole,
    largest,
    largest_difference,
    spec_of,
    total_gradient,
)
from passes.ir import ir
from passes.ir.operators import is_mutable
from passes.ir.printer import format_node
from passes.ir.slices import reach
from passes.ir.stages import Stage


@dataclass(frozen=True)
class Fault:
    """The node at fault, the node before the pass that it should agree with, their difference, and details."""

    node: fx.Node
    origin: fx.Node | None
    message: str
    mismatch: Mismatch | None = None
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stages:
    """The recorded programs `after` and `before` a pass, and the last `whole` (global) one."""

    whole: Recorded
    before: Recorded
    after: Recorded
    tolerance: float


# ---- values --------------------------------------------------------------------------------------


def first_wrong_value(stages: Stages, ends: Iterable[fx.Node]) -> Fault | None:
    """Return the first node that leads to one of `ends` and differs from its counterpart."""
    leading = ancestors(ends)
    for node in stages.after.program.graph.nodes:
        if node in leading and node.name in stages.after.values:
            origin, pairs = counterpart(node, stages)
            if origin is not None and (mismatch := beyond(pairs, node, stages)):
                origin = named(stages.before, node.name) or origin if is_local(stages.before) else origin
                details = tuple(operand_lines(node, origin, stages))
                return Fault(
                    node, origin, "its value is wrong, those of all nodes before it are right", mismatch, details
                )
    return None


def counterpart(node: fx.Node, stages: Stages) -> tuple[fx.Node | None, list[Pair]]:
    """Return the node that `node` should agree with, and pairs of their entries."""
    after, before, whole = stages.after, stages.before, stages.whole
    spec = spec_of(node, after)
    if is_local(after) and (name := ir.stands_for(node)) in whole.values:
        expected = whole.values[name][0]
        if tuple(expected.shape) != spec.shape:
            return None, []
        return named(whole, name), list(against_whole(expected, after.values[node.name], spec, after.mesh))
    if is_local(after) != is_local(before) or node.name not in before.values:
        return None, []
    expected_parts, parts = before.values[node.name], after.values[node.name]
    if expected_parts[0].shape != parts[0].shape or tuple(parts[0].shape) != spec.local_shape(after.mesh):
        return None, []
    return named(before, node.name), list(against_local(expected_parts, parts, spec, after.mesh))


def beyond(pairs: Sequence[Pair], node: fx.Node, stages: Stages) -> Mismatch | None:
    """Return the largest difference if it exceeds rounding, relative to the largest entry of value and operands.

    A value that is zero up to rounding is measured against its operands.
    """
    operands = [n for n in node.all_input_nodes if n.name in stages.after.values and is_float(n)]
    sources = [largest(part) for n in operands for part in stages.after.values[n.name]]
    scale = max([largest(expected) for _, _, expected, _ in pairs] + [NEGLIGIBLE * s for s in sources], default=0.0)
    worst = largest_difference(pairs)
    return worst if worst.difference > stages.tolerance * (scale or 1.0) else None


def operand_lines(node: fx.Node, origin: fx.Node, stages: Stages) -> Iterator[str]:
    """Yield the operands of the node and, if the pass changed its call, the call before and after."""
    if format_node(origin) != format_node(node):
        yield f"was      {format_node(origin)}"
        yield f"is       {format_node(node)}"
    for operand in node.all_input_nodes:
        yield f"operand  {format_node(operand)}" if operand.op != "placeholder" else f"operand  %{operand.name} (input)"


# ---- gradients -----------------------------------------------------------------------------------


def first_wrong_gradient(stages: Stages) -> Fault | None:
    """Return the first value of the global program, on the way back from the loss, whose local gradient is wrong."""
    after, whole = stages.after, stages.whole
    for origin in reversed(list(whole.program.graph.nodes)):
        roots = [n for n in roots_of(origin.name, after.program) if n.name in after.gradients]
        if origin.name not in whole.gradients or not roots:
            continue
        expected = whole.gradients[origin.name][0]
        total = torch.zeros_like(expected)
        for node in roots:
            total += total_gradient(after.gradients[node.name], spec_of(node, after), after.mesh)
        if mismatch := beyond([(0, (0,) * total.dim(), expected, total)], origin, stages):
            details = tuple(f"used in  {format_node(user)}" for node in roots for user in node.users)
            message = "its gradient is wrong, those of all values after it are right"
            return Fault(roots[0], origin, message, mismatch, details)
    return None


def roots_of(name: str, program: ir.Program) -> list[fx.Node]:
    """Return the nodes that stand for a value and are not made from another node that does."""
    standing = [node for node in program.graph.nodes if ir.stands_for(node) == name]
    return [node for node in standing if not any(other in standing for other in origins(node, name))]


def origins(node: fx.Node, name: str) -> Iterator[fx.Node]:
    """Yield the nodes that a conversion of the value `name` comes from, as far as they stand for no other value."""
    for operand in node.all_input_nodes:
        if ir.stands_for(operand) in ("", name):
            yield operand
            yield from origins(operand, name)


# ---- infinities ----------------------------------------------------------------------------------


def first_not_finite(recorded: Recorded, ends: Iterable[fx.Node]) -> Fault | None:
    """Return the first node on the way to `ends` that makes NaN, or otherwise an infinity, from finite operands.

    Constants may be infinite.
    """
    leading = ancestors(ends)
    recorded_nodes = [n for n in recorded.program.graph.nodes if n in leading and n.name in recorded.values]
    for name, is_bad in (("an infinity", torch.isinf), ("NaN", torch.isnan)):
        for node in recorded_nodes:
            if holds(recorded.values[node.name], is_bad) and not is_given(node, recorded, is_bad):
                if name == "NaN" or leads_to_nan(node, recorded):
                    return Fault(node, None, f"yields {name} from operands that have none")
    return None


def holds(parts: Sequence[Tensor], is_bad: Callable[[Tensor], Tensor]) -> bool:
    """Return True if any rank's part has a bad entry."""
    return any(bool(is_bad(part).any()) for part in parts)


def is_given(node: fx.Node, recorded: Recorded, is_bad: Callable[[Tensor], Tensor]) -> bool:
    """Return True if an operand or a constant argument already has a bad entry."""
    constants = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
    operands = [n for n in node.all_input_nodes if n.name in recorded.values]
    return any(not math.isfinite(c) for c in constants) or any(holds(recorded.values[n.name], is_bad) for n in operands)


def leads_to_nan(node: fx.Node, recorded: Recorded) -> bool:
    """Return True if a result that depends on the node is infinite or NaN."""
    results = [n for n in recorded.program.results() if isinstance(n, fx.Node) and n.name in recorded.values]
    not_finite = [n for n in results if holds(recorded.values[n.name], lambda x: ~torch.isfinite(x))]
    return node in ancestors(not_finite)


def first_gradient_not_finite(recorded: Recorded) -> Fault | None:
    """Return the first value, on the way back from the loss, whose gradient is infinite or NaN."""
    for node in reversed(list(recorded.program.graph.nodes)):
        if holds(recorded.gradients.get(node.name, ()), lambda x: ~torch.isfinite(x)):
            details = tuple(f"used in  {format_node(user)}" for user in node.users)
            return Fault(node, None, "its gradient is not finite, those of all values after it are", None, details)
    return None


# ---- the graph -----------------------------------------------------------------------------------


def ancestors(ends: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that lead to `ends`, including `ends`; a node that writes into an input leads to it."""

    def operands_and_writers(node: fx.Node) -> list[fx.Node]:
        writers = [u for u in node.users if node.op == "placeholder" and is_mutable(u) and u.args[0] is node]
        return [*node.all_input_nodes, *writers]

    return set(reach(ends, operands_and_writers))


def is_local(recorded: Recorded) -> bool:
    """Return True if the program is that of one rank."""
    return recorded.program.stage >= Stage.LOCAL


def named(recorded: Recorded, name: str) -> fx.Node | None:
    """Return the node of a name; None if there is none."""
    return next((node for node in recorded.program.graph.nodes if node.name == name), None)


def is_float(node: fx.Node) -> bool:
    """Return True if the node's value is a floating-point tensor."""
    return ir.is_tensor(node) and ir.example(node).is_floating_point()
