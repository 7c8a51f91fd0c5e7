"""Build the local graph that every rank runs, from the placements that `propagate` decided.

    linear(x, up.weight)                      up.weight [6@dp_shard, 4] is needed as [6, 4] replicate(dp_shard)
becomes
    %all_gather_default = all_gather(%p_model_up_weight, 0, "dp_shard", 2, 6, f32, None)
    %linear_default = linear(%values_0, %all_gather_default)

A value is converted once for all its users that need the same placement. Padding is set to the value that a rule needs
before the operator that would otherwise count it. Sizes among an operator's arguments become local sizes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from passes.cost.accounting import sent_bytes
from passes.ir import ir
from passes.ir.machine import H100, Balance
from passes.ir.mesh import BATCH_AXES, BLOCKS, HOPS, SEQUENCE_AXIS, Mesh
from passes.ir.operators import kind_of
from passes.ir.spec import Dim, Factor, Spec
from passes.ir.stages import Stage
from passes.ops import reshard
from passes.ops.shift import divisors
from passes.rules import Rule, tensor_operands
from passes.rules.base import Names
from passes.sharding.atoms import merge_dim, refine
from passes.sharding.convert import convert
from passes.sharding.custom import emit
from passes.sharding.propagate import Decision, Plan
from passes.trace.abstract_eval import recorded
from passes.trace.builder import Builder

aten = torch.ops.aten


class GraphBuilder(Builder):
    """Builds a program's local graph; collects its reshards and the global and local bodies of custom functions."""

    def __init__(self, mesh: Mesh, ctx: ir.Context):
        super().__init__(mesh, ctx)
        self.bodies: list[tuple[ir.Program, ir.Program]] = []
        self.reshards: dict[fx.Node, ir.Reshard] = {}

    def convert(
        self, x: fx.Node, before: Spec, after: Spec, has_grad: bool = True, reduce_dtype: torch.dtype | None = None
    ) -> fx.Node:
        """Insert the conversion of a value to another placement."""
        return convert(self, x, before, after, has_grad, reduce_dtype)

    def reshard(self, source: fx.Node, x: fx.Node, before: Spec, after: Spec, reason: str, *how: Any) -> fx.Node:
        """Convert a value of the global node `source`, and record the reshard for the report."""
        last = next(iter(reversed(self.graph.nodes)), None)
        new = self.convert(x, before, after, *how)
        if new is not x:
            added = itertools.takewhile(lambda n: n is not last, reversed(self.graph.nodes))
            sending = [n for n in added if kind_of(n)][::-1]
            sent = sum(sent_bytes(n, recorded(), self.mesh) for n in sending)
            names = tuple(n.name for n in sending)
            self.reshards[new] = ir.Reshard(
                source.name, ir.source(source), str(before), str(after), reason, sent, names
            )
        return new


