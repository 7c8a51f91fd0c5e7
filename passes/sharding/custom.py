"""Partition custom autograd functions: forward and backward are programs of their own, under the same rules.

    forward   x [3@dp_shard, 4], w [4] replicate(dp_shard)      placed as the operands of the call are
    backward  g [3@dp_shard, 4], saved x, w                     g is placed as the gradient of the result
              -> gradient of x [3@dp_shard, 4], of w [4] sum(dp_shard)

The backward returns gradients placed as the gradients of the operands: partial sums for replicate operands, and zeros
in padding. This holds for any backward: if it computes something from a zero gradient (`g + 0.01 * x`), it does so in
padding too, and zeros are written there afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.mesh import BLOCKS, Mesh
from passes.ir.operators import is_mutable, is_operator, is_random
from passes.ir.spec import Spec
from passes.rules import tensor_operands
from passes.sharding.normalize import Normalize, drops_entries
from passes.torch_private import LazyGraphModule
from passes.trace.builder import Builder
from passes.trace.editor import splice
from passes.trace.functions import Function, define, function_of, remember
from passes.trace.trace import UnknownTensor, trace

PLACES = ("coordinate", "layout")  # kinds of inputs that locate a rank's entries


def body_graph(name: str, fn: Callable[..., Any], examples: list[Tensor], ctx: ir.Context, own: bool) -> fx.Graph:
    """Trace a body of the custom function `name`; if `own`, the body may write into its arguments.

    An author may write into gradients, because nobody reads them afterwards. Raises Refused if the body writes into
    arguments that it does not own, or uses tensors that are not arguments.
    """
    with ctx.fake_mode, torch.no_grad():
        empties = [torch.empty(e.shape, dtype=e.dtype, device=e.device) for e in examples]
    try:
        graph = trace(lambda *t: tuple(fn(*t)), empties, ctx)
    except UnknownTensor as error:
        raise ir.Refused("shard", None, f"{name} uses {error}; make it an argument of the function") from error
    if any(is_random(n) or drops_entries(n) for n in graph.nodes if is_operator(n)):
        fix = "draw the numbers outside of it, and make them an argument of the function"
        raise ir.Refused("shard", None, f"{name} draws random numbers; {fix}")
    for node in [n for n in graph.nodes if is_mutable(n)]:  # tracing has removed writes into the body's own tensors
        if not own:
            fix = "call ctx.mark_dirty, or clone them first"
            raise ir.Refused("shard", None, f"{name} writes into its arguments; {fix}")
        graph.erase_node(node)
    return graph


def body_program(
    name: str,
    fn: Callable[..., Any],
    examples: list[Tensor],
    inputs: list[ir.Input],
    mesh: Mesh,
    ctx: ir.Context,
    backward: bool = False,
) -> ir.Program:
    """Trace a body of the custom function `name` over full tensors, and normalize it."""
    graph = body_graph(name, fn, examples, ctx, own=backward)
    results = graph.output_node().args[0]
    kind = "gradient" if backward else "metric"
    outputs = tuple(ir.Output(str(i), kind, Spec.whole(tuple(ir.example(n).shape))) for i, n in enumerate(results))  # type: ignore[arg-type]
    module = LazyGraphModule(torch.nn.Module(), graph)
    return Normalize()(ir.Program(module, tuple(inputs), outputs, mesh), ctx)[0]


def inline_custom_functions(program: ir.Program, ctx: ir.Context) -> ir.Program:
    """Replace custom functions by the operators of their forward, and normalize the program."""
    if not any(map(function_of, program.calls())):
        return program
    program = program.copy()
    for node in list(program.calls()):
        if function := function_of(node):
            with ir.at(node):
                graph = body_graph(function.name, function.forward, [ir.example(n) for n in node.args], ctx, False)
            output = graph.output_node()
            (results,) = output.args
            output.args = (results if len(results) > 1 else results[0],)  # as its operator returns them
            splice(node, graph, list(node.args), ctx)
    program.graph.eliminate_dead_code()
    return Normalize()(program, ctx)[0]


@dataclass(frozen=True, eq=False)
class Placed:
    """A custom function on operands of one kind, with the placements of operands and results; equal calls share it."""

    function: Function
    examples: tuple[Tensor, ...]  # operands of a call
    program: ir.Program
    plan: Any
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]


def place_forward(
    function: Function,
    examples: list[Tensor],
    specs: list[Spec],
    weights: list[bool],
    mesh: Mesh,
    ctx: ir.Context,
    propagate: Callable[[ir.Program], Any],
) -> Placed:
    """Place the forward body; an operand that the body reads only as a replicate copy is replicate from the start."""
    kinds = ["parameter" if w else "batch" for w in weights]

    def place(operand_specs: list[Spec]) -> Placed:
        inputs = [ir.Input(str(i), kind, spec) for i, (kind, spec) in enumerate(zip(kinds, operand_specs))]  # type: ignore
        program = body_program(function.name, function.forward, examples, inputs, mesh, ctx)
        plan = propagate(program)
        results = tuple(plan.current(n) for n in program.results())
        return Placed(function, tuple(examples), program, plan, tuple(operand_specs), results)

    mixed = {axis for axis in mesh.axes if any(spec.state(axis) != "invariant" for spec in specs)}
    specs = [replace(spec, fill=padding_kept(spec)) for spec in specs]
    placed = place(specs)
    replicate_specs = [
        with_replicate(spec, placeholder, placed, mixed, mesh)
        for spec, placeholder in zip(specs, placed.program.placeholders())
    ]
    return placed if replicate_specs == specs else place(replicate_specs)


def padding_kept(spec: Spec) -> float | None:
    """Return the padding value that conversions preserve: 0, because they pad with zeros; otherwise None."""
    return 0.0 if spec.fill == 0.0 else None


def gradient_of(spec: Spec) -> Spec:
    """Return the placement of a value's gradient, which is zero in padding: no result depends on padding."""
    return replace(spec.gradient(), fill=0.0)


