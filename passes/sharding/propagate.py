"""Decide each operator's placements in one forward walk over the global graph.

    x [3@dp_shard, 4], up.weight [6@dp_shard, 4]    they disagree on dp_shard: the activation stays, the weight moves
    linear                                          up.weight is needed as [6, 4] replicate(dp_shard)

    x [3, 4], up.weight [6@tp, 4]                   on tp the weight stays
    linear                                          gives [3, 6@tp]
    linear with down.weight [4, 6@tp]               gives [3, 4] sum(tp), reduced before `square`, which is not linear

On each mesh axis an operator shards at most one factor of its rule. If operands disagree, the data axes (`dp_*`, `cp`)
keep activations in place and move weights; `tp` keeps weights in place and moves activations. Remaining ties keep the
larger operand in place. Some operators place factors themselves (`Rule.place`).

Where an operator may not shard the dim that an axis shards, its operands are gathered, or exchanged for another dim
that its rule names (`exchange`: heads for the tokens of attention) and exchanged back after it.

A partial sum passes through linear operators as long as it has one user. It is reduced before any other operator: with
sequence parallelism into shards of the sequence (or of the dim that the other operands shard), otherwise into a full
copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, fx

from passes.ir import ir
from passes.ir.mesh import WEIGHT_AXES, Mesh
from passes.ir.order import Order
from passes.ir.spec import Factor, Spec
from passes.rules import Rule, opaque, rule_of, tensor_operands
from passes.sharding.atoms import Atoms, Cuts, atom_of, merge_dim, override_axes, place_by_rule, refine
from passes.sharding.custom import Placed, padding_kept, place_forward
from passes.sharding.infer import experts_of
from passes.trace.editor import layout
from passes.trace.functions import Function, function_of


@dataclass(frozen=True)
class Decision:
    """The placements that an operator needs of its operands, and the placements of its results."""

    rule: Rule
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    body: Placed | None = None  # set for a custom function


@dataclass
class Plan:
    """All decisions, and the placement to which a partial or exchanged value is converted before use."""

    decisions: dict[fx.Node, Decision] = field(default_factory=dict)
    produced: dict[fx.Node, Any] = field(default_factory=dict)  # Spec, or a tuple of them
    reduced: dict[fx.Node, Spec] = field(default_factory=dict)
    weights: set[fx.Node] = field(default_factory=set)
    reasons: dict[tuple[fx.Node, str], str] = field(default_factory=dict)

    def current(self, node: fx.Node) -> Spec:
        """Return the node's placement after its reduction, if it has one."""
        return self.reduced.get(node, self.produced[node])


def propagate(
    program: ir.Program, sequence_parallel: bool, ctx: ir.Context, cuts: Mapping[fx.Node, Cuts] | None = None
) -> Plan:
    """Decide the placements of every tensor in a captured program whose inputs are placed.

    On an axis that no operand shards, a result is sharded as `cuts` says.
    """
    plan = Plan()
    sweep = _Sweep(plan, program.mesh, program.order, sequence_parallel, ctx)
    sweep.cuts = cuts or {}
    names = experts_of(program) if program.mesh.experts else {}
    for node, input_ in zip(program.placeholders(), program.inputs, strict=True):
        plan.produced[node] = input_.spec
        if input_.kind in ir.MODEL_STATE:
            plan.weights.add(node)
        if input_.name in names:
            sweep.experts.add(node)
    for node in program.calls():
        sweep.visit(node)
    for node, output in zip(program.results(), program.outputs, strict=True):
        sweep.check_output(node, output)
    return plan


def unpacks(node: fx.Node, operands: Sequence[fx.Node]) -> bool:
    """Return True if an operator reads only integers and its result has more bytes: they are gathered before it."""
    result, examples = ir.value(node), [ir.example(n) for n in operands]
    are_integers = isinstance(result, Tensor) and not any(e.is_floating_point() for e in examples)
    return are_integers and result.nbytes > sum(e.nbytes for e in examples)


