"""Forward and backward in one flat graph: autograd, traced over the local forward program.

The boundary operators know their gradients, so the backward communication is derived, not written. Each
parameter's gradient leaves placed as the dual of the parameter: partial where the parameter varies.

Each record that autograd makes is linked, as it is made, to the node of the forward that made it:

    %mm = mm(%x, %w)  ->  MmBackward0, before which a hook stamps what is traced next: differentiates "mm"

A sum of gradients has the stamp of the record that yields its last term.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from passes.program import ir
from passes.program.functions import communicates, inline_functions
from passes.program.torch_private import lazy_graph_modules

COMPUTES, DIFFERENTIATES = "computes", "differentiates"  # the tracer's stamps: each names a node of the forward
MAY_BE_LOST = 0.05  # of the backward's nodes: without origins, what works by layer would silently do nothing


class Origins(fx.Interpreter):
    """Runs the forward so that what autograd does later is stamped with the node that it differentiates."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.known: set[torch.autograd.graph.Node] = set()
        self.stamp = contextlib.ExitStack()

    def run_node(self, n: fx.Node) -> Any:
        """The node's value; autograd's new records behind it are remembered as the node's."""
        result = super().run_node(n)
        values = result if isinstance(result, (tuple, list)) else (result,)
        waiting = [value.grad_fn for value in values if isinstance(value, Tensor)]
        while waiting:
            record = waiting.pop()
            if record is not None and record not in self.known:
                self.known.add(record)
                # a hook that held `self` would keep all of it alive: records are opaque to Python's collector
                record.register_prehook(functools.partial(enter, self.stamp, n.name))
                waiting += [earlier for earlier, _ in record.next_functions]
        return result


def enter(stamp: contextlib.ExitStack, name: str, gradients: Any) -> None:
    """Stamp what is traced from here on, and the sums of gradients that this completes, with a forward node."""
    stamp.close()
    stamp.enter_context(fx_traceback.annotate({DIFFERENTIATES: name}))


def differentiate(program: ir.Program, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The program's outputs and the gradient of its loss for each parameter (zeros where it has none)."""
    leaves = [v.detach().requires_grad_() if i.kind == "parameter" else v for i, v in zip(program.inputs, values)]
    wanted = [leaf for leaf, i in zip(leaves, program.inputs) if i.kind == "parameter"]
    origins = Origins(program.module)
    outputs = origins.run(*leaves)
    index = next(k for k, o in enumerate(program.outputs) if o.kind == "loss")
    of_loss = {DIFFERENTIATES: program.results()[index].name}
    with fx_traceback.annotate(of_loss):
        one = torch.ones_like(outputs[index])
    with origins.stamp:
        found = torch.autograd.grad(outputs[index], wanted, one, allow_unused=True)
    with fx_traceback.annotate(of_loss):
        gradients = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found)]
    return *outputs, *gradients


def annotate(joint: fx.Graph, forward: fx.Graph) -> list[fx.Node]:
    """Read the stamps: each node's phase, and its origin in the forward; returns nodes of the backward with none."""
    by_name, lost = {node.name: node for node in forward.nodes}, []
    for node in joint.nodes:
        stamps = node.meta.get("custom") or {}
        old = by_name.get(stamps.get(COMPUTES) or stamps.get(DIFFERENTIATES))
        phase = "forward" if COMPUTES in stamps else "backward"
        if old is not None:
            ir.copy_origin(node, old)
        elif node.op == "call_function":
            lost.append(node)
        if old is not None and phase == "forward":
            is_result = ir.is_tensor(node) and ir.is_tensor(old) and node.target == old.target
            ir.set_spec(node, ir.spec(old) if is_result else None)
            ir.set_stands_for(node, ir.stands_for(old) if is_result else "")
        ir.set_phase(node, phase)
    return lost


