"""Reduce, clip and apply the gradients in the same graph; parameters and moments change in place.

    g = mm(...)              partial over dp_replicate
becomes
    g = psum(g, "dp_replicate")
    norm = sqrt(psum(sum(g * g), "dp_shard"))
    copy_(w, w - lr * min(1, max_norm / norm) * ...)

Every gradient arrives as a partial sum on the axes on which its parameter is replicated, and is reduced here, once. The
norm is that of the full gradient: squares of shards are added over the axes that shard the parameter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.ir.task import SQUARE, square_of
from passes.ops import reshard
from passes.update.appender import Appender, coordinates_of, copy_stored_results
from passes.update.groups import Group, group_of, kind_of
from passes.update.moments import Format, Wide
from passes.update.muon import Matrix, append_muon
from passes.update.optimizers import Muon, Optimizer, arithmetic, cast, real
from passes.update.update import Storage, Update


def reduce_gradient(
    append: Appender, name: str, gradient: fx.Node, axes: Iterable[str], reduce_dtype: torch.dtype | None
) -> fx.Node:
    """Return a parameter's gradient with its partial sums completed, one `psum` per axis."""
    append.parameter = name
    dtype = ir.example(gradient).dtype
    for axis in axes:
        gradient = append.trace(
            lambda g, axis=axis: reshard.psum(g, axis, dtype, reduce_dtype), gradient, key=("psum", axis)
        )
    return gradient


def squared_norm(
    append: Appender,
    names: Sequence[str],
    gradients: Sequence[fx.Node],
    specs: Sequence[Spec],
    before: fx.Node | None = None,
) -> fx.Node:
    """Return the squared norm of all parameters' gradients together, 0-d, fp32 or wider, the same on every rank.

    It is added to that of the gradients `before`, in its dtype.
    """
    sums: dict[tuple[str, ...], fx.Node] = {} if before is None else {(): before}
    for name, gradient, spec in zip(names, gradients, specs, strict=True):
        append.parameter, axes = name, tuple(sorted(spec.sharded))
        if axes not in sums:
            sums[axes] = append.trace(square, gradient, key="square")
        else:  # one after another, so that every parameter's term is computed in the same way
            sums[axes] = append.trace(lambda total, g: total + square(g), sums[axes], gradient, key="add square")
    append.parameter, totals = "", []
    for axes, total in sums.items():
        for axis in axes:
            total = append.trace(lambda x, axis=axis: reshard.psum(x, axis, x.dtype, None), total, key=("psum", axis))
        totals.append(total)
    return append.trace(lambda *s: torch.stack(s).sum(), *totals, key=("add", len(totals)))


def square(gradient: Tensor) -> Tensor:
    """Return the sum of a gradient's squares, 0-d, fp32 or wider."""
    return real(gradient, arithmetic(gradient.dtype)).square().sum()


