"""Forward and backward in one flat graph: autograd, traced over the local forward program.

The reshard operators know their gradients, so the backward's communication is derived, not written. Each parameter's
gradient is placed as the dual of the parameter: partial on axes on which the parameter is replicated.

A parameter without a gradient becomes a buffer: PyTorch's optimizers do not decay it either.

Each record that autograd makes is linked, when it is made, to the forward node that made it:

    %mm = mm(%x, %w)  ->  MmBackward0, whose hook marks the operators recorded next as differentiating %mm

A sum of gradients has the origin of the record that yields its last term.
"""

from __future__ import annotations

import collections
import functools
import weakref
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.operators import is_mutable, name_of
from passes.ir.stages import Stage
from passes.rules.recurrent import RECURRENT
from passes.torch_private import decomposition, step_by_step
from passes.trace.editor import inline
from passes.trace.functions import communicates, inline_functions
from passes.trace.trace import Recorder, Tape

SHOWN = 6  # most parameters named in a line
MAY_BE_LOST = 0.05  # of the backward's nodes: without origins, passes that work by layer would silently do nothing


class Origins(fx.Interpreter):
    """Runs the forward, and gives each recorded operator its origin: the node that it computes or differentiates."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.linked: set[torch.autograd.graph.Node] = set()
        self.phase: Literal["forward", "backward"] = "forward"
        self.origin: fx.Node | None = None
        self.lost: list[fx.Node] = []

    def stamp(self, phase: Literal["forward", "backward"], origin: fx.Node | None) -> None:
        """Set the phase and the origin of operators recorded from here on."""
        self.phase, self.origin = phase, origin

    def record_node(self, node: fx.Node) -> None:
        """Give a new node of the joint graph its phase and origin; nodes of the forward keep their placement."""
        if self.origin is not None:
            ir.copy_origin(node, self.origin)
            if self.phase == "forward" and ir.is_tensor(node) and node.target == self.origin.target:
                ir.update(node, spec=ir.spec(self.origin), stands_for=ir.stands_for(self.origin))
        elif node.op != "placeholder":
            self.lost.append(node)
        ir.update(node, phase=self.phase)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; link autograd's new records to it."""
        self.stamp("forward", n)
        result = super().run_node(n)
        self.stamp("backward", None)
        values = result if isinstance(result, (tuple, list)) else (result,)
        waiting = [value.grad_fn for value in values if isinstance(value, Tensor)]
        while waiting:
            record = waiting.pop()
            if record is not None and record not in self.linked:
                self.linked.add(record)
                # a reference to `self` in the hook would leak it: Python's collector does not see into records
                record.register_prehook(functools.partial(enter, weakref.ref(self), n))
                waiting += [earlier for earlier, _ in record.next_functions]
        return result


def enter(origins: weakref.ref[Origins], node: fx.Node, gradients: Any) -> None:
    """Set the origin to a forward node whose gradient is computed from here on, after the sums that it completes."""
    target = origins()
    assert target is not None
    target.stamp("backward", node)


def differentiate(program: ir.Program) -> tuple[fx.Graph, list[str], list[fx.Node]]:
    """Return one graph with the program and its loss's gradients, the parameters' names, and nodes without origin.

    If one pipeline stage's copy of a parameter has a gradient, all copies have one.
    """
    origins = Origins(program.module)
    tape = Tape(origins.record_node)
    values = [ir.example(node).detach() for node in program.placeholders()]
    for value in values:
        tape.input(value)
    leaves = [v.requires_grad_() if i.kind == "parameter" else v for i, v in zip(program.inputs, values)]
    parameters = {i.name: i for i in program.inputs if i.kind == "parameter"}
    wanted = {i.name: leaf for leaf, i in zip(leaves, program.inputs) if i.kind == "parameter"}
    index = next(k for k, o in enumerate(program.outputs) if o.kind == "loss")
    with Recorder(tape):
        outputs = origins.run(*leaves)
        origins.stamp("backward", program.results()[index])
        ones = torch.ones_like(outputs[index])
        origins.stamp("backward", None)
        by_name: dict[str, torch.Tensor | None] = dict.fromkeys(wanted)
        if outputs[index].requires_grad:
            gradients = torch.autograd.grad(outputs[index], [*wanted.values()], ones, allow_unused=True)
            by_name = dict(zip(wanted, gradients))
        origins.stamp("backward", program.results()[index])
        trained = {parameters[name].original for name, gradient in by_name.items() if gradient is not None}
        names = [name for name, parameter in parameters.items() if parameter.original in trained]
        filled = [torch.zeros_like(wanted[n]) if (g := by_name[n]) is None else g for n in names]
    return tape.output((*outputs, *filled)), names, origins.lost


def unroll(program: ir.Program, ctx: ir.Context) -> ir.Program:
    """Return the program with recurrent networks unrolled over time: PyTorch lacks their gradients on some devices."""
    if not any(name_of(n) in RECURRENT for n in program.calls()):
        return program
    program = program.copy()
    with step_by_step():
        for node in [n for n in program.calls() if name_of(n) in RECURRENT]:
            inline(node, decomposition(node.target), ctx)
    return program


