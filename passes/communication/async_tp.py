"""Async tensor parallelism: run matmuls in pieces next to the steps of a ring, instead of after a collective.

    g = all_gather(x, 1, "tp", ...)             q, k, g = ring_gather(x, wq, wk, axis_index)
    q, k = mm(view(g), wq), mm(view(g), wk) ->

    z = reduce_scatter(view(mm(a, w)), ...) ->  z = ring_scatter(a, w, axis_index)

The next operator needs the gathered value, and a reduce-scatter needs the complete matmul, so nothing else could hide
these collectives. All matmuls of one gathered value with weights form one ring; other readers (the gradient of a
weight, a norm) read the gathered value from it. An operator stands for its ring until `collectives` writes it out
(`ring_matmuls.py`). It knows the plain operators that it replaces, by which the verifier compares programs.

With `auto`, equal sites (the same in all layers) get rings if the timeline of the finished program is shorter with
them. Left as they are: gathers and reductions of parameters and gradients, matmuls over a gathered dim, float8 matmuls
with one scale per row, grouped and batched matmuls.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx

from passes.communication.bucket import gradient_nodes
from passes.communication.layer_starts import place_of
from passes.communication.ring_matmuls import OPEN, GatherMatmuls, Matmul, ScatterMatmuls, View
from passes.cost.cluster import Cluster
from passes.cost.predict import predict
from passes.ir import ir
from passes.ir.slices import reach, weight_nodes
from passes.ir.stages import Stage
from passes.ops import reshard
from passes.trace.editor import layout, move_before
from passes.trace.functions import define, remember

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
Choice = Literal["none", "auto", "all"]


# ---- sites of rings --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A collective and the matmuls that can run next to its ring, which replaces them."""

    collective: fx.Node
    matmuls: tuple[fx.Node, ...]

    @property
    def axis(self) -> str:
        """The axis of the ring."""
        return self.collective.args[2]  # type: ignore[return-value]

    @property
    def is_gather(self) -> bool:
        """True if the matmuls follow the collective."""
        return self.collective.target is reshard.all_gather

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """The key that equal sites of all layers share."""
        node = self.collective
        of_layer = ir.layer(node) is not None
        read = [layout(ir.example(n)) for p in self.matmuls for n in p.all_input_nodes]
        return node.target, node.args[1:], of_layer, ir.phase(node), ir.is_recomputed(node), tuple(read)


def sites_of(program: ir.Program) -> list[Site]:
    """Return the collectives of activations with matmuls by weights, in order."""
    parameters = (n for n, i in zip(program.placeholders(), program.inputs, strict=True) if i.kind in ir.WEIGHTS)
    weights = {*parameters, *weight_nodes(program)}
    axes = {i.name for i in program.inputs if i.kind == "coordinate"}
    gradients = gradient_nodes(program)
    sites = [
        Site(node, tuple(after_gather(node, weights) if node.target is reshard.all_gather else before_scatter(node)))
        for node in program.calls()
        if node.target in (reshard.all_gather, reshard.reduce_scatter) and node not in weights | gradients
    ]
    return [site for site in sites if site.matmuls and site.axis in axes]


def after_gather(gather: fx.Node, weights: set[fx.Node]) -> list[fx.Node]:
    """Return the matmuls of a gathered value's rows with weights that are in the gather's layer and phase."""

    def is_of_rows(user: fx.Node, left: fx.Node) -> bool:
        multiplies_rows = is_matmul(user) and user.args[0] is left and user.args[1] in weights
        return multiplies_rows and is_beside(user, gather) and not needs(user.all_input_nodes[1:], gather)

    if gather.args[1] == ir.example(gather).dim() - 1:
        return []
    lefts = (gather, *(user for user in gather.users if is_flat(user)))
    candidates = ([user for user in left.users if is_of_rows(user, left)] for left in lefts)
    return next(filter(None, candidates), [])


def is_beside(node: fx.Node, collective: fx.Node) -> bool:
    """Return True if a node is in the layer, the phase and the pipeline stage of a collective."""
    return place_of(node) == place_of(collective) and ir.pipeline_stage(node) == ir.pipeline_stage(collective)


def before_scatter(scatter: fx.Node) -> list[fx.Node]:
    """Return the matmuls whose sum is reduce-scattered along its rows, if no other node reads them; otherwise none."""
    width, last_dim = ir.example(scatter).shape[-1], scatter.args[1] == ir.example(scatter).dim() - 1
    terms = [undo_view(term) for term in terms_of(scatter.args[0])]  # type: ignore[arg-type]
    fits = (is_matmul(n) and len(n.users) == 1 and ir.example(n).shape[-1] == width for n in terms)
    one_stage = all(ir.pipeline_stage(n) == ir.pipeline_stage(scatter) for n in terms)
    return terms if not last_dim and one_stage and all(fits) else []


