"""Check that a program is consistent; each check yields findings: a node, and a text with both values.

After every pass the graph lints, its ends match `inputs` and `outputs`, recorded shapes and dtypes equal those of fake
tensors, placements are legal and of the recorded shapes, collectives name an axis and its size and are waited for, and
the program meets the promises of its stage. A failure names the pass, the node, its source line, both values and the
ten nodes around it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from passes.check.copies import COPY, check_copies
from passes.check.padding import check_padding
from passes.check.placements import check_placements
from passes.check.values import Numbers, check_kept
from passes.cost.accounting import formula_of
from passes.cost.fusion import WAITS
from passes.ir import ir
from passes.ir.bodies import base_of
from passes.ir.layer import KINDS, Layer
from passes.ir.mesh import SEQUENCE_AXIS, Mesh
from passes.ir.operators import EXCHANGES, GRADIENTS, RING, axis_of, bind, communicator_of, is_mutable, started
from passes.ir.order import Order
from passes.ir.printer import format_node, format_value
from passes.ir.slices import weight_nodes
from passes.ir.spec import Spec, validate
from passes.ir.stages import Stage
from passes.ops.reshard import RESHARD_OPS
from passes.ops.shift import SHIFTS
from passes.torch_private import OpOverload
from passes.trace.abstract_eval import Avals, Value, abstract_eval
from passes.trace.functions import as_meant

STORED_IN = {"buffer": ("buffer",), "gradient": ("parameter", "gradient")}  # result -> inputs that may take it
CAST = torch.ops.aten._to_copy.default
AROUND = 5  # nodes shown before and after the faulty one

Finding = tuple[fx.Node | None, str]


def verify_spec(
    program: ir.Program,
    ctx: ir.Context,
    *,
    pass_name: str = "verify",
    before: ir.Program | None = None,
    bodies: Sequence[tuple[ir.Program, ir.Program]] = (),
    avals: Avals | None = None,
) -> Avals:
    """Check the graph, and return its nodes' recomputed values; raise CompileError at the first finding.

    With the program `before` the pass: no result may be lost, and if a global program became this local one, placements
    are recomputed, also in the `bodies` that the pass reports. `avals` are the values of this very graph if it was
    checked before, at an earlier stage.
    """
    run_checks(pass_name, STRUCTURE, program)
    if avals is None:
        avals = check_values_anew(program, ctx, pass_name)
    resolved = as_meant(program, ctx)
    run_checks(pass_name, MEANING, resolved)
    if before is not None:
        run_checks(pass_name, [check_results_kept], before, program)
    if before is not None and before.stage < Stage.LOCAL <= program.stage:
        run_checks(pass_name, [check_layers_kept], before, program)
        for pair in ((before, program), *bodies):
            run_checks(pass_name, LOCAL, *pair)
    return avals


def verify_kept(before: Numbers, after: Numbers, *, pass_name: str = "verify") -> None:
    """Raise CompileError if the program after a pass that must keep values returns or stores others."""
    run_checks(pass_name, [check_kept], before, after)


LOCAL = (check_placements, check_padding)


def check_values_anew(program: ir.Program, ctx: ir.Context, pass_name: str) -> Avals:
    """Recompute the nodes' values, and check them against the recorded ones."""
    try:
        avals = abstract_eval(program, ctx)
    except ir.CompileError as error:
        problem = f"does not take its operands: {error}"
        raise failure(pass_name, error.node, problem, check_recorded.__name__) from error
    run_checks(pass_name, [check_recorded], program, avals)
    return avals


class WrongProgram(ir.CompileError):
    """An inconsistent program, found by the function named `check`."""

    def __init__(self, pass_name: str, node: fx.Node | None, message: str, check: str):
        super().__init__(pass_name, node, message)
        self.check = check


def run_checks(pass_name: str, checks: Iterable[Callable[..., Iterable[Finding]]], *subjects: Any) -> None:
    """Raise WrongProgram for the first finding of some checks on the same subjects."""
    for check in checks:
        for node, message in check(*subjects):
            raise failure(pass_name, node, message, check.__name__)


