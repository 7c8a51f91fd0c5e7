"""In a program whose results are wrong, the first node that is: values in order, gradients on the way back."""

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
from passes.program import ir
from passes.program.operators import is_mutable
from passes.program.printer import format_node
from passes.program.stages import Stage


@dataclass(frozen=True)
class Fault:
    """The node at fault, the node before the pass that it should agree with, how they differ, and more to know."""

    node: fx.Node
    origin: fx.Node | None
    message: str
    mismatch: Mismatch | None = None
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stages:
    """What was recorded of the program `after` a pass, of the one `before`, and of the last `whole` (global) one."""

    whole: Recorded
    before: Recorded
    after: Recorded
    tolerance: float


# ---- values --------------------------------------------------------------------------------------


def first_wrong_value(stages: Stages, ends: Iterable[fx.Node]) -> Fault | None:
    """The first node that leads to one of `ends` and differs from what it should agree with."""
    leading = ancestors(ends)
    for node in stages.after.program.graph.nodes:
        if node in leading and node.name in stages.after.values:
            origin, pairs = counterpart(node, stages)
            if origin is not None and (found := beyond(pairs, node, stages)):
                origin = named(stages.before, node.name) or origin if is_local(stages.before) else origin
                details = tuple(operand_lines(node, origin, stages))
                return Fault(node, origin, "its value is wrong, those of all nodes before it are right", found, details)
    return None


def counterpart(node: fx.Node, stages: Stages) -> tuple[fx.Node | None, list[Pair]]:
    """The node that `node` should agree with, and both values' entries."""
    after, before, whole = stages.after, stages.before, stages.whole
    spec = spec_of(node, after)
    if is_local(after) and (name := ir.stands_for(node)) in whole.values:
        expected = whole.values[name][0]
        if tuple(expected.shape) != spec.shape:
            return None, []
        return named(whole, name), list(against_whole(expected, after.values[node.name], spec, after.mesh))
    if is_local(after) != is_local(before) or node.name not in before.values:
        return None, []
    expected_parts, found = before.values[node.name], after.values[node.name]
    if expected_parts[0].shape != found[0].shape or tuple(found[0].shape) != spec.local_shape(after.mesh):
        return None, []
    return named(before, node.name), list(against_local(expected_parts, found, spec, after.mesh))


def beyond(pairs: Sequence[Pair], node: fx.Node, stages: Stages) -> Mismatch | None:
    """The largest difference if it is more than rounding explains, by the largest entry of the value and its operands.

    A value that is zero but for rounding is measured against what it was computed from.
    """
    operands = [n for n in node.all_input_nodes if n.name in stages.after.values and is_float(n)]
    sources = [largest(part) for n in operands for part in stages.after.values[n.name]]
    scale = max([largest(expected) for _, _, expected, _ in pairs] + [NEGLIGIBLE * s for s in sources], default=0.0)
    found = largest_difference(pairs)
    return found if found.difference > stages.tolerance * (scale or 1.0) else None


def operand_lines(node: fx.Node, origin: fx.Node, stages: Stages) -> Iterator[str]:
    """What the node is computed from, and, where the pass changed that, what it was before."""
    if format_node(origin) != format_node(node):
        yield f"was      {format_node(origin)}"
        yield f"is       {format_node(node)}"
    for operand in node.all_input_nodes:
        yield f"operand  {format_node(operand)}" if operand.op != "placeholder" else f"operand  %{operand.name} (input)"


# ---- gradients -----------------------------------------------------------------------------------


def first_wrong_gradient(stages: Stages) -> Fault | None:
    """Going back from the loss, the first value of the whole program whose gradient the local program has wrong."""
    after, whole = stages.after, stages.whole
    for origin in reversed(list(whole.program.graph.nodes)):
        roots = [n for n in roots_of(origin.name, after.program) if n.name in after.gradients]
        if origin.name not in whole.gradients or not roots:
            continue
        expected = whole.gradients[origin.name][0]
        total = torch.zeros_like(expected)
        for node in roots:
            total += total_gradient(after.gradients[node.name], spec_of(node, after), after.mesh)
        if found := beyond([(0, (0,) * total.dim(), expected, total)], origin, stages):
            details = tuple(f"used in  {format_node(user)}" for node in roots for user in node.users)
            message = "its gradient is wrong, those of all values after it are right"
            return Fault(roots[0], origin, message, found, details)
    return None


