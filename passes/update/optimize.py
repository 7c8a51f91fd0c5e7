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

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from passes.program import boundary, ir
from passes.program.mesh import Mesh
from passes.program.record import trace
from passes.program.rewrite import graft
from passes.program.spec import Spec
from passes.sharding.random import global_index, uniform_at
from passes.update.moments import Codec, Format, Wide, codec
from passes.update.optimizers import Optimizer, arithmetic, cast, real, stored

aten = torch.ops.aten


class Appender:
    """Appends traced functions to a graph, before its output; a function is traced once a signature."""

    def __init__(self, program: ir.Program, ctx: ir.Context, phase: str):
        self.graph, self.ctx, self.phase = program.graph, ctx, phase
        self.last = program.placeholders()[-1]
        self.traced: dict[Any, fx.Graph] = {}
        self.parameter = ""  # whose update is being appended

    def call(self, key: Any, fn: Callable[..., Any], *inputs: fx.Node) -> Any:
        """The result of `fn` on the nodes' values; `key` tells functions of the same input shapes apart."""
        values = [ir.example(n) for n in inputs]
        signature = (key, tuple((tuple(v.shape), v.dtype, v.stride()) for v in values))
        if signature not in self.traced:
            with torch.no_grad(), self.ctx.fake_mode:
                fresh = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
            self.traced[signature] = trace(fn, fresh, self.ctx)
        with self.graph.inserting_before(self.graph.output_node()):
            new, result = graft(self.graph, self.traced[signature], list(inputs))
        for node in new:
            self.mark(node)
        return result

    def mark(self, node: fx.Node) -> None:
        """Say where a node comes from."""
        ir.set_phase(node, self.phase)
        ir.set_parameter(node, self.parameter)

    def write(self, target: fx.Node, new: fx.Node) -> None:
        """Store a value into an input, in place."""
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.call_function(aten.copy_.default, (target, new))
        ir.set_value(node, ir.example(target))
        self.mark(node)

    def placeholder(self, name: str, val: Tensor, spec: Spec) -> fx.Node:
        """A new input, after the others."""
        with self.graph.inserting_after(self.last):
            node = self.last = self.graph.placeholder(name)
        ir.set_value(node, val)
        ir.set_spec(node, spec)
        return node


def coordinates(program: ir.Program, append: Appender) -> tuple[dict[str, fx.Node], list[tuple[fx.Node, ir.Input]]]:
    """The rank's coordinate on every axis, and those of them that had to be added to the inputs."""
    given = zip(program.placeholders(), program.inputs)
    found = {i.name: n for n, i in given if i.kind == "coordinate"}
    added = []
    for axis in program.mesh.names:
        if axis not in found:
            device = ir.example(program.placeholders()[0]).device
            with append.ctx.fake_mode:
                val = torch.zeros((), dtype=torch.int64, device=device)
            spec = Spec((), varying=program.mesh.over(axis))
            found[axis] = append.placeholder(f"place_{axis}", val, spec)
            added.append((found[axis], ir.Input(axis, "coordinate", spec)))
    return found, added


def round_at_random(x: Tensor, step: Tensor, site: int, index: Tensor) -> Tensor:
    """f32 -> bf16, up or down with the odds that keep the mean (as torchao.optim's `bf16_stochastic_round`)."""
    draw = (uniform_at(index, step.to(torch.int64), site) * 2**16).to(torch.int32)
    bits = (x.view(torch.int32) + draw) & -(2**16)
    return bits.view(torch.float32).to(torch.bfloat16)


def reduce_gradient(
    append: Appender, name: str, gradient: fx.Node, axes: Iterable[str], wire: torch.dtype | None
) -> fx.Node:
    """A parameter's gradient with its partial sums completed, one `psum` an axis."""
    append.parameter = name
    dtype = ir.example(gradient).dtype
    for axis in axes:
        gradient = append.call(("psum", axis), lambda g, axis=axis: boundary.psum(g, axis, dtype, wire), gradient)
    return gradient


def squared_norm(
    append: Appender, names: Sequence[str], gradients: Sequence[fx.Node], specs: Sequence[Spec]
) -> fx.Node:
    """The square of the norm of all parameters' gradients together, 0-d fp32 or wider, the same on every rank."""
    sums: dict[tuple[str, ...], fx.Node] = {}
    for name, gradient, spec in zip(names, gradients, specs, strict=True):
        append.parameter, axes = name, tuple(sorted(spec.sharded))
        if axes not in sums:
            sums[axes] = append.call("square", square, gradient)
        else:  # one after another, so that every parameter's term is computed alike
            sums[axes] = append.call("add square", lambda total, g: total + square(g), sums[axes], gradient)
    append.parameter, totals = "", []
    for axes, total in sums.items():
        for axis in axes:
            total = append.call(("psum", axis), lambda x, axis=axis: boundary.psum(x, axis, x.dtype, None), total)
        totals.append(total)
    return append.call(("add", len(totals)), lambda *s: torch.stack(s).sum(), *totals)