class _Sweep:
    def __init__(self, plan: Plan, mesh: Mesh, order: Order, sequence_parallel: bool, ctx: ir.Context):
        self.plan, self.mesh, self.order, self.ctx = plan, mesh, order, ctx
        self.sequence_parallel = sequence_parallel
        self.bodies: dict[Any, Placed] = {}  # bodies of custom functions
        self.experts = set[fx.Node]()  # weights of experts, which stay where these are
        self.cuts: Mapping[fx.Node, Cuts] = {}

    def visit(self, node: fx.Node) -> None:
        """Decide one operator."""
        if not isinstance(ir.value(node), Tensor) and not isinstance(ir.value(node), (tuple, list)):
            return
        if node.target.__name__ == "getitem":  # type: ignore[union-attr]
            source, index = node.args
            self.plan.produced[node] = self.plan.produced[source][index]  # type: ignore[index]
            if source in self.plan.weights:
                self.plan.weights.add(node)
            return
        operands = tensor_operands(node)
        if all(n in self.plan.weights for n in operands):
            self.plan.weights.add(node)
            if any(n in self.experts for n in operands):
                self.experts.add(node)
        if function := function_of(node):
            self.visit_function(node, function, operands)
            return
        rule = rule_of(node)
        atoms = refine(rule, [self.plan.current(n).dims for n in operands], self.priority(operands, rule), self.mesh)
        choice = self.choices(node, operands, atoms)
        self.reduce_partials(node, operands, atoms, choice)
        decision = self.decide(node, operands, atoms, choice)
        self.plan.decisions[node] = decision
        is_tuple = not isinstance(ir.value(node), Tensor)
        self.plan.produced[node] = decision.results if is_tuple else decision.results[0]
        if back := self.exchanged(atoms, choice):
            (before,), (after,) = decision.results, self.decide(node, operands, atoms, choice | back).results
            self.plan.reduced[node] = replace(after, fill=0.0 if before.fill == 0.0 else None)

    def visit_function(self, node: fx.Node, function: Function, operands: Sequence[fx.Node]) -> None:
        """Decide a custom function by propagating through its forward body; partial operands are reduced first."""
        for n in operands:
            self.complete(n)
        specs, weights = [self.plan.current(n) for n in operands], [n in self.plan.weights for n in operands]
        examples = [ir.example(n) for n in operands]
        key = function, *zip(map(layout, examples), specs, map(padding_kept, specs), weights)
        if key not in self.bodies:
            inner = partial(propagate, sequence_parallel=self.sequence_parallel, ctx=self.ctx)
            with ir.at(node):
                self.bodies[key] = place_forward(function, examples, specs, weights, self.mesh, self.ctx, inner)
        placed = self.bodies[key]
        decision = Decision(opaque(node), placed.operands, placed.results, placed)
        self.plan.decisions[node] = decision
        self.plan.produced[node] = placed.results if len(placed.results) > 1 else placed.results[0]

    def priority(self, operands: Sequence[fx.Node], rule: Rule) -> list[int]:
        """Return the operand numbers, most sharded axes first; before them the one by which an operator places itself.

        That is the last one (expert ids, or groups of rows): all operators that read it must see the same factors.
        """
        first = len(operands) - 1 if rule.place else None
        return sorted(range(len(operands)), key=lambda i: (i != first, -len(self.plan.current(operands[i]).sharded)))

    def choices(self, node: fx.Node, operands: Sequence[fx.Node], atoms: Atoms) -> dict[str, str | None]:
        """Return the atom that the operator shards on each axis: preferably an operand's atom; None if none."""
        choice = {axis: self.choose(axis, node, operands, atoms) for axis in self.mesh.axes}
        for axis, dim in self.cuts.get(node, {}).items():
            choice[axis] = choice[axis] or atom_of(atoms, dim, axis)
        if atoms.rule.place is None:
            return choice
        axes = self.axis_order(operands, atoms, choice)
        operand_atoms = [n for dims in atoms.operands for names in dims for n in names]
        return {
            axis: next(
                (n for n in (choice[axis], *operand_atoms, *axes) if n and axis in self.mesh_axes(axes[n])), None
            )
            for axis in self.mesh.axes
        }

    # -- one axis ---------------------------------------------------------------------------------

    def candidates(self, axis: str, atoms: Atoms) -> dict[str, list[int]]:
        """Map each atom that may be sharded on the axis to the operands that already shard it there."""
        candidates: dict[str, list[int]] = {}
        for i, (dims, dim_factors) in enumerate(zip(atoms.operands, atoms.factors)):
            for names, factors in zip(dims, dim_factors):
                for name, factor in zip(names, factors or ()):
                    if axis in self.mesh_axes(factor.axes) and atoms.rule.may_shard(atoms.origin(name), axis):
                        candidates.setdefault(name, []).append(i)
        return candidates

    def choose(self, axis: str, node: fx.Node, operands: Sequence[fx.Node], atoms: Atoms) -> str | None:
        """Return the atom that the operator shards on the axis, or None."""
        candidates = self.candidates(axis, atoms)
        is_weight = [n in self.plan.weights for n in operands]
        is_in_place = axis in WEIGHT_AXES or axis in self.mesh.experts and node in self.experts
        if not is_in_place and all(is_weight) and unpacks(node, operands):
            return None
        if axis not in WEIGHT_AXES and not all(is_weight):
            candidates = {atom: i for atom, i in candidates.items() if not all(is_weight[k] for k in i)}
        if not candidates:
            return self.exchange(axis, atoms) if self.excluded(axis, atoms) else None

        def rank(atom: str) -> tuple[bool, int]:
            stays = any(is_weight[i] == (axis in WEIGHT_AXES) for i in candidates[atom])
            return stays, sum(ir.example(operands[i]).numel() for i in candidates[atom])

        best = max(candidates, key=rank)
        if len(candidates) > 1:
            reason = "weights stay" if axis in WEIGHT_AXES else "activations stay"
            self.plan.reasons[node, axis] = f"{reason} on {axis}: keeps {best} of {', '.join(candidates)}"
        return best

    def excluded(self, axis: str, atoms: Atoms) -> str | None:
        """Return the atom that an axis shards in operand 0 though only other axes may, None if there is none."""
        first = zip(atoms.operands[0], atoms.factors[0]) if atoms.rule.exchange else ()
        for names, factors in first:
            for name, factor in zip(names, factors or ()):
                if axis in self.mesh_axes(factor.axes) and not atoms.rule.may_shard(atoms.origin(name), axis):
                    return name
        return None

    def exchanged(self, atoms: Atoms, choice: Mapping[str, str | None]) -> dict[str, str]:
        """Return the atoms that the result of the operator shards again, by axis, after an exchange."""
        exchanges = [a for a, atom in choice.items() if atom and atom == self.exchange(a, atoms)]
        excluded = {axis: self.excluded(axis, atoms) for axis in exchanges if not self.candidates(axis, atoms)}
        return {axis: atom for axis, atom in excluded.items() if atom is not None}

    def exchange(self, axis: str, atoms: Atoms) -> str | None:
        """Return the largest atom that the rule shards on an axis in exchange for an excluded one."""
        names = (n for n, size in atoms.sizes.items() if size > 1 and atoms.origin(n) in atoms.rule.exchange)
        return max(names, key=atoms.sizes.__getitem__, default=None)

    def mesh_axes(self, names: Iterable[str]) -> list[str]:
        """Return the mesh axes that the given (possibly joined) axes consist of."""
        return [axis for name in names for axis in self.mesh.over(name)]

    # -- partial sums -----------------------------------------------------------------------------

    def reduce_partials(
        self, node: fx.Node, operands: Sequence[fx.Node], atoms: Atoms, choice: dict[str, str | None]
    ) -> None:
        """Reduce each partial operand that the operator cannot carry through, into a shard if one is wanted."""
        for axis in self.mesh.axes:
            partial = {i for i, n in enumerate(operands) if self.plan.current(n).state(axis) == "partial"}
            if not partial or self.carries(partial, operands, atoms, axis, choice):
                continue
            if choice[axis] is None and axis in WEIGHT_AXES and self.sequence_parallel:
                choice[axis] = self.sequence_atom(operands, atoms, partial, axis)
            for i in partial:
                self.reduce(operands[i], axis, i, atoms, choice[axis])

    def complete(self, node: fx.Node) -> None:
        """Reduce a partial value, whichever operator uses it."""
        names = tuple((f"d{i}",) for i in range(ir.example(node).dim()))
        rule = Rule((names,), (names,), dict(zip((n for (n,) in names), ir.example(node).shape)))
        atoms = refine(rule, [self.plan.current(node).dims], [0], self.mesh)
        self.reduce_partials(node, [node], atoms, dict.fromkeys(self.mesh.axes))

    def carries(
        self, partial: set[int], operands: Sequence[fx.Node], atoms: Atoms, axis: str, choice: Mapping[str, str | None]
    ) -> bool:
        """Return True if the operator may run on terms of the sums and leave its result to be reduced."""
        used_once = all(len(operands[i].users) == 1 for i in partial)
        sums = all((axis, "sum") in self.plan.current(operands[i]).partial for i in partial)
        return used_once and sums and choice[axis] is None and frozenset(partial) in atoms.rule.linear

    def sequence_atom(self, operands: Sequence[fx.Node], atoms: Atoms, partial: set[int], axis: str) -> str | None:
        """Return the atom of a partial operand's sequence dim, if the rule allows it to be sharded."""
        for i in sorted(partial):
            for names, factors in zip(atoms.operands[i], atoms.factors[i]):
                for name, factor in zip(names, factors or ()):
                    if factor.label == "sequence" and atoms.rule.may_shard(atoms.origin(name), axis):
                        return name
        return None

    def reduce(self, node: fx.Node, axis: str, operand: int, atoms: Atoms, atom: str | None) -> None:
        """Record that a value is reduced on the axis, into shards of the atom's dim if the operand has the atom."""
        before = self.plan.current(node)
        dims, is_shard = list(before.dims), False
        for d, (names, factors) in enumerate(zip(atoms.operands[operand], atoms.factors[operand])):
            if atom in names and factors is not None:
                k = names.index(atom)
                sharded_factor = replace(factors[k], axes=(*factors[k].axes, axis), order=self.order)
                new = [*factors[:k], sharded_factor, *factors[k + 1 :]]
                dims[d], is_shard = merge_dim(new, self.mesh), True
        partial = tuple(p for p in before.partial if p[0] != axis)
        fill = 0.0 if is_shard and before.fill == 0 else before.fill
        self.plan.reduced[node] = replace(before, dims=tuple(dims), partial=partial, fill=fill)

    # -- the outcome ------------------------------------------------------------------------------

    def decide(
        self, node: fx.Node, operands: Sequence[fx.Node], atoms: Atoms, choice: Mapping[str, str | None]
    ) -> Decision:
        """Return the placements of operands and results for the chosen atoms."""
        # a reduction above may have changed the operands' placements
        order = self.priority(operands, atoms.rule)
        atoms = refine(atoms.rule, [self.plan.current(n).dims for n in operands], order, self.mesh)
        axes = self.axis_order(operands, atoms, choice)
        labels = {
            name: f.label
            for dims, dim_factors in zip(atoms.operands, atoms.factors)
            for names, fs in zip(dims, dim_factors)
            for name, f in zip(names, fs or ())
            if f.label
        }
        states = {axis: [self.plan.current(n).state(axis) for n in operands] for axis in self.mesh.axes}
        needed = [self.operand_spec(i, atoms, axes, labels, choice, states) for i in range(len(operands))]
        fills_after = [self.fill_kept(n, spec) for n, spec in zip(operands, needed)]
        fills = [atoms.rule.pad_safe.get(i, fill) for i, fill in enumerate(fills_after)]
        results = [
            replace(
                self.result_spec(dims, atoms, axes, labels, choice, states),
                fill=self.result_fill(dims, atoms, axes, fills),
            )
            for dims in atoms.results
        ]
        return Decision(atoms.rule, tuple(needed), tuple(results))

    def fill_kept(self, node: fx.Node, needed: Spec) -> float | None:
        """Return an operand's padding value after its conversion, which pads with zeros."""
        spec = self.plan.current(node)
        return spec.fill if spec.fill == 0.0 or spec.dims == needed.dims else None

    def result_fill(self, dims, atoms: Atoms, axes, operand_fills: Sequence[float | None]) -> float | None:
        """Return a result's padding value: the rule's if all padded atoms agree, otherwise None; 0 without padding."""
        padded = [n for dim in dims for n in dim if self.factor(n, atoms, axes).padded(self.mesh)]
        lacks = [{n for dim in operand for n in dim}.isdisjoint for operand in atoms.operands]
        fills = {
            atoms.rule.pad_out([math.nan if lacking([n]) else fill for lacking, fill in zip(lacks, operand_fills)])
            for n in padded
        }
        return fills.pop() if len(fills) == 1 else None if fills else 0.0

    def axis_order(
        self, operands: Sequence[fx.Node], atoms: Atoms, choice: Mapping[str, str | None]
    ) -> dict[str, tuple[str, ...]]:
        """Return the axes that shard each atom, joined and ordered as in an operand that already has them.

        Activations are considered after all weights: only `cp` may shard a sequence in another order than that of
        stored tensors.
        """
        chosen = {atom: tuple(axis for axis, a in choice.items() if a == atom) for atom in atoms.sizes}
        for i in sorted(range(len(operands)), key=lambda i: operands[i] not in self.plan.weights):
            for names, factors in zip(atoms.operands[i], atoms.factors[i]):
                for name, factor in zip(names, factors or ()):
                    if atoms.rule.may_lie(atoms.origin(name), factor.axes):
                        chosen[name] = self.order_as_held(chosen[name], factor.axes)
        return override_axes(chosen, place_by_rule(atoms, self.mesh), self.mesh)

    def order_as_held(self, chosen: tuple[str, ...], operand_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the chosen axes; those that an operand holds come first, as it holds them."""
        first = [name for name in operand_axes if set(self.mesh.over(name)) <= set(self.mesh_axes(chosen))]
        used = set(self.mesh_axes(first))
        others = [(name,) if used.isdisjoint(mesh_axes := self.mesh.over(name)) else mesh_axes for name in chosen]
        return (*first, *(axis for names in others for axis in names if axis not in used))

    def operand_spec(self, i: int, atoms: Atoms, axes, labels, choice, states) -> Spec:
        """Return the placement needed of operand `i`: shards of the chosen atoms, replicate if it lacks the atom."""
        sharded = self.mesh_axes(a for dim in atoms.operands[i] for name in dim for a in axes[name])
        replicate, partial = [], []
        for axis in self.mesh.axes:
            if axis in sharded:
                continue
            if states[axis][i] == "partial":
                partial.append((axis, "sum"))
            elif choice[axis] is not None or self.is_mixed(states[axis]):
                replicate.append(axis)
        return Spec(self.dims(atoms.operands[i], atoms, axes, labels), tuple(partial), tuple(replicate))

    def result_spec(self, dims, atoms: Atoms, axes, labels, choice, states) -> Spec:
        """Return a result's placement: partial for summed atoms or carried sums, otherwise as the operands."""
        sharded = self.mesh_axes(a for dim in dims for name in dim for a in axes[name])
        replicate, partial = [], []
        for axis in self.mesh.axes:
            atom = choice[axis]
            if axis in sharded:
                continue
            if atom is not None:
                how = atoms.rule.reduced.get(atoms.origin(atom))
                if how is None:
                    replicate.append(axis)  # the result lacks the factor: every rank computes the same value
                else:
                    partial.append((axis, how))
            elif "partial" in states[axis]:
                partial.append((axis, "sum"))
            elif self.is_mixed(states[axis]):
                replicate.append(axis)
        return Spec(self.dims(dims, atoms, axes, labels), tuple(partial), tuple(replicate))

    def is_mixed(self, states: Sequence[str]) -> bool:
        """Return True if some operand is replicate or partial, so that the others have to be replicate."""
        return "replicate" in states or "partial" in states

    def dims(self, dims, atoms: Atoms, axes, labels):
        return tuple(
            merge_dim((self.factor(n, atoms, axes, labels.get(n, "")) for n in names), self.mesh) or (Factor(1),)
            for names in dims
        )

    def factor(self, atom: str, atoms: Atoms, axes: Mapping[str, tuple[str, ...]], label: str = "") -> Factor:
        return Factor(atoms.sizes[atom], axes.get(atom, ()), label, self.order)

    def check_output(self, node: fx.Node, output: ir.Output) -> None:
        """Raise CompileError unless an output has the shape of `output.spec`."""
        spec = self.plan.current(node)
        if output.spec.shape != spec.shape:
            raise ir.CompileError("shard", node, f"output {output.name} has shape {spec.shape}")