class Partitioner:
    """Walks the global graph once, in order, and emits the local graph."""

    def __init__(
        self,
        program: ir.Program,
        plan: Plan,
        ctx: ir.Context,
        reduce_dtype: torch.dtype | None,
        propagate: Callable[[ir.Program], Plan],
        differentiable: bool = True,
        context_method: str = "auto",
        skip_steps: bool = True,
        balance: Balance = H100,
    ):
        self.program, self.plan, self.reduce_dtype = program, plan, reduce_dtype
        self.propagate, self.differentiable, self.skip_steps = propagate, differentiable, skip_steps
        self.builder = GraphBuilder(program.mesh, ctx)
        self.builder.context_method, self.builder.balance = context_method, balance
        self.versions: dict[tuple[fx.Node, Spec], fx.Node] = {}
        self.grads: set[fx.Node] = set()
        self.tuples: dict[Any, fx.Node] = {}

    def run(self) -> ir.Program:
        """Return the local program."""
        inputs = self.place_inputs()
        for node in self.program.calls():
            self.builder.origin = node
            self.emit(node)
        results = []
        for node, output in zip(self.program.results(), self.program.outputs, strict=True):
            self.builder.origin = node
            result = self.version(node, output.spec, "output")
            results.append(self.zero_padding(result, output.spec) if output.kind == "gradient" else result)
        self.builder.graph.output(tuple(results))
        inputs = self.drop_unused_places(inputs)
        inputs = self.hoist_replicate(inputs) if self.differentiable else inputs
        return self.program.with_graph(self.builder.graph, inputs=inputs, stage=Stage.LOCAL)

    def zero_padding(self, gradient: fx.Node, spec: Spec) -> fx.Node:
        """Return a custom function's gradient with zeros in its padding, whatever its backward computed there."""
        placement = ir.spec(gradient)
        return gradient if placement and placement.fill == 0.0 else self.builder.fill_padding(gradient, spec, 0.0)

    @property
    def reshards(self) -> list[ir.Reshard]:
        """The reshards whose results are used."""
        nodes = set(self.builder.graph.nodes)
        return [reshard for node, reshard in self.builder.reshards.items() if node in nodes]

    # -- inputs -----------------------------------------------------------------------------------

    def place_inputs(self) -> tuple[ir.Input, ...]:
        """Create placeholders of local shape, and a 0-d int64 coordinate for each axis."""
        for node, input_ in zip(self.program.placeholders(), self.program.inputs):
            local = ir.example(node).new_empty(input_.spec.local_shape(self.program.mesh))
            self.versions[node, input_.spec] = new = self.builder.placeholder(node.name, local, input_.spec)
            ir.update(new, stands_for=node.name)
            if input_.kind == "parameter" and self.differentiable:
                self.grads.add(node)
        coordinates = []
        for axis in self.program.mesh.names:
            with self.builder.ctx.fake_mode:
                zero = torch.zeros((), dtype=torch.int64, device=self.device())
            spec = Spec((), replicate=self.program.mesh.over(axis))
            self.builder.coordinates[axis] = self.builder.placeholder(f"axis_index_{axis}", zero, spec)
            coordinates.append(ir.Input(axis, "coordinate", spec))
        coordinates += self.place_layout()
        for node in self.program.placeholders():
            self.complete(node)
        return (*self.program.inputs, *coordinates)

    def place_layout(self) -> Iterator[ir.Input]:
        """Create the inputs that describe a batch's layout along `cp`: the block table and the hops of rings."""
        mesh, bounds, order = self.program.mesh, self.program.bounds, self.program.order
        rows = {axis for input_ in self.program.inputs if input_.kind == "batch" for axis in input_.spec.sharded}
        replicate = tuple(axis for axis in BATCH_AXES if axis in rows)
        layouts: dict[str, tuple[int, int, torch.device]] = {}
        if order.table:
            layouts[BLOCKS] = mesh[SEQUENCE_AXIS], order.chunks, self.device()
        if bounds is not None and self.skip_steps:
            names = [output.name for output in bounds.outputs]
            self.builder.attentions = list(zip(names[::2], names[1::2]))
            steps = len(self.builder.attentions) * len(divisors(mesh[SEQUENCE_AXIS]))
            layouts[HOPS] = steps, mesh[SEQUENCE_AXIS], torch.device("cpu")
        for name, (*shape, device) in layouts.items():
            with self.builder.ctx.fake_mode:
                empty = torch.zeros(shape, dtype=torch.int64, device=device)
            spec = replace(Spec.whole(shape), replicate=replicate)
            self.builder.coordinates[name] = self.builder.placeholder(f"axis_index_{name}", empty, spec)
            yield ir.Input(name, "layout", spec)

    def device(self) -> torch.device:
        """The device of the program's inputs."""
        return ir.example(self.program.placeholders()[0]).device

    def drop_unused_places(self, inputs: tuple[ir.Input, ...]) -> tuple[ir.Input, ...]:
        """Remove unused coordinates, and make the block table invariant if all ranks need the same one."""
        self.builder.graph.eliminate_dead_code()
        unused = {name for name, node in self.builder.coordinates.items() if not node.users}
        unused -= {BLOCKS} if self.differentiable else set()  # a step always takes its table
        for name in unused:
            self.builder.graph.erase_node(self.builder.coordinates.pop(name))
        if BLOCKS in self.builder.coordinates and self.builder.one_table:
            invariant_spec = replace(ir.spec(self.builder.coordinates[BLOCKS]), replicate=())  # type: ignore[type-var]
            ir.set_spec(self.builder.coordinates[BLOCKS], invariant_spec)
            inputs = tuple(replace(i, spec=invariant_spec) if i.name == BLOCKS else i for i in inputs)
        return tuple(i for i in inputs if not (i.kind in ("coordinate", "layout") and i.name in unused))

    def hoist_replicate(self, inputs: tuple[ir.Input, ...]) -> tuple[ir.Input, ...]:
        """Make a parameter replicate from the start if it is used only so: its gradient is then a partial sum."""
        placeholders = [n for n in self.builder.graph.nodes if n.op == "placeholder"]
        new_inputs = []
        for node, input_ in zip(placeholders, inputs, strict=True):
            while input_.kind == "parameter" and len(node.users) == 1:
                (user,) = node.users
                if user.target is not reshard.invariant_to_replicate:
                    break
                replicate = (*input_.spec.replicate, *self.program.mesh.over(str(user.args[1])))
                input_ = replace(input_, spec=replace(input_.spec, replicate=replicate))
                user.replace_all_uses_with(node)
                self.builder.graph.erase_node(user)
            ir.set_spec(node, input_.spec)
            new_inputs.append(input_)
        return tuple(new_inputs)

    # -- operators --------------------------------------------------------------------------------

    def emit(self, node: fx.Node) -> None:
        """Emit one operator on its operands, converted as its decision needs, and the reductions that follow it."""
        if node.target is operator.getitem:
            source, index = node.args
            if source in self.grads:
                self.grads.add(node)
            self.finish(node, self.builder.call(operator.getitem, (self.tuples[source], index)))
            return
        operands = tensor_operands(node)
        if any(n in self.grads for n in operands) and node.target is not aten.detach.default:
            self.grads.add(node)
        decision = self.plan.decisions[node]
        values = [self.version(n, spec, node.name) for n, spec in zip(operands, decision.operands)]
        self.finish(node, self.emit_on(node, decision, values, decision.results))

    def finish(self, node: fx.Node, new: fx.Node) -> None:
        """Check the local shape, record the value, and reduce it if the plan says so."""
        produced = self.plan.produced[node]
        if not isinstance(ir.value(new), Tensor):
            self.tuples[node] = new
            return
        expected = produced.local_shape(self.program.mesh)
        if tuple(ir.example(new).shape) != expected:
            raise ir.CompileError(
                "shard",
                node,
                f"local shape is {tuple(ir.example(new).shape)}, its placement {produced} says {expected}",
            )
        ir.update(new, spec=produced, stands_for=node.name)
        self.versions[node, produced] = new
        self.complete(node)

    def complete(self, node: fx.Node) -> None:
        """Reduce a partial value, or exchange one back, if the plan says so."""
        if node in self.plan.reduced:
            before, after = self.plan.produced[node], self.plan.reduced[node]
            reason = "sum complete before use" if before.partial else "exchanged back"
            new = self.record(node, self.versions[node, before], before, after, reason)
            self.versions[node, after] = new

    def emit_on(self, node: fx.Node, decision: Decision, values: list[fx.Node], results: Sequence[Spec]) -> fx.Node:
        """Emit the operator on local operands, after setting their padding to safe values."""
        if decision.body is not None:
            with ir.at(node):
                return emit(self.builder, decision.body, values, self.propagate, self.body)
        specs = [replace(spec, fill=ir.spec(v).fill) for spec, v in zip(decision.operands, values)]  # type: ignore
        values = [self.padding(i, v, spec, decision, node) for i, (v, spec) in enumerate(zip(values, specs))]
        if decision.rule.emit is not None:
            return decision.rule.emit(self.builder, node, values, specs, list(results))
        supply = iter(values)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: next(supply) if ir.is_tensor(n) else n)
        if decision.rule.resize is not None:
            args = decision.rule.resize(args, results[0].local_shape(self.program.mesh))
        if decision.rule.local is not None:
            return self.builder.trace(decision.rule.local, *args)
        return self.builder.call(node.target, args, kwargs)

    def body(self, program: ir.Program, plan: Plan, results: tuple[Spec, ...]) -> ir.Program:
        """Return the body of a custom function as a local program; its gradient is not derived."""
        outputs = tuple(replace(o, spec=spec) for o, spec in zip(program.outputs, results, strict=True))
        program = replace(program, outputs=outputs)
        inner = Partitioner(program, plan, self.builder.ctx, None, self.propagate, differentiable=False)
        inner.builder.context_method, inner.builder.balance = self.builder.context_method, self.builder.balance
        local = inner.run()
        for choice in inner.builder.methods.values():
            self.builder.methods[self.builder.origin] = choice  # type: ignore[index]
        self.builder.one_table |= inner.builder.one_table
        self.builder.bodies += [*inner.builder.bodies, (program, local)]
        return local

    def padding(self, i: int, x: fx.Node, spec: Spec, decision: Decision, node: fx.Node) -> fx.Node:
        """Return operand `i` with its padding set to the rule's value, if it may hold another value."""
        rule = decision.rule
        if not spec.padded(self.program.mesh):
            return x
        if i in rule.pad_safe and spec.fill != rule.pad_safe[i]:
            return self.builder.fill_padding(x, spec, rule.pad_safe[i])
        stops_gradient = is_reduction(rule) and ir.may_have_gradient(x)
        if (spec.fill != rule.pad_in or stops_gradient) and (folded := self.folded_padding(i, spec, rule)):
            return self.builder.fill_padding(x, spec, rule.pad_in, folded)
        return x

    def folded_padding(self, i: int, spec: Spec, rule: Rule) -> list[int]:
        """Return the padded dims of operand `i` along factors that the operator itself reduces."""
        if rule.emit is not None:
            return []
        mesh = self.program.mesh
        atoms = refine(replace(rule, operands=(rule.operands[i],)), [spec.dims], [0], mesh)

        def folds_padding(names: Names, factors: Dim | None, dim: Dim) -> bool:
            is_reduced = [atoms.origin(name) in rule.reduced for name in names]
            if factors is None:  # a shard cuts an atom
                return any(is_reduced) and any(f.padded(mesh) for f in dim)
            return any(f.padded(mesh) for f in itertools.compress(factors, is_reduced))

        dims = zip(atoms.operands[0], atoms.factors[0], spec.dims)
        return [d for d, dim in enumerate(dims) if folds_padding(*dim)]

    # -- versions of a value ----------------------------------------------------------------------

    def version(self, node: fx.Node, wanted: Spec, user: str) -> fx.Node:
        """Return the node's value in the wanted placement, converted once for all users."""
        if (node, wanted) in self.versions:
            return self.versions[node, wanted]
        current = self.plan.current(node)
        may_hoist = node in self.plan.weights and (node in self.grads or not self.differentiable)
        if may_hoist and (hoisted := self.hoist(node, wanted)):
            new = hoisted
        elif self.is_repeat(node) and wanted == replace(current, replicate=wanted.replicate):
            new = self.replicate_first(node, wanted)
        else:
            new = self.record(node, self.versions[node, current], current, wanted, f"for {user}")
        self.versions[node, wanted] = new
        return new

    def hoist(self, node: fx.Node, wanted: Spec) -> fx.Node | None:
        """Convert a weight before it is rearranged, so that one conversion serves all its forms; None if not possible.

        In the body of a custom function, which has no gradient, this leaves a transposed weight in the layout that its
        matmul takes.
        """
        decision = self.plan.decisions.get(node)
        if decision is None or not decision.rule.moves or wanted.partial:
            return None
        dims = operand_dims(decision.rule, wanted, self.program.mesh)
        if dims is None:
            return None
        (operand,) = tensor_operands(node)
        below = Spec(dims, (), wanted.replicate)  # `wanted` has no partial axes, even if the operand has
        value = self.version(operand, below, node.name)
        new = self.emit_on(node, decision, [value], [wanted])
        placement = ir.spec(value)
        ir.update(new, spec=replace(wanted, fill=placement.fill if placement else None), stands_for=node.name)
        return new

    def is_repeat(self, node: fx.Node) -> bool:
        """Return True if the operator repeats entries of its first operand."""
        decision = self.plan.decisions.get(node)
        return decision is not None and decision.rule.repeats

    def replicate_first(self, node: fx.Node, wanted: Spec) -> fx.Node:
        """Repeat entries of a copy that is already replicate, so that its gradient is reduced once an entry."""
        decision = self.plan.decisions[node]
        first, *others = zip(tensor_operands(node), decision.operands, strict=True)
        below = replace(first[1], replicate=tuple(dict.fromkeys((*first[1].replicate, *wanted.replicate))))
        values = [self.version(n, spec, node.name) for n, spec in ((first[0], below), *others)]
        new = self.emit_on(node, decision, values, [wanted])
        ir.update(new, spec=wanted, stands_for=node.name)
        return new

    def record(self, node: fx.Node, value: fx.Node, before: Spec, after: Spec, reason: str) -> fx.Node:
        """Convert a value; the result stands for the same global node."""
        dtype = self.reduce_dtype if node in self.plan.weights else None
        new = self.builder.reshard(node, value, before, after, reason, node in self.grads, dtype)
        if new is not value:
            ir.update(new, stands_for=node.name)
        return new


def operand_dims(rule: Rule, wanted: Spec, mesh: Mesh) -> tuple[Dim, ...] | None:
    """Return the dims of a rearranged operand that give the wanted result; None if this cuts a shard."""
    reverse = replace(rule, operands=rule.results, results=rule.operands)
    atoms = refine(reverse, [wanted.dims], [0], mesh)
    if None in atoms.factors[0]:
        return None
    wanted_dims = zip(atoms.operands[0], atoms.factors[0])
    factors = {name: factor for names, dim in wanted_dims for name, factor in zip(names, dim or ())}
    of_operand = {name for names in atoms.results[0] for name in names}
    if any(factor.axes for name, factor in factors.items() if name not in of_operand):
        return None
    return tuple(
        merge_dim((factors.get(name, Factor(atoms.sizes[name])) for name in names), mesh) or (Factor(1),)
        for names in atoms.results[0]
    )


def is_reduction(rule: Rule) -> bool:
    """Return True if the operator reduces its one operand: the gradient reaches padding unless a mask stops it."""
    return len(rule.operands) == 1 and bool(rule.reduced)