def with_replicate(spec: Spec, placeholder: fx.Node, placed: Placed, mixed: set[str], mesh: Mesh) -> Spec:
    """Make an operand replicate on `mixed` axes, and on those on which all its uses in the body need it so.

    On a mixed axis other operands differ by rank, and the body may combine them with values computed from a copy.
    """
    needed = [
        d.operands[i]
        for user in placeholder.users
        if (d := placed.plan.decisions.get(user)) is not None
        for i, n in enumerate(tensor_operands(user))
        if n is placeholder
    ]
    replicate_axes = {a for a in mesh.axes if needed and all(w.state(a) == "replicate" for w in needed)}
    axes = [a for a in mesh.axes if spec.state(a) == "invariant" and a in mixed | replicate_axes]
    return replace(spec, replicate=(*spec.replicate, *axes))


def emit(
    builder: Builder,
    placed: Placed,
    values: list[fx.Node],
    propagate: Callable[[ir.Program], Any],
    partition: Callable[..., ir.Program],
) -> fx.Node:
    """Call the local operator; the first of equal calls defines it."""
    if placed not in builder.operators:
        builder.operators[placed] = partition_function(placed, builder.mesh, builder.ctx, propagate, partition)
    op, axes = builder.operators[placed]
    return builder.call(op, (*values, *(builder.coordinates[axis] for axis in axes)))


def partition_function(
    placed: Placed,
    mesh: Mesh,
    ctx: ir.Context,
    propagate: Callable[[ir.Program], Any],
    partition: Callable[..., ir.Program],
) -> tuple[Any, list[str]]:
    """Return the local operator of a placed function, with its gradient, and the axes whose coordinates it takes."""
    function, operands = placed.function, placed.operands
    forward = partition(placed.program, placed.plan, placed.results)
    outs = [ir.example(n) for n in placed.program.results()]
    gradients = [gradient_of(spec) for spec in placed.results[: function.results]]
    examples = [*placed.examples, *outs, *outs[: function.results]]
    specs = [*operands, *placed.results, *gradients]
    kinds = [i.kind for i in placed.program.inputs[: len(operands)]] + ["batch"] * len(specs)
    inputs = [ir.Input(str(i), kind, spec) for i, (kind, spec) in enumerate(zip(kinds, specs))]
    present: list[int] = []

    def differentiate(*tensors: Tensor) -> tuple[Tensor, ...]:
        grads = function.backward(*tensors)
        present[:] = [i for i, g in enumerate(grads) if g is not None]
        return tuple(grads[i] for i in present)

    program = body_program(function.name, differentiate, examples, inputs, mesh, ctx, backward=True)
    backward = partition(program, propagate(program), tuple(gradient_of(operands[i]) for i in present))
    return local_operator(function, forward, backward, present, len(operands))


def local_operator(
    function: Function, forward: ir.Program, backward: ir.Program, present: list[int], operands: int
) -> tuple[Any, list[str]]:
    """Define `local::name(*operands, *coordinates that the bodies read)` and its gradient, itself a local operator."""
    read_axes = {i.name for program in (forward, backward) for i in program.inputs if i.kind in PLACES}
    axes = [name for name in (*forward.mesh.names, BLOCKS) if name in read_axes]
    run_forward, run_backward = _bind_coordinates(forward, axes), _bind_coordinates(backward, axes)
    count, operand_count = len(forward.outputs), len([i for i in backward.inputs if i.kind not in PLACES])
    op = define("local", function.name, run_forward, operands + len(axes), count)
    backward_op = define("local", f"{function.name}_backward", run_backward, operand_count + len(axes), len(present))
    remember(op, run_forward)
    remember(backward_op, run_backward)

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs, *(output if isinstance(output, tuple) else (output,)))

    def differentiate(ctx: Any, *gradients: Tensor) -> tuple:
        saved = ctx.saved_tensors
        inputs, outs = saved[:operands], saved[operands + len(axes) :]
        coordinates = saved[operands : operands + len(axes)]
        incoming = [torch.zeros_like(o) if g is None else g for g, o in zip(gradients[: function.results], outs)]
        grads = backward_op(*inputs, *outs, *incoming, *coordinates)
        by_operand = dict(zip(present, grads if isinstance(grads, (tuple, list)) else (grads,)))
        return tuple(by_operand.get(i) for i in range(operands + len(axes)))

    torch.library.register_autograd(op.name().replace(".default", ""), differentiate, setup_context=setup)
    return op, axes


def _bind_coordinates(program: ir.Program, axes: list[str]) -> Callable[..., Any]:
    """Return a function that runs a local body, given the coordinates of all `axes` as its last arguments."""
    names = [i.name for i in program.inputs if i.kind in PLACES]

    def run(*tensors: Tensor) -> Any:
        values, coordinates = tensors[: len(tensors) - len(axes)], dict(zip(axes, tensors[len(tensors) - len(axes) :]))
        return fx.Interpreter(program.module).run(*values, *(coordinates[axis] for axis in names))

    return run
