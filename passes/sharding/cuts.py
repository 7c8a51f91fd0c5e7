"""Find full copies of which each rank uses only a share, so that each rank computes only that share.

    i = arange(9); mask = i[:, None] >= i[None, :]      [9, 9], as nothing shards it, and each rank uses [9@cp, 9]
    i[:, None] is cut to [9@cp, 1]; mask                [9@cp, 9]

Masks of pairs of tokens are made so from positions; in full, a mask of 131,072 tokens has 16 GiB. Only values that no
weight affects are concerned: their gradients do not matter.

    first = where(mask, i, 9).amin(1)                   [9], that one user reads whole, and another as [9@cp]

A reduced value is cut even if users disagree: gathering it costs less than its operand in full on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, fx

from passes.ir import ir
from passes.ir.mesh import WEIGHT_AXES, Mesh
from passes.ir.spec import Spec
from passes.rules import tensor_operands
from passes.sharding.atoms import Atoms, Cuts, atom_of, refine
from passes.sharding.propagate import Plan


def free_of_weights(program: ir.Program) -> set[fx.Node]:
    """Return the operators whose single result depends on no weight."""
    inputs = zip(program.placeholders(), program.inputs, strict=True)
    free = {node for node, input_ in inputs if input_.kind not in ir.WEIGHTS}
    for node in program.calls():
        if free.issuperset(node.all_input_nodes):
            free.add(node)
    return {node for node in free if node.op == "call_function" and isinstance(ir.value(node), Tensor)}


def cuts_of(spec: Spec, needed: Spec, mesh: Mesh) -> Cuts:
    """Return the cuts, on axes of data, that turn a placement into the `needed` one."""
    return {
        axis: d
        for d, dim in enumerate(needed.dims)
        for factor in dim
        for name in factor.axes
        for axis in mesh.over(name)
        if axis not in WEIGHT_AXES and spec.state(axis) in ("invariant", "replicate")
    }


def cuts_below(cuts: Cuts, atoms: Atoms) -> Iterator[Cuts]:
    """Yield, for each operand, its cuts if the first result is cut."""
    for dims in atoms.operands:
        by_atom = {names[0]: d for d, names in enumerate(dims) if len(names) == 1}
        read = {axis: by_atom.get(atom_of(atoms, dim, axis) or "") for axis, dim in cuts.items()}
        yield {axis: d for axis, d in read.items() if d is not None}


def is_reduced(atoms: Atoms) -> bool:
    """Return True if the first result lacks a dim of an operand, so that it is much smaller."""
    result = {name for dim in atoms.results[0] for name in dim}
    return any(atoms.sizes[name] > 1 and name not in result for dims in atoms.operands for dim in dims for name in dim)


def agreed(uses: list[Cuts], reduced: bool) -> Cuts:
    """Return the cuts that all users share; of a reduced value, which is cheap to gather, those of any user."""
    if reduced:
        return {axis: dim for use in reversed(uses) for axis, dim in use.items()}
    first, *others = uses
    return {axis: dim for axis, dim in first.items() if all(use.get(axis) == dim for use in others)}


def find_cuts(program: ir.Program, plan: Plan) -> dict[fx.Node, Cuts]:
    """Return the cuts of values that their users read cut in the same way, given a plan without cuts."""
    free, cuts = free_of_weights(program), dict[fx.Node, Cuts]()
    uses: dict[fx.Node, list[Cuts]] = {node: [{}] for node in program.results()}
    for node in reversed(list(program.calls())):
        if node not in plan.decisions:
            continue
        decision, operands = plan.decisions[node], tensor_operands(node)
        further: Iterable[Cuts] = [{} for _ in operands]
        if node in free and any(uses.get(node, ())):
            atoms = refine(decision.rule, [plan.current(n).dims for n in operands], range(len(operands)), program.mesh)
            wanted = agreed(uses[node], is_reduced(atoms))
            cuts[node] = {a: d for a, d in wanted.items() if atom_of(atoms, d, a)}
            further = cuts_below(cuts[node], atoms)
        for operand, needed, more in zip(operands, decision.operands, further):
            uses.setdefault(operand, []).append(cuts_of(plan.current(operand), needed, program.mesh) | more)
    return {node: of_node for node, of_node in cuts.items() if of_node}