def terms_of(node: fx.Node) -> list[fx.Node]:
    """Return the terms of a sum, and of terms that are sums, if no other node reads these."""
    is_sum = node.target is aten.add.Tensor and not node.kwargs and len(node.users) == 1
    if not is_sum or len(node.all_input_nodes) != 2:
        return [node]
    return [term for operand in node.all_input_nodes for term in terms_of(operand)]


def undo_view(node: fx.Node) -> fx.Node:
    """Return the operand of a view that has no other reader; otherwise the node."""
    return node.args[0] if node.target in VIEWS and len(node.users) == 1 else node  # type: ignore[return-value]


def is_flat(node: fx.Node) -> bool:
    """Return True if a node views rows along several dims as one dim."""
    if node.target not in VIEWS:
        return False
    operand_shape, shape = (ir.example(n).shape for n in (node.args[0], node))  # type: ignore[arg-type]
    return len(shape) == 2 and shape[-1] == operand_shape[-1]


def is_matmul(node: fx.Node) -> bool:
    """Return True if a node multiplies two real matrices, in float8 with one scale each."""
    if node.target is aten._scaled_mm.default:
        scales = node.all_input_nodes[2:]
        return not node.kwargs and len(node.all_input_nodes) == 4 and all(ir.example(n).numel() == 1 for n in scales)
    return node.target is aten.mm.default and len(node.all_input_nodes) == 2 and not ir.example(node).is_complex()


def needs(nodes: Sequence[fx.Node], other: fx.Node) -> bool:
    """Return True if one of the nodes depends on `other`."""
    return other in reach(nodes, lambda node: [n for n in node.all_input_nodes if not n < other])


# ---- the rings -------------------------------------------------------------------------------------


def put_ring(program: ir.Program, site: Site, ctx: ir.Context) -> None:
    """Replace a site by a ring; changes the graph."""
    node = site.collective
    inputs = zip(program.placeholders(), program.inputs, strict=True)
    axis_index = next(n for n, i in inputs if i.kind == "coordinate" and i.name == site.axis)
    if not site.is_gather:
        operands = [n for matmul in site.matmuls for n in matmul.all_input_nodes]
        put_operator(node, scatter_ring(site), [*operands, axis_index], [node], ctx)
        return
    matmuls = list(site.matmuls)
    factors = [n for matmul in matmuls for n in matmul.all_input_nodes[1:]]
    for operand in factors:
        move_before(operand, node)
    others = [node] if has_other_readers(site) else []
    put_operator(node, gather_ring(site, bool(others)), [node.args[0], *factors, axis_index], [*matmuls, *others], ctx)


def gather_ring(site: Site, keep_gathered: bool) -> GatherMatmuls:
    """Return the ring of a gather."""
    node, left = site.collective, site.matmuls[0].args[0]
    flat = None if left is node else view_of(left)  # type: ignore[arg-type]
    return GatherMatmuls(node.args[1:], flat, tuple(map(open_matmul, site.matmuls)), keep_gathered)


def scatter_ring(site: Site) -> ScatterMatmuls:
    """Return the ring of a reduce-scatter."""
    node = site.collective
    lead = tuple(ir.example(node.args[0]).shape[:-1])  # type: ignore[arg-type]
    readers = [next(iter(matmul.users)) for matmul in site.matmuls]
    views = tuple(view_of(reader) if reader.target in VIEWS else None for reader in readers)
    return ScatterMatmuls(node.args[1:], lead, tuple(map(open_matmul, site.matmuls)), views)


def open_matmul(matmul: fx.Node) -> Matmul:
    """Return a matmul whose tensors other than the rows are left open."""
    return Matmul(matmul.target, tuple(OPEN if isinstance(a, fx.Node) else a for a in matmul.args[1:]))


def view_of(node: fx.Node) -> View:
    """Return the operator and the shape of a view."""
    return node.target, tuple(node.args[1])  # type: ignore[arg-type]


def has_other_readers(site: Site) -> bool:
    """Return True if nodes other than the site's matmuls read the gathered value."""
    lefts = {matmul.args[0] for matmul in site.matmuls}
    readers = {user for left in (site.collective, *lefts) for user in left.users}  # type: ignore[union-attr]
    return not readers <= {*site.matmuls, *lefts}