@dataclass(frozen=True)
class Joint(ir.Pass):
    """Add the backward of the loss: outputs gain one gradient for each parameter that takes part."""

    name = "joint"
    takes = (Stage.LOCAL,)
    gives = Stage.JOINT

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if not any(i.kind == "parameter" for i in program.inputs):
            problem = "none of its parameters that the loss uses requires a gradient: nothing to train"
            raise ir.Refused("model", None, problem)
        program = unroll(program, ctx)
        with ctx.fake_mode, torch.enable_grad():
            graph, names, lost = differentiate(program)
        parameters = {i.name: i for i in program.inputs if i.kind == "parameter"}
        idle = dict.fromkeys(parameter.original for name, parameter in parameters.items() if name not in names)
        if not names:
            raise ir.Refused("model", None, "the loss depends on none of its parameters: nothing to train")
        gradients = tuple(ir.Output(name, "gradient", parameters[name].spec.gradient()) for name in names)
        inputs = tuple(replace(i, kind="frozen") if i.original in idle else i for i in program.inputs)
        for node, old in zip(graph.find_nodes(op="placeholder"), program.placeholders()):
            ir.set_record(node, ir.record(old))
            node.name = old.name
        joint = program.with_graph(graph, inputs=inputs, outputs=program.outputs + gradients)
        drop_detached(joint.graph)
        lost = [node for node in lost if node.users]
        notes, remarks = report_lost(lost, _count(joint, "backward")), report_idle([*idle], program)
        inline_functions(joint, ctx, but=communicates)  # remat treats each of those as one operator
        functionalize(joint.graph)
        joint.graph.eliminate_dead_code()
        joint.module.recompile()
        for node, output in zip(joint.results(), joint.outputs):
            ir.set_spec(node, output.spec)
        counts = {phase: _count(joint, phase) for phase in ("forward", "backward")}
        return joint, ir.Report(counts | {"without origin": len(lost)}, notes, remarks=remarks)


def report_idle(names: list[str], program: ir.Program) -> tuple[str, ...]:
    """Return a line on parameters that take no part, if there are any."""
    if not names:
        return ()
    left_out = sum(fold.left_out for fold in program.folds)
    layers = f", and those of {left_out} layers like them" if left_out else ""
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "") + layers
    return (f"parameters on which the loss does not depend stay unchanged: {shown}",)


def report_lost(lost: list[fx.Node], backward: int) -> tuple[str, ...]:
    """Return a note for each node of the backward without an origin; raise CompileError if there are too many."""
    if len(lost) > MAY_BE_LOST * backward:
        raise ir.CompileError(
            "joint",
            lost[0],
            f"and {len(lost) - 1} other of {backward} nodes of the backward are linked to no node of the forward: "
            "remat, bucketing and overlap by layer would do nothing",
        )
    return tuple(f"%{node.name}: linked to no node of the forward" for node in lost)


def drop_detached(graph: fx.Graph) -> None:
    """Drop `detach` and `alias`: once gradients are explicit, they do nothing."""
    for node in list(graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


# operators that take entries of a value, and operators that write them back
SCATTERS = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
    torch.ops.aten.as_strided.default: torch.ops.aten.as_strided_scatter.default,
    torch.ops.aten.diagonal.default: torch.ops.aten.diagonal_scatter.default,
}


def functionalize(graph: fx.Graph) -> None:
    """Replace in-place updates of temporaries, as in some of PyTorch's own definitions, by new values."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    holders: dict[torch.UntypedStorage, list[fx.Node]] = collections.defaultdict(list)
    for node in list(graph.nodes):
        target = node.target
        if not is_mutable(node):
            if ir.is_tensor(node):
                holders[ir.example(node).untyped_storage()].append(node)
            continue
        updated = view_chain(node.args[0])
        stale = [h for h in holders[ir.example(updated[0]).untyped_storage()] if h not in updated]
        is_shared = any(order[user] > order[node] for holder in stale for user in holder.users)
        if not target._opname.endswith("_") or updated[-1].op == "placeholder" or is_shared:
            raise ir.CompileError("joint", node, f"{target} writes in place to a value that has views")
        node.target = _functional(target)
        written = [node]
        for view, full in zip(updated, updated[1:]):
            written.append(write_back(graph, view, full, written[-1]))
            order[written[-1]] = order[node]
        for old, new in zip(updated, written):
            for user in [user for user in old.users if order[user] > order[node]]:
                user.replace_input_with(old, new)
        holders[ir.example(node).untyped_storage()] = written


def view_chain(node: Any) -> list[fx.Node]:
    """Return the node, the value from whose entries it is taken, and so on; the full value last."""
    chain = [node]
    while chain[-1].target in SCATTERS:
        chain.append(chain[-1].args[0])
    return chain


def write_back(graph: fx.Graph, view: fx.Node, full: fx.Node, value: fx.Node) -> fx.Node:
    """Return the full value with a view of it overwritten."""
    with graph.inserting_after(value):
        new = graph.call_function(SCATTERS[view.target], (full, value, *view.args[1:]), view.kwargs)
    ir.set_value(new, ir.value(full))
    ir.copy_origin(new, value)
    return new


def _functional(target: Any) -> Any:
    """Return the functional overload of an in-place operator: `aten.pow.Tensor_Scalar` for `aten.pow_.Scalar`."""
    packet = getattr(torch.ops.aten, target._opname[:-1])
    wanted = [str(a.type) for a in target._schema.arguments]
    return next(
        op
        for name in packet.overloads()
        if (op := getattr(packet, name)) and [str(a.type) for a in op._schema.arguments] == wanted
    )


def _count(program: ir.Program, phase: str) -> int:
    return sum(ir.phase(n) == phase for n in program.calls())
