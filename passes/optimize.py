"""Reduce, clip and apply the gradients in the same graph; parameters and moments change in place.

    g = mm(...)              partial over dp_replicate
becomes
    g = psum(g, "dp_replicate")
    norm = sqrt(psum(sum(g * g), "dp_shard"))
    copy_(w, w - lr * min(1, max_norm / norm) * ...)

Every gradient arrives as a partial sum on the axes where its parameter varies and is reduced here, once. The
norm is that of the full gradient: squares of shards are added over the axes that shard the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from passes import boundary, ir
from passes.optimizers import Optimizer, arithmetic
from passes.rewrite import graft, trace
from passes.spec import Spec

aten = torch.ops.aten


class Appender:
    """Appends traced functions to a graph, before its output; a function is traced once a signature."""

    def __init__(self, program: ir.Program, ctx: ir.Context, phase: str):
        self.graph, self.ctx, self.phase = program.graph, ctx, phase
        self.traced: dict[Any, fx.GraphModule] = {}

    def call(self, key: Any, fn: Callable[..., Any], *inputs: fx.Node) -> Any:
        """The result of `fn` on the nodes' values; `key` tells functions of the same input shapes apart."""
        values = [ir.example(n) for n in inputs]
        signature = (key, tuple((tuple(v.shape), v.dtype, v.stride()) for v in values))
        if signature not in self.traced:
            with torch.no_grad(), self.ctx.fake_mode:
                fresh = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
            self.traced[signature] = trace(lambda *v: fn(*v), fresh, self.ctx)
        with self.graph.inserting_before(self.graph.output_node()):
            new, result = graft(self.graph, self.traced[signature].graph, list(inputs))
        for node in new:
            ir.set_phase(node, self.phase)
        return result

    def write(self, target: fx.Node, new: fx.Node) -> None:
        """Store a value into an input, in place."""
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.call_function(aten.copy_.default, (target, new))
        ir.set_value(node, ir.example(target))
        ir.set_phase(node, self.phase)

    def placeholder(self, name: str, val: Tensor, spec: Spec) -> fx.Node:
        """A new input, after the others."""
        last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(name)
        ir.set_value(node, val)
        ir.set_spec(node, spec)
        return node


def reduce_gradient(append: Appender, gradient: fx.Node, spec: Spec, wire: torch.dtype | None) -> fx.Node:
    """The gradient with its partial sums completed, one `psum` an axis."""
    dtype = ir.example(gradient).dtype
    for axis in spec.partial_axes:
        gradient = append.call(("psum", axis), lambda g, axis=axis: boundary.psum(g, axis, dtype, wire), gradient)
    return gradient


def squared_norm(append: Appender, gradients: Sequence[fx.Node], specs: Sequence[Spec]) -> fx.Node:
    """The square of the norm of all gradients together, 0-d fp32 or wider, the same on every rank."""
    groups: dict[tuple[str, ...], list[fx.Node]] = {}
    for gradient, spec in zip(gradients, specs, strict=True):
        square = append.call("square", lambda g: g.to(arithmetic(g.dtype)).square().sum(), gradient)
        groups.setdefault(tuple(sorted(spec.sharded)), []).append(square)
    totals = []
    for axes, squares in groups.items():
        total = append.call(("add", len(squares)), lambda *s: torch.stack(s).sum(), *squares)
        for axis in axes:
            total = append.call(("psum", axis), lambda x, axis=axis: boundary.psum(x, axis, x.dtype, None), total)
        totals.append(total)
    return append.call(("add", len(totals)), lambda *s: torch.stack(s).sum(), *totals)


