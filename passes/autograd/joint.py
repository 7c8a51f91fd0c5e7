"""Forward and backward in one flat graph: autograd, traced over the local forward program.

The boundary operators know their gradients, so the backward communication is derived, not written. Each
parameter's gradient leaves placed as the dual of the parameter: partial where the parameter varies.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from passes.program import ir
from passes.program.functions import communicates, inline_functions
from passes.program.torch_private import lazy_graph_modules, setup_stacktrace_preservation_hooks


def differentiate(program: ir.Program, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The program's outputs and the gradient of its loss for each parameter (zeros where it has none)."""
    leaves = [v.detach().requires_grad_() if i.kind == "parameter" else v for i, v in zip(program.inputs, values)]
    outputs = fx.Interpreter(program.module).run(*leaves)
    loss = next(out for out, o in zip(outputs, program.outputs) if o.kind == "loss")
    setup_stacktrace_preservation_hooks([loss.grad_fn])
    wanted = [leaf for leaf, i in zip(leaves, program.inputs) if i.kind == "parameter"]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    gradients = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found)]
    return *(out.detach() for out in outputs), *gradients


def annotate(joint: fx.Graph, forward: fx.Graph, loss: fx.Node) -> None:
    """Mark nodes behind the loss as backward and give each the origin of the forward node it differentiates."""
    origins: dict[Any, fx.Node] = {}
    by_name = {node.name: node for node in forward.nodes}
    is_backward = False
    for node in joint.nodes:
        ir.set_phase(node, "backward" if is_backward else "forward")
        number = node.meta.get("seq_nr")
        custom = node.meta.get("custom") or {}
        if not is_backward and custom.get("node") in by_name:
            origins[number] = by_name[custom["node"]]
            old = origins[number]
            ir.copy_origin(node, old)
            spec = ir.spec(old)
            is_result = ir.is_tensor(node) and ir.is_tensor(old) and node.target == old.target
            ir.set_spec(node, spec if is_result else None)
            ir.set_stands_for(node, ir.stands_for(old) if is_result else "")
        elif is_backward and number in origins:
            ir.copy_origin(node, origins[number])
            ir.set_phase(node, "backward")
        is_backward = is_backward or node is loss


@dataclass(frozen=True)
class Joint:
    """Add the backward of the loss: outputs gain one gradient a parameter."""

    name: str = "joint"
    requires: frozenset[str] = frozenset({"local"})
    establishes: frozenset[str] = frozenset({"joint"})

    def __call__(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        forward = program.copy()
        for node in forward.graph.nodes:
            node.meta["custom"] = {"node": node.name}
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
        index = next(k for k, o in enumerate(program.outputs) if o.kind == "loss")
        annotate(joint.graph, forward.graph, _before_detach(joint.results()[index]))
        drop_detach(joint.graph)
        inline_functions(joint, ctx, but=communicates)  # those are one operator to remat
        functionalize(joint.graph)
        joint.graph.eliminate_dead_code()
        joint.module.recompile()
        for node, output in zip(joint.results(), joint.outputs):
            ir.set_spec(node, output.spec)
        return joint, ir.Report({"forward": _count(joint, "forward"), "backward": _count(joint, "backward")})


def _before_detach(node: fx.Node) -> fx.Node:
    while node.target is torch.ops.aten.detach.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def drop_detach(graph: fx.Graph) -> None:
    """Once gradients are explicit, `detach` means nothing."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
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