def failure(pass_name: str, node: fx.Node | None, message: str, check: str) -> WrongProgram:
    """Return the error of a check, with the nodes around the faulty one."""
    lines = f"\n{neighbours(node)}" if node is not None else ""
    return WrongProgram(pass_name, node, f"{message}{lines}", check)


def neighbours(node: fx.Node) -> str:
    """Return the lines of the ten nodes around a node, its own marked."""
    nodes = list(node.graph.nodes)
    position = nodes.index(node)
    shown = nodes[max(0, position - AROUND) : position + AROUND + 1]
    return "\n".join(f"{'>' if n is node else ' '} {_line(n)}" for n in shown)


def _line(node: fx.Node) -> str:
    is_input = node.op == "placeholder"
    return f"%{node.name} = input : {format_value(ir.value(node))}" if is_input else format_node(node)


# ---- structure, on which the other checks rely ----------------------------------------------------


def check_lint(program: ir.Program) -> Iterator[Finding]:
    """Check that operands come before their uses and names are unique."""
    try:
        program.graph.lint()
    except RuntimeError as error:
        yield None, f"the graph is malformed: {error}"


def check_values(program: ir.Program) -> Iterator[Finding]:
    """Check that every node has a recorded value."""
    for node in program.graph.nodes:
        if node.op != "output" and ir.value(node) is None:
            yield node, "has no recorded value"


def check_phases(program: ir.Program) -> Iterator[Finding]:
    """Check that every operator has a phase of the step."""
    for node in program.calls():
        if ir.has_no_phase(node):
            yield node, f"has no phase; record one of {', '.join(ir.PHASES)}"


def check_layers(program: ir.Program) -> Iterator[Finding]:
    """Check that every operator records its layer, or none.

    In the forward, an operator that only one layer uses, and that reads that layer, must belong to it.
    """
    for node in program.calls():
        if ir.has_no_layer(node):
            yield node, "has no recorded layer; record its layer, or none"
            return
    forward = {node for node in program.calls() if ir.phase(node) == "forward"}
    outside = [node for node in forward if ir.layer(node) is None]
    before, after = (
        dict[fx.Node, set[Layer | None]](),
        dict[fx.Node, set[Layer | None]](),
    )  # reached layers
    for node in sorted(outside):
        before[node] = set().union(*(before.get(n, {ir.layer(n)}) for n in node.all_input_nodes))
    for node in sorted(outside, reverse=True):
        after[node] = set().union(*(after.get(n, {ir.layer(n) if n in forward else None}) for n in node.users))
        if len(after[node]) == 1 and after[node] <= before[node] - {None}:
            yield node, f"has no layer, but is between operators of {next(iter(after[node]))}"


def check_ends(program: ir.Program) -> Iterator[Finding]:
    """Check that number and shapes of placeholders and results agree with `inputs` and `outputs`."""
    placeholders, results = program.placeholders(), program.results()
    if len(placeholders) != len(program.inputs):
        yield None, f"the graph has {len(placeholders)} placeholders, the program {len(program.inputs)} inputs"
    if len(results) != len(program.outputs):
        yield None, f"the graph returns {len(results)} values, the program has {len(program.outputs)} outputs"
    for node, end in _ends(program):
        if not ir.is_tensor(node):
            yield None, f"{end.kind} {end.name!r} is {node}, not a tensor"
            continue
        shape = end.spec.local_shape(program.mesh) if program.stage >= Stage.LOCAL else end.spec.shape
        if tuple(ir.example(node).shape) != shape:
            yield (
                node,
                (
                    f"is {format_value(ir.value(node))}, {end.kind} {end.name!r} placed {end.spec} is of shape "
                    f"{list(shape)}"
                ),
            )


