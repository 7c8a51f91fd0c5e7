"""Check that padding holds its recorded value, recomputed from the rules node by node, after `shard`.

    %y = mul(%x, %w)       padding of x holds 0: so does y's
    %z = add(%y, 0.01)     0.01: an operator that sums z needs a mask, which sets padding to the value the rule needs
    %w = where(%valid, %z, 0)

A gradient's padding is always zero: derivatives are multiplied by the incoming gradient. A gradient that a custom
function returns need not be zero there, so it must be masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from passes.check.placements import axes_of, local_operands, origin_of, trace_back
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec
from passes.ops.reshard import RESHARD_OPS
from passes.rules import Rule, rule_of
from passes.sharding.atoms import Atoms, refine
from passes.trace.functions import function_of

Finding = tuple[fx.Node | None, str]
MASK = torch.ops.aten.where.ScalarOther


def check_padding(global_program: ir.Program, local: ir.Program) -> Iterator[Finding]:
    """Yield local nodes whose padding may hold another value than the recorded one, or than their operator needs."""
    origins = {node.name: node for node in global_program.graph.nodes}
    for node in local.calls():
        origin = origins.get(ir.stands_for(node))
        recorded = ir.spec(node)
        if origin is None or recorded is None:
            continue
        path, sources = trace_back(node)
        versions = [source for source in sources if ir.stands_for(source) == origin.name]
        if versions:
            yield from check_conversion(node, versions[0], path, local.mesh)
        elif not function_of(origin_of(origin)[0]):
            yield from check_operator(node, *origin_of(origin), local.mesh)
    for node, output in zip(local.results(), local.outputs, strict=True):
        spec = ir.spec(node)
        if output.kind == "gradient" and output.spec.padded(local.mesh) and (spec is None or spec.fill != 0):
            yield node, f"is a gradient whose padding may hold {fill_text(spec)}; it must be 0"


def fill_text(spec: Spec | None) -> str:
    """Return the padding value as text; `anything` if it is unknown."""
    return "anything" if spec is None or spec.fill is None else f"{spec.fill:g}"


def check_conversion(node: fx.Node, source: fx.Node, path: Sequence[fx.Node], mesh: Mesh) -> Iterator[Finding]:
    """Check that a conversion keeps the padding value or pads with zeros."""
    before, after = ir.spec(source), ir.spec(node)
    if before is None or after is None or after.fill is None or not after.padded(mesh) or not before.padded(mesh):
        return
    if after.fill != before.fill and not (after.fill == 0 and any(map(is_cut, path))):
        yield node, f"has padding {fill_text(after)}, its source has {fill_text(before)}"


def is_cut(node: fx.Node) -> bool:
    """Return True if an operator gives shards: their new padding is zero."""
    return node.target in RESHARD_OPS and RESHARD_OPS[node.target].gives == "shard"


def check_operator(node: fx.Node, op: fx.Node, index: int, mesh: Mesh) -> Iterator[Finding]:
    """Check that the operands' padding is as the rule needs it, and the result's as the rule makes it."""
    rule, operands = rule_of(op), local_operands(node, op)
    specs = [spec for operand in operands or () if (spec := ir.spec(operand)) is not None]
    if operands is None or len(specs) < len(operands):
        return
    atoms = refine(rule, [spec.dims for spec in specs], range(len(specs)), mesh)
    axes = axes_of(atoms, specs, mesh)
    if isinstance(axes, str):
        return  # reported by `placements`
    factors = {name: Factor(size, axes.get(name, ()), order=atoms.order) for name, size in atoms.sizes.items()}
    padded = {name for name, factor in factors.items() if factor.padded(mesh)}
    for i, (operand, spec) in enumerate(zip(operands, specs)):
        needed = needed_fill(i, rule, atoms, padded, spec, mesh)
        if needed is not None and spec.fill != needed and not is_mask_with(operand, needed):
            yield node, f"needs {needed:g} in the padding of operand {i}, %{operand.name}; it may be {fill_text(spec)}"
    recorded = ir.spec(node)
    fill = result_fill(rule, atoms, index, padded, [rule.pad_safe.get(i, spec.fill) for i, spec in enumerate(specs)])
    if recorded and recorded.padded(mesh) and recorded.fill is not None and fill != recorded.fill:
        yield node, f"is recorded with padding {fill_text(recorded)}, its rule gives {fill}"


def is_mask_with(node: fx.Node, number: float) -> bool:
    """Return True if a node is a mask that sets padding (or, for infinity, padding along some dims) to a number."""
    return node.target is MASK and (node.args[2] == number or math.isinf(number))


def needed_fill(i: int, rule: Rule, atoms: Atoms, padded: set[str], spec: Spec, mesh: Mesh) -> float | None:
    """Return the number that an operator needs in the padding of operand `i`, if any."""
    if i in rule.pad_safe and spec.padded(mesh):
        return rule.pad_safe[i]
    folded = {name for dim in atoms.operands[i] for name in dim if atoms.origin(name) in rule.reduced}
    return None if padded.isdisjoint(folded) else rule.pad_in


def result_fill(rule: Rule, atoms: Atoms, index: int, padded: set[str], fills: Sequence[float | None]) -> float | None:
    """Return the padding value of a result; None if it differs between padded dims."""
    if rule.uniform:
        return rule.pad_out([])
    numbers = set()
    for name in (name for dim in atoms.results[index] for name in dim if name in padded):
        has_dim = [any(name in dim for dim in operand) for operand in atoms.operands]
        numbers.add(rule.pad_out([fill if has_it else math.nan for has_it, fill in zip(has_dim, fills)]))
    return numbers.pop() if len(numbers) == 1 else None