def put_operator(
    before: fx.Node, work: GatherMatmuls | ScatterMatmuls, operands: list[Any], replaced: list[fx.Node], ctx: ir.Context
) -> None:
    """Insert the operator that stands for a ring before a node, and replace these nodes by its results."""
    key = work, len(operands)
    if key not in ctx.operators:
        op = ctx.operators[key] = define("local", work.name, work.ring, len(operands), len(replaced))
        remember(op, work.ring, communicates=True, meaning=work.meaning)
    graph = before.graph
    with graph.inserting_before(before):
        call = graph.create_node("call_function", ctx.operators[key], tuple(operands), name=work.name)
        several = len(replaced) > 1
        parts = [graph.call_function(operator.getitem, (call, i)) for i in range(len(replaced))] if several else [call]
    values = tuple(map(ir.value, replaced))
    ir.set_value(call, values if several else values[0])
    ir.copy_origin(call, before)
    for old, new in zip(replaced, parts, strict=True):
        ir.update(new, value=ir.value(old), spec=ir.spec(old))
        ir.copy_origin(new, old)
        old.replace_all_uses_with(new)
    erase_unread({*replaced, before})


def erase_unread(nodes: set[fx.Node]) -> None:
    """Erase the operators that have no readers, and the operands that only they read."""
    while nodes:
        last = max(nodes)
        nodes.remove(last)
        if last.op == "call_function" and not last.users:
            nodes.update(last.all_input_nodes)
            last.graph.erase_node(last)


# ---- the pass --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AsyncTP(ir.Pass):
    """Run matmuls next to rings: never, if the timeline on a `cluster` gets shorter (`auto`), or wherever possible.

    `following` are the passes that finish the program.
    """

    choice: Choice = "none"
    cluster: Cluster | None = None
    following: tuple[ir.Pass, ...] = ()
    name = "async_tp"
    takes = (Stage.JOINT,)
    keeps = True
    after = ("remat",)  # remat would keep or recompute a ring's matmuls and collective together

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if self.choice == "none":
            return program, ir.Report()
        by_kind: dict[Any, list[Site]] = {}
        for site in sites_of(program):
            by_kind.setdefault(site.kind, []).append(site)
        if not by_kind:
            return program, ir.Report({"sites": 0}, effects=tuple(self.effects(program, [], [])))
        chosen, notes = self.faster_kinds(program, by_kind, ctx) if self.choice == "auto" else (list(by_kind), ())
        sites = [site for kind in chosen for site in by_kind[kind]]
        counts = {
            "sites": sum(map(len, by_kind.values())),
            "gathers": sum(site.is_gather for site in sites),
            "scatters": sum(not site.is_gather for site in sites),
        }
        effects = self.effects(program, sites, [site for kind in by_kind.values() for site in kind])
        return (with_rings(program, chosen, ctx) if chosen else program), ir.Report(
            counts, notes, effects=tuple(effects)
        )

    def effects(self, program: ir.Program, chosen: Sequence[Site], sites: Sequence[Site]) -> Iterator[ir.Effect]:
        """Yield the effect on the matmuls of all `sites`, of which the `chosen` get rings, if there is a mesh."""
        done, total = (sum(program.times(s.collective) * len(s.matmuls) for s in some) for some in (chosen, sites))
        unmet = "no matmul stands before or after a collective over mesh.tp; set it to none"
        if "tp" in program.mesh.axes:
            yield ir.Effect(OPTION, done, "matmuls in rings", total, unmet=unmet if self.choice == "all" else "")

    def faster_kinds(
        self, program: ir.Program, by_kind: Mapping[Any, list[Site]], ctx: ir.Context
    ) -> tuple[list[Any], tuple[str, ...]]:
        """Return the kinds of sites whose rings make the step shorter, each tried with those before it, and notes.

        A note has the change in percent of the predicted time without rings at this kind of sites. That is the time of
        the program as it is, in which a folded layer runs once; the sign is that of the whole step.
        """
        chosen, notes = list[Any](), []
        least = self.seconds(program, ctx)
        for kind, sites in by_kind.items():
            seconds = self.seconds(with_rings(program, [*chosen, kind], ctx), ctx)
            verdict = "used" if seconds < least else "not used"
            first = sites[0].collective
            place = f"%{first.name} ({ir.source(first)}) and {len(sites) - 1} like it"
            change = f"{100 * (seconds / least - 1):+.2f} %"
            notes.append(f"{place}: {verdict}, rings there change the program's predicted time by {change}")
            if seconds < least:
                chosen, least = [*chosen, kind], seconds
        return chosen, tuple(notes)

    def seconds(self, program: ir.Program, ctx: ir.Context) -> float:
        """Return the predicted time of the finished program."""
        assert self.cluster is not None, "auto is decided on a cluster"
        for step in self.following:
            program, _ = step(program, ctx)
        return predict(program, ctx, self.cluster).timeline.step_s


OPTION = "passes.communication.async_tp"


def with_rings(program: ir.Program, kinds: Sequence[Any], ctx: ir.Context) -> ir.Program:
    """Return a copy of the program with rings at the sites of some kinds."""
    program = program.copy()
    for site in [site for site in sites_of(program) if site.kind in kinds]:
        put_ring(program, site, ctx)
    program.module.recompile()
    return program