def _ends(program: ir.Program) -> list[tuple[fx.Node, ir.Input | ir.Output]]:
    return [
        *zip(program.placeholders(), program.inputs, strict=True),
        *zip(program.results(), program.outputs, strict=True),
    ]


def check_parts(program: ir.Program) -> Iterator[Finding]:
    """Check that no cast or copy drops imaginary parts, which PyTorch does with only a warning."""
    for node in program.calls():
        operand = {CAST: 0, COPY: 1}.get(node.target)
        if operand is not None and ir.example(node.args[operand]).is_complex() and not ir.example(node).is_complex():
            yield node, "drops the imaginary parts of complex numbers; use x.real if that is intended"


STRUCTURE = (check_lint, check_values, check_phases, check_layers, check_ends, check_parts)


# ---- recorded values -----------------------------------------------------------------------------


def check_recorded(program: ir.Program, avals: Avals) -> Iterator[Finding]:
    """Check that recorded shapes and dtypes equal the recomputed ones."""
    for node, computed in avals.values.items():
        if not _agree(ir.value(node), computed):
            yield node, f"records {_text(ir.value(node))}, computes {_text(computed)}"


def _agree(recorded: Any, computed: Any) -> bool:
    """Return True if a recorded value has the shapes and dtypes, or is the number, found."""
    if isinstance(computed, Value):
        return isinstance(recorded, torch.Tensor) and (recorded.shape, recorded.dtype) == computed.layout.entries
    if isinstance(computed, (tuple, list)):
        same_length = isinstance(recorded, (tuple, list)) and len(recorded) == len(computed)
        return same_length and all(map(_agree, recorded, computed))
    return _text(recorded) == _text(computed)


def _text(tree: Any) -> str:
    if isinstance(tree, Value):
        return str(tree.layout)
    if isinstance(tree, (tuple, list)):
        return f"({', '.join(map(_text, tree))})"
    return format_value(tree)


# ---- meaning -------------------------------------------------------------------------------------


def check_results_kept(before: ir.Program, program: ir.Program) -> Iterator[Finding]:
    """Check that each result is still returned, or stored: a buffer in place, a gradient by its parameter."""
    returned = {(output.kind, output.name) for output in program.outputs}
    inputs = {node: (i.kind, i.name) for node, i in zip(program.placeholders(), program.inputs, strict=True)}
    reads_batch = any(input_.kind == "batch" for input_ in program.inputs)
    if not reads_batch and {o.kind for o in program.outputs} <= {"gradient", "carried"}:
        return  # it continues from gradients that another program returned and stored
    stored = {inputs[n.args[0]] for n in program.calls() if n.target is COPY and n.args[0] in inputs}  # type: ignore[index]
    for node, output in zip(before.results(), before.outputs, strict=True):
        stores = [(kind, output.name) for kind in STORED_IN.get(output.kind, ())]
        if (output.kind, output.name) not in returned and not stored.intersection(stores):
            yield None, f"{output.kind} {output.name!r}, which %{node.name} was, is neither returned nor stored"


def check_layers_kept(before: ir.Program, program: ir.Program) -> Iterator[Finding]:
    """Check that each layer keeps at least one of the nodes that stand for its operators."""
    layers = {node.name: layer for node in before.calls() if (layer := ir.layer(node))}
    successors = {node: layer for node in program.calls() if (layer := layers.get(ir.stands_for(node)))}
    present = set(map(ir.layer, successors))
    for node, layer in successors.items():
        if layer not in present:
            yield node, f"and all other nodes that stand for operators of {layer} are outside of it"