@dataclass(frozen=True)
class Optimize:
    """Complete the step: outputs become the loss (if the program has one) and the gradient norm.

    Gradients are reduced in `reduce_dtype` (None: their own), scaled by `scale` and clipped to `max_norm`
    (None: not clipped).
    """

    optimizer: Optimizer
    max_norm: float | None = None
    reduce_dtype: torch.dtype | None = None
    scale: float = 1.0
    name: str = "optimize"
    requires: frozenset[str] = frozenset({"joint"})
    establishes: frozenset[str] = frozenset({"step"})

    def __call__(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        append = Appender(program, ctx, "optimizer")
        parameters = {i.name: (n, i) for n, i in zip(program.placeholders(), program.inputs) if i.kind == "parameter"}
        graded = [(o.name, n, o.spec) for n, o in zip(program.results(), program.outputs) if o.kind == "gradient"]
        names = [name for name, _, _ in graded]
        reduced = [reduce_gradient(append, n, spec, self.reduce_dtype) for _, n, spec in graded]
        norm, factor = self.clip(append, reduced, [replace(spec, partial=()) for _, _, spec in graded])
        scalars = [self.scalar(append, name, program) for name in ("lr", "step")]
        lr, step = (node for node, _ in scalars)
        step_now = append.call("count", lambda s: s + 1, step)
        moments = [self.moment_inputs(append, *parameters[name]) for name in names]
        for name, gradient, kept in zip(names, reduced, moments):
            self.apply(append, parameters[name][0], gradient, [n for n, _ in kept], lr, step_now, factor)
        append.write(step, step_now)
        for total in (n for n, i in zip(program.placeholders(), program.inputs) if i.kind == "gradient"):
            append.write(total, append.call("clear", torch.zeros_like, total))
        added = [*scalars, *(pair for kept in moments for pair in kept)]
        inputs = (*program.inputs, *(i for _, i in added))
        program = self.finish(program, append, inputs, norm)
        return program, ir.Report({"parameters": len(names), "moments": sum(map(len, moments))})

    def clip(self, append: Appender, gradients, specs) -> tuple[fx.Node, fx.Node]:
        """(norm of the scaled gradients, factor to scale each by), both 0-d."""
        square = squared_norm(append, gradients, specs)
        norm = append.call("norm", lambda s: s.sqrt() * self.scale, square)
        if self.max_norm is None:
            return norm, append.call("factor", lambda n: torch.full_like(n, self.scale), norm)
        factor = append.call("factor", lambda n: self.scale * (self.max_norm / (n + 1e-6)).clamp(max=1.0), norm)
        return norm, factor

    def scalar(self, append: Appender, name: str, program: ir.Program) -> tuple[fx.Node, ir.Input]:
        """A 0-d fp64 input that is fed as a value."""
        device = ir.example(program.placeholders()[0]).device
        with append.ctx.fake_mode:
            val = torch.zeros((), dtype=torch.float64, device=device)
        kind = "scalar" if name == "lr" else "moment"
        return append.placeholder(name, val, Spec(())), ir.Input(name, kind, Spec(()))  # type: ignore[arg-type]

    def moment_inputs(self, append: Appender, parameter: fx.Node, given: ir.Input) -> list[tuple[fx.Node, ir.Input]]:
        """The optimizer state of one parameter, placed as it is."""
        spec = replace(given.spec, varying=())
        found = []
        for moment in self.optimizer.moments:
            val = ir.example(parameter).new_empty(ir.example(parameter).shape)
            node = append.placeholder(f"{moment}_{parameter.name}", val, spec)
            found.append((node, ir.Input(f"{moment}.{given.name}", "moment", spec)))
        return found

    def apply(
        self,
        append: Appender,
        parameter: fx.Node,
        gradient: fx.Node,
        moments: list[fx.Node],
        lr: fx.Node,
        step: fx.Node,
        factor: fx.Node,
    ) -> None:
        """Update one parameter and its moments in place."""

        def update(p, g, lr, step, factor, *kept):
            wide = arithmetic(p.dtype)
            new, new_kept = self.optimizer.update(p, g.to(wide) * factor.to(wide), kept, lr, step)
            return new.to(p.dtype), *(n.to(k.dtype) for n, k in zip(new_kept, kept))

        new, *new_moments = append.call("update", update, parameter, gradient, lr, step, factor, *moments)
        append.write(parameter, new)
        for moment, value in zip(moments, new_moments):
            append.write(moment, value)

    def finish(self, program: ir.Program, append: Appender, inputs, norm: fx.Node) -> ir.Program:
        """Return the loss and the norm; new values of buffers are stored in place."""
        given = {i.name: n for n, i in zip(program.placeholders(), inputs) if i.kind == "buffer"}
        results, outputs = [], []
        for node, output in zip(program.results(), program.outputs):
            if output.kind == "buffer":
                append.write(given[output.name], node)
            elif output.kind == "loss":
                results.append(node)
                outputs.append(output)
        results.append(norm)
        outputs.append(ir.Output("grad_norm", "metric", Spec(())))
        program.graph.output_node().args = (tuple(results),)
        program.module.recompile()
        return replace(program, inputs=tuple(inputs), outputs=tuple(outputs), facts=program.facts | self.establishes)