@dataclass(frozen=True)
class Joint:
    """Add the backward of the loss: outputs gain one gradient a parameter."""

    name: str = "joint"
    requires: frozenset[str] = frozenset({"local"})
    establishes: frozenset[str] = frozenset({"joint"})

    def __call__(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        forward = program.copy()
        for node in forward.graph.nodes:
            node.meta["custom"] = {COMPUTES: node.name}
        values = tuple(ir.example(n) for n in forward.placeholders())
        with ctx.fake_mode, fx_traceback.preserve_node_meta(), torch.enable_grad(), lazy_graph_modules():
            module = make_fx(lambda *v: differentiate(forward, v))(*values)
        gradients = tuple(
            ir.Output(i.name, "gradient", i.spec.gradient()) for i in program.inputs if i.kind == "parameter"
        )
        for node, old in zip((n for n in module.graph.nodes if n.op == "placeholder"), forward.placeholders()):
            node.meta.update(old.meta)
            node.name = old.name
        joint = program.with_graph(
            module.graph, outputs=program.outputs + gradients, facts=program.facts | self.establishes
        )
        drop_detached(joint.graph)
        lost = annotate(joint.graph, forward.graph)
        notes = report_lost(lost, _count(joint, "backward"))
        inline_functions(joint, ctx, but=communicates)  # those are one operator to remat
        functionalize(joint.graph)
        joint.graph.eliminate_dead_code()
        joint.module.recompile()
        for node, output in zip(joint.results(), joint.outputs):
            ir.set_spec(node, output.spec)
        counts = {phase: _count(joint, phase) for phase in ("forward", "backward")}
        return joint, ir.Report(counts | {"without origin": len(lost)}, notes)


def report_lost(lost: list[fx.Node], backward: int) -> tuple[str, ...]:
    """A note on each node of the backward without an origin; too many of them are an error."""
    if len(lost) > MAY_BE_LOST * backward:
        raise ir.CompileError(
            "joint",
            lost[0],
            f"and {len(lost) - 1} other of {backward} nodes of the backward are linked to no node of the forward: "
            "remat, bucketing and overlap by layer would do nothing",
        )
    return tuple(f"%{node.name}: linked to no node of the forward" for node in lost)


def drop_detached(graph: fx.Graph) -> None:
    """Once gradients are explicit, `detach` means nothing; what autograd keeps is traced as it or as `alias`."""
    for node in list(graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def functionalize(graph: fx.Graph) -> None:
    """Write updates of temporaries in place (some of PyTorch's own definitions have them) as new values."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    holders: dict[torch.UntypedStorage, list[fx.Node]] = collections.defaultdict(list)
    for node in list(graph.nodes):
        target = node.target
        if node.op != "call_function" or not hasattr(target, "_schema") or not target._schema.is_mutable:
            if ir.is_tensor(node):
                holders[ir.example(node).untyped_storage()].append(node)
            continue
        updated = node.args[0]
        is_shared = any(holder is not updated for holder in holders[ir.example(updated).untyped_storage()])
        if not target._opname.endswith("_") or updated.op == "placeholder" or is_shared:
            raise ir.CompileError("joint", node, f"{target} writes in place to a value that has views")
        holders[ir.example(updated).untyped_storage()] = [node]
        node.target = _functional(target)
        for user in list(updated.users):
            if order[user] > order[node]:
                user.replace_input_with(updated, node)


def _functional(target: Any) -> Any:
    """The overload that computes what an operator like `aten.pow_.Scalar` writes: `aten.pow.Tensor_Scalar`."""
    packet = getattr(torch.ops.aten, target._opname[:-1])
    wanted = [str(a.type) for a in target._schema.arguments]
    return next(
        op
        for name in packet.overloads()
        if (op := getattr(packet, name)) and [str(a.type) for a in op._schema.arguments] == wanted
    )


def _count(program: ir.Program, phase: str) -> int:
    return sum(ir.phase(n) == phase for n in program.calls())