def check_specs(program: ir.Program) -> Iterator[Finding]:
    """Check that placements use mesh axes at most once, and agree with the ends and with local shapes."""
    order = program.order
    for node, end in _ends(program):
        if message := _illegal(end.spec, program.mesh, order):
            yield node, f"{end.kind} {end.name!r}: {message}"
        if program.stage >= Stage.LOCAL and ir.spec(node) not in (None, end.spec):
            yield node, f"is placed {ir.spec(node)}, {end.kind} {end.name!r} is placed {end.spec}"
    for node in program.graph.nodes:
        spec = ir.spec(node)
        if spec is None or not ir.is_tensor(node):
            continue
        if message := _illegal(spec, program.mesh, order):
            yield node, message
        elif tuple(ir.example(node).shape) != spec.local_shape(program.mesh):
            yield (
                node,
                (
                    f"is {format_value(ir.value(node))}, placed {spec} it is of shape "
                    f"{list(spec.local_shape(program.mesh))}"
                ),
            )


def _illegal(spec: Spec, mesh: Mesh, order: Order) -> str:
    try:
        validate(spec, mesh)
    except ValueError as error:
        return str(error)
    others = {f.order for dim in spec.dims for f in dim if SEQUENCE_AXIS in f.axes} - {order}
    return f"spec {spec} is in another order over {SEQUENCE_AXIS} than the batch" if others else ""


def check_collectives(program: ir.Program) -> Iterator[Finding]:
    """Check that collectives run over an axis of the mesh and know its size."""
    for node in program.calls():
        axis = axis_of(node)
        if axis is None:
            continue
        if not program.mesh.has(axis):
            yield node, f"runs over axis {axis!r}, the mesh has {dict(program.mesh.sizes)}"
            continue
        communicators = axis, *(f"{axis}:{kind}" for kind in (GRADIENTS, EXCHANGES, RING))
        if (name := communicator_of(node)) not in communicators:
            yield node, f"names communicator {name!r}, axis {axis!r} has {', '.join(map(repr, communicators))}"
        arguments = bind(node)
        splits = [len(arguments[name]) for name in ("output_split_sizes", "input_split_sizes") if name in arguments]
        for parts in (*splits, *(arguments[name] for name in ("axis_size", "group_size") if name in arguments)):
            if parts != program.mesh[axis]:
                yield node, f"is for {parts} ranks, axis {axis!r} has {program.mesh[axis]}"


def check_waits(program: ir.Program) -> Iterator[Finding]:
    """Check that only waits use results of functional collectives and of ring shifts."""
    for node in program.calls():
        if not isinstance(node.target, OpOverload) or _is_wait(node):
            continue
        if node.target.namespace != "_c10d_functional" and node.target not in SHIFTS:
            continue
        parts = [user for user in node.users if user.target is operator.getitem]
        for result in parts if isinstance(ir.value(node), (tuple, list)) else [node]:
            if not result.users:
                yield result, "is never waited on"
            for user in result.users:
                if not _is_wait(user) or user.args[0] is not result:
                    yield user, f"uses %{result.name} before it is waited on"


def check_in_flight(program: ir.Program) -> Iterator[Finding]:
    """Check that the operand of a collective is not written before its wait."""
    writes: dict[fx.Node, fx.Node] = {}  # base -> last node that wrote it
    for node in program.calls():
        if is_mutable(node):
            writes[base_of(node.args[0])] = node  # type: ignore[arg-type]
        for operand in started(node).all_input_nodes if writes and _is_wait(node) else ():
            write = writes.get(base_of(operand))
            if write is not None and started(node) < write:
                sending = f"%{started(node).name}, which sends %{operand.name}"
                yield node, f"waits for {sending}: %{write.name} has overwritten it meanwhile"


def _is_wait(node: fx.Node) -> bool:
    return node.target in WAITS


# ---- promises of the stages -----------------------------------------------------------------------


def check_stage(program: ir.Program) -> Iterator[Finding]:
    """Check the promises of the program's stage."""
    if program.stage is Stage.LOCAL:
        yield from check_transitions(program)
        yield from check_replicate(program)
    if program.stage is Stage.JOINT:
        yield from check_unwritten(program)
    if program.stage >= Stage.JOINT:
        yield from check_gradients(program)
        yield from check_float8(program)
    if Stage.JOINT <= program.stage < Stage.BUCKETED:  # later, a bucket joins values that differ on other axes
        yield from check_copies(program)
    if program.stage >= Stage.EXPLICIT:
        yield from check_expanded(program)
    if program.stage >= Stage.ORDERED:
        yield from check_roles(program)


