"""Check a local program against the rules: recompute placements, node by node, after `shard`.

A local node that stands for a node of the global program is one of two things:

    %y = linear(%x, %w)     the operator on placed operands: its rule gives the result's placement
    %z = psum(%y, "tp")     another placement of the same value: the reshard operators give it

The only code shared with the decision of placements is the operator's rule and the arithmetic of factors
(`sharding/atoms.py`). Faults in these are left to `numeric`, and so is the inside of operators that a rule builds (a
look-up in a sharded table).
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import fx

from passes.ir import ir
from passes.ir.mesh import DATA_AXES, Mesh
from passes.ir.operators import axis_of
from passes.ir.spec import REDUCTIONS, Dim, Factor, Spec
from passes.ops.reshard import RESHARD_OPS
from passes.ops.routed import IN_ANY_ORDER, groups
from passes.rules import Rule, rule_of, tensor_operands
from passes.sharding.atoms import Atoms, merge_dim, override_axes, place_by_rule, refine
from passes.trace.functions import function_of

Finding = tuple[fx.Node | None, str]

CAST = torch.ops.aten._to_copy.default
DETACH = torch.ops.aten.detach.default


def check_placements(global_program: ir.Program, local: ir.Program) -> Iterator[Finding]:
    """Yield local nodes whose recorded placement does not follow from their operands' and the operator's rule."""
    origins = {node.name: node for node in global_program.graph.nodes}
    versions: dict[str, list[Spec]] = collections.defaultdict(list)
    for node in local.graph.nodes:
        if (spec := ir.spec(node)) is not None:
            versions[ir.stands_for(node)].append(spec)
    differentiable = differentiable_nodes(global_program)
    for node in local.calls():
        origin = origins.get(ir.stands_for(node))
        recorded = ir.spec(node)
        if origin is None or recorded is None:
            continue
        path, sources = trace_back(node)
        names = {origin.name}
        if any(step.target in RESHARD_OPS for step in path):
            names.update(cast_operand(origin))
        earlier = [source for source in sources if ir.stands_for(source) in names]
        if earlier:
            before, after = (axes_of_rows(origin, version, local.mesh) for version in (earlier[0], node))
            if breaks_order(origin, before, after, local.mesh):
                yield node, f"is placed {recorded}: rows in a rank's own order are resharded from {ir.spec(earlier[0])}"
            yield from check_conversion(node, earlier[0], path, local.mesh)
        else:
            yield from check_application(node, origin, sources, versions, differentiable, local.mesh)


def cast_operand(node: fx.Node) -> tuple[str, ...]:
    """Return the name of a cast's operand, which may stand for the cast: a gather casts after it exchanges."""
    return (tensor_operands(node)[0].name,) if node.target is CAST else ()


def differentiable_nodes(program: ir.Program) -> set[fx.Node]:
    """Return the nodes, of a program with a loss, through which gradients of its parameters flow."""
    inputs = zip(program.placeholders(), program.inputs)
    nodes = {node for node, i in inputs if i.kind == "parameter" and any(o.kind == "loss" for o in program.outputs)}
    for node in program.calls():
        value = ir.value(node)
        has_gradient = isinstance(value, (tuple, list)) or ir.is_tensor(node) and ir.may_have_gradient(node)
        if has_gradient and node.target is not DETACH and not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
    return nodes


def breaks_order(origin: fx.Node, before: Set[str], after: Set[str], mesh: Mesh) -> bool:
    """Return True if rows that each rank sorted by itself are gathered or cut, or their groups resharded.

    They may be cut over an axis whose ranks always have the same rows.
    """
    may_cut = set(mesh.axes).difference(DATA_AXES, mesh.experts) if origin.target is not groups else set()
    return origin.target in IN_ANY_ORDER and not before <= after <= before | may_cut