@dataclass(frozen=True)
class Optimize(ir.Pass):
    """Complete the step: outputs become the loss (if the program has one) and the gradient norm.

    Gradients are reduced in `reduce_dtype` (None: their own), scaled by `scale` and clipped to `max_norm` (None: not
    clipped). A parameter is updated by the first of `groups` that holds it, otherwise by `optimizer`; `state`, `block`
    and `stochastic` are those of a `Storage`. With `skip_nonfinite` nothing changes in a step whose gradient norm is
    not finite. With several pipeline `ranks`, each sends the running sum of squared norms to the next rank; the last
    rank broadcasts the total.
    """

    optimizer: Optimizer
    max_norm: float | None = None
    reduce_dtype: torch.dtype | None = None
    scale: float = 1.0
    state: Format | None = None
    block: int = 256
    stochastic: bool = False
    groups: tuple[Group, ...] = ()
    skip_nonfinite: bool = False
    rank: int = 0
    ranks: int = 1
    name = "optimize"
    takes = (Stage.JOINT,)
    gives = Stage.STEP

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        append = Appender(program, ctx, "optimizer")
        copy_stored_results(program, append)
        parameters = {i.name: (n, i) for n, i in zip(program.placeholders(), program.inputs) if i.kind == "parameter"}
        graded = [(o.name, n, o.spec) for n, o in zip(program.results(), program.outputs) if o.kind == "gradient"]
        names = [name for name, _, _ in graded]
        partial = [program.mesh.flatten(spec.partial_axes) for _, _, spec in graded]
        reduced = [
            reduce_gradient(append, name, n, axes, self.reduce_dtype) for (name, n, _), axes in zip(graded, partial)
        ]
        full_specs = [replace(spec, partial=()) for _, _, spec in graded]
        square, carried = self.square(append, program, names, reduced, full_specs)
        norm, factor = self.clip(append, square)
        append.guard = append.trace(torch.isfinite, norm, key="finite") if self.skip_nonfinite else None
        scalars = [self.scalar(append, name, program) for name in ("lr", "step")]
        lr, step = (node for node, _ in scalars)
        step_now = append.trace(lambda s: s + 1, step, key="count")
        updates = self.updates(program, [parameters[name] for name in names])
        kinds = dict.fromkeys((update.wide, update.group) for update in updates)
        shared = {kind: self.shared_scalars(append, *kind, lr, step_now, factor) for kind in kinds}
        matrices = list[Matrix]()
        by_matrix = any(isinstance(group.optimizer, Muon) for _, group in kinds)
        reads_places = self.stochastic or by_matrix or any(update.fills for update in updates)
        coordinates, added = coordinates_of(program, append) if reads_places else ({}, [])
        added += scalars
        for update, gradient in zip(updates, reduced):
            append.parameter, parameter = update.input.name, parameters[update.input.name][0]
            common = shared[update.wide, update.group]
            if isinstance(update.group.optimizer, Muon):
                matrices.append(Matrix(update, parameter, gradient, common))
            else:
                added += update.append(append, parameter, gradient, common, step_now, coordinates)
        added += append_muon(append, matrices, step_now, coordinates)
        for total, item in zip(program.placeholders(), program.inputs):
            if item.kind == "gradient":
                append.parameter = item.name
                append.write(total, append.trace(torch.zeros_like, total, key="clear"))
        append.parameter = ""
        append.keep(step, step_now)
        order = {node: k for k, node in enumerate(program.placeholders())}
        inputs = (*program.inputs, *(i for _, i in sorted(added, key=lambda pair: order[pair[0]])))
        refuse_equal_names(inputs)
        program = self.finish(program, append, inputs, norm, carried)
        return program, self.report(updates)

    def updates(self, program: ir.Program, parameters: Iterable[tuple[fx.Node, ir.Input]]) -> list[Update]:
        """Return the update of each parameter."""
        storage = Storage(self.state, self.block, self.stochastic)
        return [
            Update(storage, group_of(i, self.groups, self.optimizer), program.mesh, i, ir.example(n).dtype)
            for n, i in parameters
        ]

    def check_names(self, parameters: Sequence[ir.Input]) -> None:
        """Raise Refused if a pattern of a group matches no parameter."""
        for group in self.groups:
            for pattern in group.unmatched_patterns(parameters):
                fix = f"no trained parameter is named like {pattern!r}"
                raise ir.Refused("optimize", None, f"optim.groups.{group.label}.names: {fix}")

    def report(self, updates: Sequence[Update]) -> ir.Report:
        """Return the numbers of parameters and moments, and exceptions; raise Refused for options without effect."""
        notes = []
        if self.ranks == 1:  # a rank of a pipeline has only some parameters
            self.check_names([update.input for update in updates])
        if self.groups:
            by_label = Counter(update.group.label for update in updates)
            notes += [f"group {label}: {count} parameters" for label, count in by_label.items()]
        if self.state in ("int8", "float8"):
            wide = [u.input.name for u in updates if any(isinstance(c, Wide) for c in u.codecs)]
            if len(wide) == len(updates) and self.ranks == 1:
                fix = f"no parameter has rows of whole blocks of {self.block}; use a smaller one, or optim=adamw"
                raise ir.Refused("optimize", None, f"optim.block: {fix}")
            if wide:
                notes.append(f"moments stored in fp32, because small or rows are not whole blocks: {', '.join(wide)}")
        if self.stochastic and self.ranks == 1 and all(update.dtype != torch.bfloat16 for update in updates):
            fix = "no parameter is stored in bfloat16; set train.dtype=bfloat16"
            raise ir.Refused("optimize", None, f"optim.stochastic_rounding: {fix}")
        moments = sum(len(update.group.optimizer.moments) for update in updates)
        counts = {"parameters": len(updates), "moments": moments}
        effects = (of_muon(updates),) if isinstance(self.optimizer, Muon) else ()
        return ir.Report(counts, tuple(notes), effects=effects)

    def state_bytes(self, program: ir.Program) -> int:
        """Return the bytes of the moments of all parameters of a program on one rank."""
        parameters = [(n, i) for n, i in zip(program.placeholders(), program.inputs) if i.kind == "parameter"]
        updates = self.updates(program, parameters)
        parts = (part for u in updates for c in u.codecs for part in c.parts(u.spec, program.mesh))
        return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype, _ in parts)

    def square(
        self, append: Appender, program: ir.Program, names, gradients, specs
    ) -> tuple[fx.Node, list[tuple[fx.Node, ir.Output]]]:
        """Return the squared norm, and the outputs that tell it to other pipeline ranks.

        A rank adds to the sum of the ranks before it; the last rank sends the total to all. A parameter counts on its
        first rank.
        """
        if self.ranks == 1:
            return squared_norm(append, names, gradients, specs), []
        received = {i.name: n for n, i in zip(program.placeholders(), program.inputs) if i.kind == "carried"}
        first = {i.name: i.stages[0] for i in program.inputs if i.kind == "parameter"}
        counted = [k for k, name in enumerate(names) if first[name] == self.rank]
        names, gradients, specs = ([values[k] for k in counted] for values in (names, gradients, specs))
        before = received.get(square_of(self.rank - 1))
        if before is None and not counted:  # the first rank trains nothing
            like = ir.example(received[SQUARE])
            before = append.trace(lambda: torch.zeros((), dtype=like.dtype, device=like.device), key="no square")
        total = squared_norm(append, names, gradients, specs, before)
        name = SQUARE if self.rank == self.ranks - 1 else square_of(self.rank)
        return received.get(SQUARE, total), [(total, ir.Output(name, "carried", Spec(())))]

    def clip(self, append: Appender, square: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return (norm of the scaled gradients, factor to scale each by), both 0-d, from the squared norm."""
        norm = append.trace(lambda s: s.sqrt() * self.scale, square, key="norm")
        if self.max_norm is None:
            return norm, append.trace(lambda n: torch.full_like(n, self.scale), norm, key="factor")
        factor = append.trace(lambda n: self.scale * (self.max_norm / (n + 1e-6)).clamp(max=1.0), norm, key="factor")
        return norm, factor

    def shared_scalars(
        self, append: Appender, dtype: torch.dtype, group: Group, lr: fx.Node, step: fx.Node, factor: fx.Node
    ) -> tuple[fx.Node, ...]:
        """Return the 0-d values that all updates of a group in a dtype share.

        These are the gradients' factor and the optimizer's scalars.
        """

        def scalars(lr: Tensor, step: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
            rate = cast(lr, dtype) * group.lr if group.lr != 1 else cast(lr, dtype)
            return cast(factor, dtype), *group.optimizer.scalars(rate, cast(step, dtype))

        return tuple(append.trace(scalars, lr, step, factor, key=("scalars", dtype, group)))

    def scalar(self, append: Appender, name: str, program: ir.Program) -> tuple[fx.Node, ir.Input]:
        """Return a new 0-d fp64 input."""
        device = ir.example(program.placeholders()[0]).device
        with append.ctx.fake_mode:
            val = torch.zeros((), dtype=torch.float64, device=device)
        kind = "scalar" if name == "lr" else "moment"
        return append.placeholder(name, val, Spec(())), ir.Input(name, kind, Spec(()))  # type: ignore[arg-type]

    def finish(self, program: ir.Program, append: Appender, inputs, norm: fx.Node, carried) -> ir.Program:
        """Return the program with loss, metrics, counts and the norm as outputs; buffers are updated in place."""
        buffers = {i.name: n for n, i in zip(program.placeholders(), inputs) if i.kind == "buffer"}
        results, outputs = [], []
        for node, output in zip(program.results(), program.outputs):
            if output.kind == "buffer":
                append.parameter = output.name
                append.keep(buffers[output.name], node)
            elif output.kind != "gradient":
                results.append(node)
                outputs.append(output)
        results.append(norm)
        outputs.append(ir.Output("grad_norm", "metric", Spec(())))
        for node, output in carried:
            results.append(node)
            outputs.append(output)
        program.graph.output_node().args = (tuple(results),)
        program.module.recompile()
        return replace(program, inputs=tuple(inputs), outputs=tuple(outputs))


def of_muon(updates: Sequence[Update]) -> ir.Effect:
    """Return the effect of Muon: the parameters that it updates, and those that AdamW updates, by kind."""
    taken = [update.input for update in updates if isinstance(update.group.optimizer, Muon)]
    others: dict[str, list[str]] = {}
    for update in updates:
        if not isinstance(update.group.optimizer, Muon):
            others.setdefault(kind_of(update.input), []).append(update.input.name)
    left = [f"{len(names)} {kind} ({names[0]})" for kind, names in others.items()]
    fused = [f"{item.name} as {len(item.parts.sizes)} matrices" for item in taken if item.parts]
    several = f"{len(fused)} of several matrices ({fused[0]})" if fused else ""
    detail = "; ".join(filter(None, [several, f"AdamW: {', '.join(left)}" if left else ""]))
    unmet = "no parameter is a matrix of a matmul; use optim=adamw"
    return ir.Effect("optim.name", len(taken), "parameters by Muon", len(updates), detail, unmet)


def refuse_equal_names(inputs: Sequence[ir.Input]) -> None:
    """Raise Refused if two moments have one name: the scales of `weight` are stored like moments of `scale.weight`."""
    counts = Counter(item.name for item in inputs if item.kind == "moment")
    if equal := next((name for name, count in counts.items() if count > 1), None):
        problem = f"two tensors of the optimizer's state are called {equal}"
        raise ir.Refused("optimize", None, f"{problem}; rename the submodule `scale`, or use moments without scales")