def square(gradient: Tensor) -> Tensor:
    """The sum of a gradient's squares, 0-d fp32 or wider."""
    return real(gradient, arithmetic(gradient.dtype)).square().sum()


@dataclass(frozen=True)
class Optimize:
    """Complete the step: outputs become the loss (if the program has one) and the gradient norm.

    Gradients are reduced in `reduce_dtype` (None: their own), scaled by `scale` and clipped to `max_norm`
    (None: not clipped). Moments are stored as `state` says (None: in the parameter's dtype), eight bits with a scale
    every `block` entries. `stochastic`: bf16 parameters are rounded at random, keyed by step and global index.
    """

    optimizer: Optimizer
    max_norm: float | None = None
    reduce_dtype: torch.dtype | None = None
    scale: float = 1.0
    state: Format | None = None
    block: int = 256
    stochastic: bool = False
    name: str = "optimize"
    requires: frozenset[str] = frozenset({"joint"})
    establishes: frozenset[str] = frozenset({"step"})

    def __call__(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        append = Appender(program, ctx, "optimizer")
        parameters = {i.name: (n, i) for n, i in zip(program.placeholders(), program.inputs) if i.kind == "parameter"}
        graded = [(o.name, n, o.spec) for n, o in zip(program.results(), program.outputs) if o.kind == "gradient"]
        names = [name for name, _, _ in graded]
        partial = [program.mesh.flatten(spec.partial_axes) for _, _, spec in graded]
        reduced = [
            reduce_gradient(append, name, n, axes, self.reduce_dtype) for (name, n, _), axes in zip(graded, partial)
        ]
        norm, factor = self.clip(append, names, reduced, [replace(spec, partial=()) for _, _, spec in graded])
        scalars = [self.scalar(append, name, program) for name in ("lr", "step")]
        lr, step = (node for node, _ in scalars)
        step_now = append.call("count", lambda s: s + 1, step)
        wide = dict.fromkeys(arithmetic(ir.example(parameters[name][0]).dtype) for name in names)
        shared = {dtype: self.shared(append, dtype, lr, step_now, factor) for dtype in wide}
        places, added = coordinates(program, append) if self.stochastic else ({}, [])
        added += scalars
        for site, (name, gradient) in enumerate(zip(names, reduced)):
            update = Update(self, program.mesh, parameters[name][1], ir.example(parameters[name][0]).dtype, site)
            append.parameter = name
            added += update.append(append, parameters[name][0], gradient, shared, step_now, places)
        for total, given in zip(program.placeholders(), program.inputs):
            if given.kind == "gradient":
                append.parameter = given.name
                append.write(total, append.call("clear", torch.zeros_like, total))
        append.parameter = ""
        append.write(step, step_now)
        order = {node: k for k, node in enumerate(program.placeholders())}
        inputs = (*program.inputs, *(i for _, i in sorted(added, key=lambda pair: order[pair[0]])))
        program = self.finish(program, append, inputs, norm)
        return program, self.report(program, [parameters[name] for name in names])

    def report(self, program: ir.Program, parameters: Sequence[tuple[fx.Node, ir.Input]]) -> ir.Report:
        """How many parameters and moments there are; refuses what changes nothing, names what is stored otherwise."""
        notes = []
        if self.state in ("int8", "float8"):
            updates = [Update(self, program.mesh, given, ir.example(node).dtype) for node, given in parameters]
            wide = [u.given.name for u in updates if any(isinstance(c, Wide) for c in u.codecs)]
            if len(wide) == len(parameters):
                fix = f"no parameter has rows of whole blocks of {self.block}; use a smaller one, or optim=adamw"
                raise ir.Refused("optimize", None, f"optim.block: {fix}")
            if wide:
                notes.append(f"moments stored in fp32, small or their rows are not whole blocks: {', '.join(wide)}")
        if self.stochastic and all(ir.example(node).dtype != torch.bfloat16 for node, _ in parameters):
            fix = "no parameter is stored in bfloat16; set train.dtype=bfloat16"
            raise ir.Refused("optimize", None, f"optim.stochastic_rounding: {fix}")
        counts = {"parameters": len(parameters), "moments": len(parameters) * len(self.optimizer.moments)}
        return ir.Report(counts, tuple(notes))

    def state_bytes(self, program: ir.Program) -> int:
        """Bytes of the moments of all parameters of a program on one rank."""
        given = [(n, i) for n, i in zip(program.placeholders(), program.inputs) if i.kind == "parameter"]
        updates = (Update(self, program.mesh, i, ir.example(n).dtype) for n, i in given)
        parts = (part for u in updates for c in u.codecs for part in c.parts(u.spec, program.mesh))
        return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype, _ in parts)

    def clip(self, append: Appender, names, gradients, specs) -> tuple[fx.Node, fx.Node]:
        """(norm of the scaled gradients, factor to scale each by), both 0-d."""
        square = squared_norm(append, names, gradients, specs)
        norm = append.call("norm", lambda s: s.sqrt() * self.scale, square)
        if self.max_norm is None:
            return norm, append.call("factor", lambda n: torch.full_like(n, self.scale), norm)
        factor = append.call("factor", lambda n: self.scale * (self.max_norm / (n + 1e-6)).clamp(max=1.0), norm)
        return norm, factor

    def shared(
        self, append: Appender, dtype: torch.dtype, lr: fx.Node, step: fx.Node, factor: fx.Node
    ) -> tuple[fx.Node, ...]:
        """What updates in a dtype share, 0-d: the factor of gradients, and the optimizer's scalars."""

        def scalars(lr: Tensor, step: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
            return cast(factor, dtype), *self.optimizer.scalars(cast(lr, dtype), cast(step, dtype))

        return tuple(append.call(("scalars", dtype), scalars, lr, step, factor))

    def scalar(self, append: Appender, name: str, program: ir.Program) -> tuple[fx.Node, ir.Input]:
        """A 0-d fp64 input that is fed as a value."""
        device = ir.example(program.placeholders()[0]).device
        with append.ctx.fake_mode:
            val = torch.zeros((), dtype=torch.float64, device=device)
        kind = "scalar" if name == "lr" else "moment"
        return append.placeholder(name, val, Spec(())), ir.Input(name, kind, Spec(()))  # type: ignore[arg-type]

    def finish(self, program: ir.Program, append: Appender, inputs, norm: fx.Node) -> ir.Program:
        """Return the loss, metrics and the norm; new values of buffers are stored in place."""
        given = {i.name: n for n, i in zip(program.placeholders(), inputs) if i.kind == "buffer"}
        results, outputs = [], []
        for node, output in zip(program.results(), program.outputs):
            if output.kind == "buffer":
                append.parameter = output.name
                append.write(given[output.name], node)
            elif output.kind in ("loss", "metric"):
                results.append(node)
                outputs.append(output)
        results.append(norm)
        outputs.append(ir.Output("grad_norm", "metric", Spec(())))
        program.graph.output_node().args = (tuple(results),)
        program.module.recompile()
        return replace(program, inputs=tuple(inputs), outputs=tuple(outputs), facts=program.facts | self.establishes)


@dataclass(frozen=True)
class Update:
    """The update of one parameter; `site` tells its random numbers from those of others."""

    how: Optimize
    mesh: Mesh
    given: ir.Input
    dtype: torch.dtype
    site: int = 0

    @property
    def spec(self) -> Spec:
        """How parameter and moments are stored."""
        return replace(self.given.spec, varying=())

    @property
    def codecs(self) -> list[Codec]:
        """How each moment is stored."""
        kinds = self.how.optimizer.moments
        return [codec(self.how.state, m.signed, self.how.block, self.dtype, self.spec, self.mesh) for m in kinds]

    def append(
        self,
        append: Appender,
        parameter: fx.Node,
        gradient: fx.Node,
        shared: Mapping[torch.dtype, tuple[fx.Node, ...]],
        step: fx.Node,
        places: Mapping[str, fx.Node],
    ) -> list[tuple[fx.Node, ir.Input]]:
        """Change the parameter and its moments in place; returns the inputs added for these."""
        held = [self.inputs(append, m.name, c, parameter) for m, c in zip(self.how.optimizer.moments, self.codecs)]
        kept = [node for parts in held for node, _ in parts]
        at_random = self.how.stochastic and self.dtype == torch.bfloat16
        axes = [axis for axis in self.mesh.names if axis in self.spec.sharded] if at_random else []

        wide = arithmetic(self.dtype)
        factor, *scalars = shared[wide]

        def update(p, g, factor, *rest):
            values = iter(rest)
            given = tuple(next(values) for _ in scalars)
            state = [c.decode([next(values) for _ in parts]) for c, parts in zip(self.codecs, held)]
            moments = tuple(real(moment, wide) for moment in state)
            new, moments = self.how.optimizer.update(real(p, wide), real(g, wide) * factor, moments, given)
            if at_random:
                index = global_index(self.spec, self.mesh, dict(zip(axes, values)), p.device)
                new = round_at_random(new, next(values), self.site, index)
            return stored(new, self.dtype), *(part for c, m in zip(self.codecs, moments) for part in c.encode(m))

        key = ("update", self.dtype, tuple(self.codecs), *((self.site, self.spec) if at_random else ()))
        drawn = (*(places[axis] for axis in axes), step) if at_random else ()
        inputs = (parameter, gradient, factor, *scalars, *kept, *drawn)
        new, *new_state = append.call(key, update, *inputs)
        append.write(parameter, new)
        for node, value in zip(kept, new_state, strict=True):
            append.write(node, value)
        return [pair for parts in held for pair in parts]

    def inputs(self, append: Appender, moment: str, how: Codec, parameter: fx.Node) -> list[tuple[fx.Node, ir.Input]]:
        """The tensors that one moment is stored in."""
        found = []
        for suffix, shape, dtype, spec in how.parts(self.spec, self.mesh):
            val = ir.example(parameter).new_empty(shape, dtype=dtype)
            node = append.placeholder(f"{moment}{suffix.replace('.', '_')}_{parameter.name}", val, spec)
            found.append((node, ir.Input(f"{moment}{suffix}.{self.given.name}", "moment", spec)))
        return found
