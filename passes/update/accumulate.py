"""Split the step over microbatches: one graph adds up gradients, another applies their mean.

The accumulators keep the gradients' placement, partial sums included: a reduction that the apply graph does once is not
repeated for each microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from passes.ir import ir
from passes.ir.operators import kind_of
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.ir.task import SQUARE, square_of, term_of
from passes.update.appender import Appender, copy_stored_results
from passes.update.defer import CASTS, complete
from passes.update.optimizers import arithmetic


@dataclass(frozen=True)
class Accumulate(ir.Pass):
    """Add each gradient to an accumulator in place, as soon as it is computed; outputs keep the loss and metrics.

    Sums have `dtype`, or the gradient's own if that is wider (None: the gradient's own): in bfloat16, small gradients
    of many microbatches would be rounded away. With `skip_nonfinite` the inputs of buffers that change are `restored`.
    """

    skip_nonfinite: bool = False
    dtype: torch.dtype | None = torch.float32
    name = "accumulate"
    takes = (Stage.JOINT,)
    gives = Stage.STEP

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        append = Appender(program, ctx, "optimizer")
        copy_stored_results(program, append)
        buffers = {i.name: n for n, i in zip(program.placeholders(), program.inputs) if i.kind == "buffer"}
        changed = {o.name for o in program.outputs if o.kind == "buffer"} if self.skip_nonfinite else set[str]()
        stages = {i.name: ir.pipeline_stage(n) for n, i in zip(program.placeholders(), program.inputs)}
        copy_of = {i.name: i.copy_of for i in program.inputs}
        added, wider = list[ir.Input](), dict[bool, int]()
        remaining = []
        for node, output in zip(program.results(), program.outputs, strict=True):
            append.parameter = output.name
            append.place, append.phase = program.graph.output_node(), "optimizer"
            if output.kind == "gradient":
                total = append.placeholder(f"total_{len(added)}", total_of(ir.example(node), self.dtype), output.spec)
                ir.update(total, stage=stages.get(output.name))
                layer, original = append.layers[output.name], copy_of[output.name]
                is_wider = ir.example(total).dtype != ir.example(node).dtype
                wider[is_wider] = wider.get(is_wider, 0) + program.layers(layer)
                added.append(ir.Input(output.name, "gradient", output.spec, layer=layer, copy_of=original))
                if not is_sent(node):
                    append.place, append.phase = node.next, "backward"
                append.write(total, append.trace(torch.add, total, node, key="add"))
            elif output.kind == "buffer":
                append.keep(buffers[output.name], node)
            else:
                remaining.append((node, output))
        program.graph.output_node().args = (tuple(n for n, _ in remaining),)
        program.module.recompile()
        old_inputs = (replace(i, restored=i.kind == "buffer" and i.name in changed) for i in program.inputs)
        inputs = (*old_inputs, *added)
        program = replace(program, inputs=inputs, outputs=tuple(o for _, o in remaining))
        things = "gradients added up in a wider dtype"
        effect = ir.Effect("passes.accumulate.dtype", wider.get(True, 0), things, sum(wider.values()))
        return program, ir.Report({"accumulators": len(added)}, effects=(effect,) if True in wider else ())


def total_of(gradient: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return an accumulator for a gradient."""
    wide = gradient.dtype if dtype is None else torch.promote_types(gradient.dtype, dtype)
    return gradient.new_empty(gradient.shape, dtype=wide)


def is_sent(gradient: fx.Node) -> bool:
    """Return True if a gradient is received from other ranks, for which nothing waits before the end."""
    while gradient.target in CASTS:
        gradient = gradient.args[0]  # type: ignore[assignment]
    return kind_of(gradient) is not None