def axes_of_rows(origin: fx.Node, node: fx.Node, mesh: Mesh) -> set[str]:
    """Return the mesh axes that shard rows: those of all dims for `groups`, otherwise those of the first dim."""
    spec = ir.spec(node)
    dims = spec.dims[: None if origin.target is groups else 1] if spec else ()
    return {axis for dim in dims for factor in dim for name in factor.axes for axis in mesh.over(name)}


def trace_back(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return (the nodes that compute it, in order, itself included; the nearest sources that stand for a node)."""
    path: list[fx.Node] = []
    sources: list[fx.Node] = []
    visited = {node}
    queue = [node]
    while queue:
        inner = queue.pop()
        path.append(inner)
        for operand in inner.all_input_nodes:
            if operand not in visited:
                visited.add(operand)
                (sources if ir.stands_for(operand) or operand.op == "placeholder" else queue).append(operand)
    return sorted(path), [source for source in sources if ir.stands_for(source)]


def origin_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Return (the operator of a global node, the index of the result that the node is)."""
    op, index = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
    assert isinstance(op, fx.Node) and isinstance(index, int)
    return op, index


# ---- an operator ---------------------------------------------------------------------------------------------


def check_application(
    node: fx.Node,
    origin: fx.Node,
    sources: list[fx.Node],
    versions: Mapping[str, list[Spec]],
    trained_nodes: Set[fx.Node],
    mesh: Mesh,
) -> Iterator[Finding]:
    """Check a result's record against its operator's rule; `versions` are the placements of each value."""
    op, index = origin_of(origin)
    if function_of(op):
        return  # its body is checked as a program of its own
    rule = rule_of(op)
    read: dict[str, list[Spec]] = collections.defaultdict(list)
    for source in sources:
        if (spec := ir.spec(source)) is not None:
            read[ir.stands_for(source)].append(spec)
    for operand in tensor_operands(op) if rule.emit else ():
        for inner_name in cast_operand(operand):
            read[operand.name] = read[operand.name] or read[inner_name]
    operands = [(operand.name, tuple(ir.example(operand).shape)) for operand in tensor_operands(op)]
    for name, _ in operands:
        if not read[name] and rule.emit is None:
            yield node, f"has no operand that stands for %{name}, an operand of %{op.name}"
            return
    # an emitted operator may use only the shape of an operand: then any placement of that operand is accepted,
    # and one without a placement is assumed to be placed as a result of its shape
    specs = [spec for spec in (ir.spec(node),) if spec is not None]
    choices = [read[name] or versions[name] or [s for s in specs if s.shape == shape] for name, shape in operands]
    local_nodes = local_operands(node, op)
    if local_nodes and len(local_nodes) == len(choices):  # each use of a value in several placements has its own
        pairs = zip(choices, map(ir.spec, local_nodes))
        choices = [[spec] if len(choice) > 1 and spec is not None else choice for choice, spec in pairs]
    trained = [i for i, operand in enumerate(tensor_operands(op)) if operand in trained_nodes]
    problems = [disagreement(node, rule, choice, index, trained, mesh) for choice in itertools.product(*choices)]
    if all(problems):
        yield node, problems[0] if problems else "has an operand without a placement"


def local_operands(node: fx.Node, op: fx.Node) -> list[fx.Node] | None:
    """Return the placed operands of the local operator that computes a result of `op`; None if its rule builds it."""
    call = node if op.target is node.target else node.args[0]
    if rule_of(op).emit is not None or not isinstance(call, fx.Node) or call.target is not op.target:
        return None
    return [nearest(operand) for operand in tensor_operands(call)]


def nearest(node: fx.Node) -> fx.Node:
    """Return the node, or the nearest before it with a placement: a kernel's layout copies have none."""
    while ir.spec(node) is None and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def disagreement(
    node: fx.Node, rule: Rule, specs: Sequence[Spec], index: int, graded: Sequence[int], mesh: Mesh
) -> str:
    """Return the reason why a rule does not give the node's record for operands placed as `specs`, or "".

    `graded` are the numbers of operands with a gradient.
    """
    if rule.uniform:
        return f"is partial, but {ir.spec(node)} has no terms" if ir.spec(node).partial else ""  # type: ignore[union-attr]
    operands, results = ", ".join(map(str, specs)), results_of(rule, specs, mesh)
    if isinstance(results, str):
        return f"runs on {operands}: {results}"
    for axis, i in itertools.product(mesh.axes, graded):
        differs = any(spec.state(axis) != "invariant" for spec in specs)
        if differs and specs[i].state(axis) == "invariant":
            return f"runs on {operands}: operand {i} is invariant over {axis}, its gradient lacks other ranks' terms"
    problem = difference(results[index], ir.spec(node), mesh)
    return problem and f"is placed {ir.spec(node)}, its rule gives {results[index]} for {operands}: {problem}"


def results_of(rule: Rule, specs: Sequence[Spec], mesh: Mesh) -> list[Spec] | str:
    """Return the placements that a rule gives its results, or the reason why it does not run on these operands."""
    atoms = refine(rule, [spec.dims for spec in specs], range(len(specs)), mesh)
    axes = axes_of(atoms, specs, mesh)
    if isinstance(axes, str):
        return axes
    kinds: list[dict[str, str]] = [{} for _ in atoms.results]
    for axis in mesh.axes:
        states = on_axis(axis, atoms, axes, specs, mesh)
        if isinstance(states, str):
            return states
        for kind, state in zip(kinds, states):
            kind[axis] = state
    return [build_spec(dims, atoms, axes, kind, mesh) for dims, kind in zip(atoms.results, kinds)]


def axes_of(atoms: Atoms, specs: Sequence[Spec], mesh: Mesh) -> dict[str, tuple[str, ...]] | str:
    """Return the axes that shard each atom, or the reason why operands disagree."""
    axes: dict[str, tuple[str, ...]] = {}
    for i, (dims, dim_factors, spec) in enumerate(zip(atoms.operands, atoms.factors, specs)):
        for names, factors, dim in zip(dims, dim_factors, spec.dims):
            if factors is None and any(factor.axes for factor in dim):
                return f"shards of operand {i} cut the factors {names}"
            whole = (Factor(atoms.sizes[name]) for name in names)  # whatever the factors of a whole dim
            for name, factor in zip(names, factors or whole):
                if axes.setdefault(name, factor.axes) != factor.axes and factor.size > 1:
                    return f"operand {i} has {name} over {factor.axes or 'none'}, another over {axes[name] or 'none'}"
    final = override_axes(axes, place_by_rule(atoms, mesh), mesh)
    for name, current in axes.items():
        if current != final[name] and atoms.sizes[name] > 1:
            return f"{name} is over {current or 'none'}, but the operator places it over {final[name] or 'none'}"
    return final


def on_axis(
    axis: str, atoms: Atoms, axes: dict[str, tuple[str, ...]], specs: Sequence[Spec], mesh: Mesh
) -> list[str] | str:
    """Return each result's state on an axis, or why the operator cannot run.

    States are `shard`, `sum`, `max`, `replicate` and `invariant`.
    """
    rule = atoms.rule
    sharding = [atom for atom, names in axes.items() if any(axis in mesh.over(name) for name in names)]
    placed_by_rule = place_by_rule(atoms, mesh)
    chosen = [atom for atom in sharding if atom not in placed_by_rule]
    terms = frozenset(i for i, spec in enumerate(specs) if spec.state(axis) == "partial")
    if len(chosen) > 1:
        return f"{axis} shards both {chosen[0]} and {chosen[1]}"
    for atom in chosen:
        if not rule.may_shard(atoms.origin(atom), axis):
            return f"{atoms.origin(atom)} is sharded over {axis}, but cannot be sharded"
        if not rule.may_lie(atoms.origin(atom), axes[atom]):
            return f"{atoms.origin(atom)} is sharded over {', '.join(axes[atom])}, in another order than over {axis}"
    if sharding:
        if terms:
            return f"operand {min(terms)} is a sum over {axis}, which shards {sharding[0]}"
        missing = next((rule.reduced[o] for a in sharding if (o := atoms.origin(a)) in rule.reduced), "replicate")
        names_of_results = [{name for dim in dims for name in dim} for dims in atoms.results]
        return [missing if names.isdisjoint(sharding) else "shard" for names in names_of_results]
    if terms:
        kinds = {kind for i in terms for a, kind in specs[i].partial if a == axis}
        if terms not in rule.linear or kinds != {"sum"}:
            return f"operands {sorted(terms)} are partial over {axis}, in which the operator is not linear"
        return ["sum"] * len(atoms.results)
    return ["replicate" if any(spec.state(axis) == "replicate" for spec in specs) else "invariant"] * len(atoms.results)


def build_spec(
    dims: Sequence[tuple[str, ...]], atoms: Atoms, axes: dict[str, tuple[str, ...]], kinds: dict[str, str], mesh: Mesh
) -> Spec:
    """Return the placement with the atoms' axes, and the given states on the other axes."""
    shape = tuple(
        merge_dim((Factor(atoms.sizes[n], axes.get(n, ()), order=atoms.order) for n in names), mesh) or (Factor(1),)
        for names in dims
    )
    partial = tuple((axis, kind) for axis, kind in kinds.items() if kind in REDUCTIONS)
    return Spec(shape, partial, tuple(axis for axis, kind in kinds.items() if kind == "replicate"))


def difference(computed: Spec, recorded: Spec | None, mesh: Mesh) -> str:
    """Return the first claim of the record that goes beyond the computed placement, or "".

    Replicate claims less than invariant.
    """
    assert recorded is not None
    for d, (dim, recorded_dim) in enumerate(zip(computed.dims, recorded.dims)):
        if unlabelled(dim, mesh) != unlabelled(recorded_dim, mesh):
            return f"dim {d}"
    kinds, claims = dict(computed.partial), dict(recorded.partial)
    for axis in mesh.axes:
        state, claim = computed.state(axis), recorded.state(axis)
        if (state, claim) != ("invariant", "replicate") and (state, kinds.get(axis)) != (claim, claims.get(axis)):
            return f"{claim} over {axis}, found {state}"
    return ""


def unlabelled(dim: Dim, mesh: Mesh) -> Dim:
    """Return a dim's factors without labels, joined as far as the layout allows."""
    return merge_dim((replace(f, label="") for f in dim if f.size > 1 or f.axes), mesh) or (Factor(1),)


# ---- a change of placement -----------------------------------------------------------------------------------


def check_conversion(node: fx.Node, source: fx.Node, path: Sequence[fx.Node], mesh: Mesh) -> Iterator[Finding]:
    """Check the record of a converted value against the reshard operators on its path."""
    before, after = ir.spec(source), ir.spec(node)
    assert after is not None
    if before is None:
        yield node, f"is converted from %{source.name}, which stands for the same value but has no placement"
        return
    if before.shape != after.shape:
        yield node, f"is of shape {after.shape}, its source of {before.shape}"
    states = {axis: before.state(axis) for axis in mesh.axes}
    kinds = dict(before.partial)
    for step in path:
        op = RESHARD_OPS.get(step.target)
        for axis in mesh.over(axis_of(step) or "") if op else ():
            if states[axis] not in op.takes:
                operand_state = f"it gets {states[axis]}: %{source.name} {before}"
                yield step, f"takes {' or '.join(op.takes)} on {axis!r}, {operand_state}"
            elif op.reduces and kinds.get(axis) != op.reduces:
                yield step, f"completes a {op.reduces} over {axis!r}, its operand is a {kinds[axis]}"
            states[axis] = op.gives
    for axis in mesh.axes:
        if not may_claim(states[axis], after.state(axis)):
            yield node, f"is placed {after}, but {states[axis]} over {axis}, converted from %{source.name} {before}"


def may_claim(state: str, claim: str) -> bool:
    """Return True if a state may be recorded as `claim`: without gradients, replicate and invariant are the same."""
    return state == claim or {state, claim} == {"invariant", "replicate"}