def check_unwritten(program: ir.Program) -> Iterator[Finding]:
    """Check that no operator writes in place: `cse` and `remat` would not keep its place among readers."""
    for node in program.calls():
        if is_mutable(node):
            yield node, "writes in place, which only updates may, at later stages; compute a new value"


FLOAT8_MULTIPLE = 16  # of torch._scaled_mm on CUDA


def check_float8(program: ir.Program) -> Iterator[Finding]:
    """Check that CUDA's kernel takes the operands of float8 matmuls: their layout, and multiples of 16 as dims."""
    for node in program.calls():
        if node.target is torch.ops.aten._scaled_mm.default:
            (_, inner), columns = ir.example(node.args[0]).shape, ir.example(node.args[1]).shape[1]
            strides = ir.example(node.args[1]).stride()
            if strides[0] != 1:
                yield node, f"needs %{node.args[1]} in contiguous columns, not strides {strides}"
            if inner % FLOAT8_MULTIPLE or columns % FLOAT8_MULTIPLE:
                yield node, f"needs inner dim and columns in multiples of {FLOAT8_MULTIPLE}, not {inner} and {columns}"


def check_expanded(program: ir.Program) -> Iterator[Finding]:
    """Check that no reshard operator is left, and that float8 travels as bytes, which every backend sends."""
    for node in program.calls():
        if node.target in RESHARD_OPS:
            yield node, "is a reshard operator, which `collectives` should have expanded"
        if isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional":
            dtypes = {x.dtype for x in map(ir.value, node.all_input_nodes) if isinstance(x, torch.Tensor)}
            for dtype in dtypes:
                if dtype.is_floating_point and dtype.itemsize == 1:
                    yield node, f"sends {dtype}, which backends do not; send its bytes as uint8"


def check_roles(program: ir.Program) -> Iterator[Finding]:
    """Check that every operator has a role in its layer, and none that contradicts its operands or users."""
    weights = set(weight_nodes(program))
    for node in program.calls():
        role = ir.record(node).role
        if role is None:
            yield node, f"has no role; record one of {', '.join(KINDS)}"
        elif contradiction := CONTRADICTIONS[role.kind](node, weights):
            yield node, f"is {contradiction}, its role is {role.kind}"


def not_prefetched(node: fx.Node, weights: Container[fx.Node]) -> str:
    """Return the reason why a node does not gather parameters ahead of their use, or ""."""
    return (
        ""
        if node in weights
        else f"{'a matmul or attention' if is_product(node) else 'computed'} of more than parameters"
    )


def not_late(node: fx.Node, weights: Container[fx.Node]) -> str:
    """Return the reason why a node's value has other uses than being sent and updating parameters, or ""."""
    if is_product(node) or ir.phase(node) == "forward":
        return "a matmul or attention" if is_product(node) else "in the forward"
    matmul = next((user for user in node.users if is_product(user) and ir.phase(user) == "backward"), None)
    return f"read by %{matmul}, a matmul or attention" if matmul else ""


def not_update(node: fx.Node, weights: Container[fx.Node]) -> str:
    """Return the reason why a node is differentiated or part of the backward, or ""."""
    return (
        f"a matmul or attention of the {ir.phase(node)}" if is_product(node) and ir.phase(node) != "optimizer" else ""
    )


def is_product(node: fx.Node) -> bool:
    """Return True if a node is a matmul, a convolution or an attention."""
    return isinstance(node.target, OpOverload) and formula_of(node.target) is not None


CONTRADICTIONS: dict[str, Callable[[fx.Node, Container[fx.Node]], str]] = {
    "own": lambda node, weights: "",
    "prefetch": not_prefetched,
    "late": not_late,
    "update": not_update,
}