@dataclass(frozen=True)
class ApplyOnly(ir.Pass):
    """Build from a joint program one whose gradients are inputs: accumulated by other programs, cleared once read.

    Accumulators have `dtype`, like those of `Accumulate`. Sums over ranks that the joint program left to the update are
    completed, their terms in `reduce_dtype` (None: unchanged). With `rank_of` (each pipeline stage's rank) the program
    updates the parameters that the stages of `rank` use. If other ranks use a parameter too, it shares its term of the
    gradient, and adds theirs.
    """

    rank: int = 0
    rank_of: tuple[int, ...] = ()
    reduce_dtype: torch.dtype | None = None
    dtype: torch.dtype | None = torch.float32
    name = "apply"
    takes = (Stage.JOINT,)
    after = ("reassociate", "defer")  # these decide the sums that are left to it

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        graph = fx.Graph()
        nodes, inputs = [], []
        specs = {o.name: (ir.example(n), o) for n, o in zip(program.results(), program.outputs) if o.kind == "gradient"}
        parameters = [(n, i) for n, i in zip(program.placeholders(), program.inputs) if i.kind == "parameter"]
        by_name = {i.original: (n, i) for n, i in reversed(parameters) if self.uses(n)}
        for name, (old, i) in reversed(by_name.items()):
            inputs.append(replace(i, name=name, copy_of="", stages=self.ranks(i)))
            nodes.append(_input(graph, old.name, ir.example(old), inputs[-1]))
        results, outputs = list[fx.Node](), list[ir.Output]()
        for name, (_, i) in reversed(by_name.items()):
            val, output = specs[i.name]
            inputs.append(ir.Input(name, "gradient", output.spec, layer=i.layer))
            results.append(_input(graph, f"total_{len(results)}", total_of(val, self.dtype), inputs[-1]))
            outputs.append(replace(output, name=name, spec=i.spec.gradient()))
        if self.rank_of:
            wide = max((arithmetic(val.dtype) for val, _ in specs.values()), key=lambda dtype: dtype.itemsize)
            device = next(iter(specs.values()))[0].device
            for name in squares(self.rank, 1 + max(self.rank_of)):
                inputs.append(ir.Input(name, "carried", Spec(())))
                with ctx.fake_mode:
                    val = torch.zeros((), dtype=wide, device=device)
                _input(graph, name.replace("@", "_"), val, inputs[-1])
        graph.output(tuple(results))
        program = program.with_graph(graph, inputs=tuple(inputs), outputs=tuple(outputs))
        self.complete(program, ctx)
        shared = [i for i in inputs if i.kind == "parameter" and len(i.stages) > 1]
        if shared:
            program = self.add_terms(program, ctx, shared)
        return program, ir.Report({"gradients": len(results)} | ({"shared": len(shared)} if shared else {}))

    def complete(self, program: ir.Program, ctx: ir.Context) -> None:
        """Complete the gradients' sums over ranks, as the parameters' placements require."""
        append = Appender(program, ctx, "optimizer")
        totals = [i for i in program.inputs if i.kind == "gradient"]
        results = []
        for total, item, output in zip(program.results(), totals, program.outputs, strict=True):
            append.parameter = output.name
            results.append(complete(append, total, item.spec, output.spec, program.mesh, self.reduce_dtype))
        program.graph.output_node().args = (tuple(results),)
        program.module.recompile()

    def uses(self, parameter: fx.Node) -> bool:
        """Return True if a parameter is used by this rank."""
        stage = ir.pipeline_stage(parameter)
        return stage is None or self.rank_of[stage] == self.rank

    def ranks(self, parameter: ir.Input) -> tuple[int, ...]:
        """Return the pipeline ranks that use a parameter."""
        return tuple(sorted({self.rank_of[stage] for stage in parameter.stages}))

    def add_terms(self, program: ir.Program, ctx: ir.Context, parameters: Sequence[ir.Input]) -> ir.Program:
        """Replace gradients of parameters that several ranks use by the sums of their terms, in the order of ranks."""
        append = Appender(program, ctx, "optimizer")
        results = dict(zip((o.name for o in program.outputs), program.results(), strict=True))
        added, sent = list[ir.Input](), list[tuple[fx.Node, ir.Output]]()
        for parameter in parameters:
            append.parameter, gradient = parameter.name, results[parameter.name]
            spec = parameter.spec.gradient()
            term = append.trace(torch.clone, gradient, key="share")
            sent.append((term, ir.Output(term_of(parameter.name, self.rank), "carried", spec)))
            terms = []
            for rank in parameter.stages:
                if rank != self.rank:
                    name = term_of(parameter.name, rank)
                    added.append(ir.Input(name, "carried", spec))
                    val = ir.example(gradient).new_empty(ir.example(gradient).shape)
                    terms.append(append.placeholder(f"term_{len(added)}", val, spec))
                else:
                    terms.append(gradient)
            for term in terms[1:]:
                terms[0] = append.trace(torch.add, terms[0], term, key="add")
            results[parameter.name] = terms[0]
        program.graph.output_node().args = ((*results.values(), *(node for node, _ in sent)),)
        program.module.recompile()
        outputs = (*program.outputs, *(output for _, output in sent))
        return replace(program, inputs=(*program.inputs, *added), outputs=outputs)


def squares(rank: int, ranks: int) -> list[str]:
    """Return the squared norms that a pipeline rank receives: that of the ranks before it, and the total."""
    return [*([square_of(rank - 1)] if rank else []), *([SQUARE] if rank < ranks - 1 else [])]


def _input(graph: fx.Graph, name: str, val: torch.Tensor, item: ir.Input) -> fx.Node:
    node = graph.placeholder(name)
    ir.update(node, value=val, spec=item.spec)
    return node