def roots_of(name: str, program: ir.Program) -> list[fx.Node]:
    """Nodes that stand for a value without being made from another one that does."""
    standing = [node for node in program.graph.nodes if ir.stands_for(node) == name]
    return [node for node in standing if not any(other in standing for other in origins(node, name))]


def origins(node: fx.Node, name: str) -> Iterator[fx.Node]:
    """Nodes that a conversion of the value `name` goes back to, as far as they stand for nothing else."""
    for operand in node.all_input_nodes:
        if ir.stands_for(operand) in ("", name):
            yield operand
            yield from origins(operand, name)


# ---- infinities ----------------------------------------------------------------------------------


def first_not_finite(recorded: Recorded, ends: Iterable[fx.Node]) -> Fault | None:
    """Where NaN, else an infinity, first comes of finite operands on the way to `ends`; constants may be infinite."""
    leading = ancestors(ends)
    seen = [n for n in recorded.program.graph.nodes if n in leading and n.name in recorded.values]
    for what, is_bad in (("an infinity", torch.isinf), ("NaN", torch.isnan)):
        for node in seen:
            if holds(recorded.values[node.name], is_bad) and not is_given(node, recorded, is_bad):
                if what == "NaN" or leads_to_nan(node, recorded):
                    return Fault(node, None, f"yields {what} from operands that have none")
    return None


def holds(parts: Sequence[Tensor], is_bad: Callable[[Tensor], Tensor]) -> bool:
    """Whether any rank's part has such an entry."""
    return any(bool(is_bad(part).any()) for part in parts)


def is_given(node: fx.Node, recorded: Recorded, is_bad: Callable[[Tensor], Tensor]) -> bool:
    """Whether an operand, or a constant that the operator is called with, has such an entry already."""
    constants = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
    operands = [n for n in node.all_input_nodes if n.name in recorded.values]
    return any(not math.isfinite(c) for c in constants) or any(holds(recorded.values[n.name], is_bad) for n in operands)


def leads_to_nan(node: fx.Node, recorded: Recorded) -> bool:
    """Whether a result that depends on the node is NaN, or is itself infinite."""
    results = [n for n in recorded.program.results() if isinstance(n, fx.Node) and n.name in recorded.values]
    lost = [n for n in results if holds(recorded.values[n.name], lambda x: ~torch.isfinite(x))]
    return node in ancestors(lost)


def first_gradient_not_finite(recorded: Recorded) -> Fault | None:
    """Going back from the loss, the first value whose gradient is infinite or NaN."""
    for node in reversed(list(recorded.program.graph.nodes)):
        if holds(recorded.gradients.get(node.name, ()), lambda x: ~torch.isfinite(x)):
            details = tuple(f"used in  {format_node(user)}" for user in node.users)
            return Fault(node, None, "its gradient is not finite, those of all values after it are", None, details)
    return None


# ---- the graph -----------------------------------------------------------------------------------


def ancestors(ends: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that lead to `ends`, these included; what writes into an input leads to it."""
    found: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
            stack += [u for u in node.users if node.op == "placeholder" and is_mutable(u) and u.args[0] is node]
    return found


def is_local(recorded: Recorded) -> bool:
    """Whether the program is that of one rank."""
    return recorded.program.stage >= Stage.LOCAL


def named(recorded: Recorded, name: str) -> fx.Node | None:
    """The node of that name."""
    return next((node for node in recorded.program.graph.nodes if node.name == name), None)


def is_float(node: fx.Node) -> bool:
    """Whether the node computes one tensor of floating point."""
    return ir.is_tensor(node) and ir.example(node).is_floating_point()