def check_gradients(program: ir.Program) -> Iterator[Finding]:
    """Check that each parameter has one gradient with a matching placement, and none after the update."""
    counts = Counter(o.name for o in program.outputs if o.kind == "gradient")
    expected = {Stage.JOINT: 1, Stage.STEP: 0}.get(program.stage)
    for node, input_ in zip(program.placeholders(), program.inputs, strict=True):
        if input_.kind == "parameter" and expected is not None and counts[input_.name] != expected:
            yield node, f"parameter {input_.name!r} has {counts[input_.name]} gradients among the outputs"
    specs = {i.name: i.spec for i in program.inputs if i.kind == "parameter"}
    for node, output in zip(program.results(), program.outputs, strict=True):
        if output.kind == "gradient" and not is_gradient(output.spec, specs[output.name], program.mesh):
            yield node, f"gradient of {output.name!r} is placed {output.spec}, the parameter {specs[output.name]}"


def is_gradient(spec: Spec, parameter: Spec, mesh: Mesh) -> bool:
    """Return True if `spec` is the parameter's placement, or is partial on inner axes that shard the parameter."""
    pairs = [(f.axes, g.axes) for dim, full in zip(spec.dims, parameter.dims) for f, g in zip(dim, full)]
    same_sizes = [[f.size for f in dim] for dim in spec.dims] == [[f.size for f in dim] for dim in parameter.dims]
    gathered = {axis for axes, full in pairs for name in full[len(axes) :] for axis in mesh.over(name)}
    return same_sizes and gathered <= set(spec.partial_axes) and all(full[: len(axes)] == axes for axes, full in pairs)


def check_transitions(program: ir.Program) -> Iterator[Finding]:
    """Check that a reshard operator's operand and result have the states that it takes and gives."""
    for node in program.calls():
        if (op := RESHARD_OPS.get(node.target)) is None:
            continue
        before, after = ir.spec(node.args[0]), ir.spec(node)  # type: ignore[arg-type]
        for axis in program.mesh.over(axis_of(node) or ""):
            if before is not None and before.state(axis) not in op.takes:
                yield node, f"takes {' or '.join(op.takes)} on {axis!r}, its operand is {before.state(axis)}: {before}"
            if after is not None and after.state(axis) != op.gives:
                yield node, f"gives {op.gives} on {axis!r}, it is placed {after}"


def check_replicate(program: ir.Program) -> Iterator[Finding]:
    """Check that no value with a gradient is invariant on an axis on which other operands differ."""
    kinds = {n: i.kind for n, i in zip(program.placeholders(), program.inputs, strict=True)}
    graded = {n for n, kind in kinds.items() if kind == "parameter"}
    for node in program.calls():
        # a table only orders entries, so it does not change the terms of a gradient
        operands = [n for n in node.all_input_nodes if ir.is_tensor(n) and kinds.get(n) != "layout"]
        if _passes_gradient(node) and graded.intersection(node.all_input_nodes):
            graded.add(node)
        if node.target in RESHARD_OPS:
            continue
        placed = [(n, spec) for n in operands if (spec := ir.spec(n)) is not None]
        for axis in program.mesh.axes:
            differing = next((n for n, spec in placed if spec.state(axis) != "invariant"), None)
            invariant = next((n for n, spec in placed if n in graded and spec.state(axis) == "invariant"), None)
            if differing is not None and invariant is not None:
                message = f"uses %{invariant.name}, the same on every rank of {axis!r}, with %{differing.name}, placed "
                fix = ": its gradient would lack the other ranks' terms; put invariant_to_replicate before it"
                yield node, f"{message}{ir.spec(differing)}{fix}"


def _passes_gradient(node: fx.Node) -> bool:
    """Return True if gradients flow back through a node; the elements of a tuple are checked themselves."""
    is_float = not ir.is_tensor(node) or ir.example(node).is_floating_point()
    return is_float and node.target is not torch.ops.aten.detach.default


MEANING = (check_specs, check_collectives, check_waits, check_in_flight, check_stage)
