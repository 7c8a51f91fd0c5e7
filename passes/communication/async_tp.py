"""Async tensor parallelism: run matmuls in pieces next to the steps of a ring, instead of after a collective.

    g = all_gather(x, 1, "tp", ...)             q, k, g = ring_gather(x, wq, wk, axis_index)
    q, k = mm(view(g), wq), mm(view(g), wk) ->

    z = reduce_scatter(view(mm(a, w)), ...) ->  z = ring_scatter(a, w, axis_index)

The next operator needs the gathered value, and a reduce-scatter needs the complete matmul, so nothing else could hide
these collectives. All matmuls of one gathered value with weights form one ring; other readers (the gradient of a
weight, a norm) read the gathered value from it. An operator stands for its ring until `collectives` writes it out
(`ring_products.py`). It knows the plain operators that it replaces, by which the verifier compares programs.

With `auto`, equal sites (the same in all layers) get rings if the timeline of the finished program is shorter with
them. Left as they are: gathers and reductions of parameters and gradients, matmuls over a gathered dim, float8 matmuls
with one scale per row, grouped and batched matmuls.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx

from passes.communication.bucket import gradient_nodes
from passes.communication.layer_starts import place_of
from passes.communication.ring_products import OPEN, GatherProducts, Product, ScatterProducts, View
from passes.cost.cluster import Cluster
from passes.cost.predict import predict
from passes.program import ir, reshard
from passes.program.editor import layout, move_before
from passes.program.functions import define, remember
from passes.program.stages import Stage
from passes.program.weights import weight_nodes

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
Choice = Literal["none", "auto", "all"]


# ---- sites of rings --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A collective and the matmuls that can run next to its ring, which replaces them."""

    collective: fx.Node
    products: tuple[fx.Node, ...]

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
        read = [layout(ir.example(n)) for p in self.products for n in p.all_input_nodes]
        return node.target, node.args[1:], of_layer, ir.phase(node), ir.is_recomputed(node), tuple(read)


def sites_of(program: ir.Program) -> list[Site]:
    """Return the collectives of activations with matmuls by weights, in order."""
    parameters = (n for n, i in zip(program.placeholders(), program.inputs, strict=True) if i.kind == "parameter")
    weights = {*parameters, *weight_nodes(program)}
    known = {i.name for i in program.inputs if i.kind == "coordinate"}
    gradients = gradient_nodes(program)
    found = [
        Site(node, tuple(after_gather(node, weights) if node.target is reshard.all_gather else before_scatter(node)))
        for node in program.calls()
        if node.target in (reshard.all_gather, reshard.reduce_scatter) and node not in weights | gradients
    ]
    return [site for site in found if site.products and site.axis in known]


def after_gather(gather: fx.Node, weights: set[fx.Node]) -> list[fx.Node]:
    """Return the matmuls of a gathered value's rows with weights that are in the gather's layer and phase."""

    def is_of_rows(user: fx.Node, left: fx.Node) -> bool:
        found = is_product(user) and user.args[0] is left and user.args[1] in weights
        return found and is_beside(user, gather) and not needs(user.all_input_nodes[1:], gather)

    if gather.args[1] == ir.example(gather).dim() - 1:
        return []
    lefts = (gather, *(user for user in gather.users if is_flat(user)))
    found = ([user for user in left.users if is_of_rows(user, left)] for left in lefts)
    return next(filter(None, found), [])


def is_beside(node: fx.Node, collective: fx.Node) -> bool:
    """Return True if a node is in the layer, the phase and the pipeline stage of a collective."""
    return place_of(node) == place_of(collective) and ir.pipeline_stage(node) == ir.pipeline_stage(collective)


def before_scatter(scatter: fx.Node) -> list[fx.Node]:
    """Return the matmuls whose sum is reduce-scattered along its rows, if no other node reads them; otherwise none."""
    width, whole = ir.example(scatter).shape[-1], scatter.args[1] == ir.example(scatter).dim() - 1
    made = [unviewed(term) for term in terms_of(scatter.args[0])]  # type: ignore[arg-type]
    fits = (is_product(n) and len(n.users) == 1 and ir.example(n).shape[-1] == width for n in made)
    one_stage = all(ir.pipeline_stage(n) == ir.pipeline_stage(scatter) for n in made)
    return made if not whole and one_stage and all(fits) else []


def terms_of(node: fx.Node) -> list[fx.Node]:
    """Return the terms of a sum, and of terms that are sums, if no other node reads these."""
    is_sum = node.target is aten.add.Tensor and not node.kwargs and len(node.users) == 1
    if not is_sum or len(node.all_input_nodes) != 2:
        return [node]
    return [term for operand in node.all_input_nodes for term in terms_of(operand)]


def unviewed(node: fx.Node) -> fx.Node:
    """Return the operand of a view that has no other reader; otherwise the node."""
    return node.args[0] if node.target in VIEWS and len(node.users) == 1 else node  # type: ignore[return-value]


def is_flat(node: fx.Node) -> bool:
    """Return True if a node views rows along several dims as one dim."""
    if node.target not in VIEWS:
        return False
    given, made = (ir.example(n).shape for n in (node.args[0], node))  # type: ignore[arg-type]
    return len(made) == 2 and made[-1] == given[-1]


def is_product(node: fx.Node) -> bool:
    """Return True if a node multiplies two real matrices, in float8 with one scale each."""
    if node.target is aten._scaled_mm.default:
        scales = node.all_input_nodes[2:]
        return not node.kwargs and len(node.all_input_nodes) == 4 and all(ir.example(n).numel() == 1 for n in scales)
    return node.target is aten.mm.default and len(node.all_input_nodes) == 2 and not ir.example(node).is_complex()


def needs(nodes: Sequence[fx.Node], other: fx.Node) -> bool:
    """Return True if one of the nodes depends on `other`."""
    waiting, seen = list(nodes), set(nodes)
    while waiting:
        node = waiting.pop()
        later = [n for n in node.all_input_nodes if n not in seen and not n < other]
        if node is other:
            return True
        seen.update(later)
        waiting += later
    return False


# ---- the rings -------------------------------------------------------------------------------------


def put_ring(program: ir.Program, site: Site, ctx: ir.Context) -> None:
    """Replace a site by a ring; changes the graph."""
    node = site.collective
    inputs = zip(program.placeholders(), program.inputs, strict=True)
    axis_index = next(n for n, i in inputs if i.kind == "coordinate" and i.name == site.axis)
    if not site.is_gather:
        given = [n for product in site.products for n in product.all_input_nodes]
        put_operator(node, scattering(site), [*given, axis_index], [node], ctx)
        return
    products = list(site.products)
    beside = [n for product in products for n in product.all_input_nodes[1:]]
    for operand in beside:
        move_before(operand, node)
    more = [node] if read_by_more(site) else []
    put_operator(node, gathering(site, bool(more)), [node.args[0], *beside, axis_index], [*products, *more], ctx)


def gathering(site: Site, whole: bool) -> GatherProducts:
    """Return the ring of a gather."""
    node, left = site.collective, site.products[0].args[0]
    flat = None if left is node else view_of(left)  # type: ignore[arg-type]
    return GatherProducts(node.args[1:], flat, tuple(map(described, site.products)), whole)


def scattering(site: Site) -> ScatterProducts:
    """Return the ring of a reduce-scatter."""
    node = site.collective
    lead = tuple(ir.example(node.args[0]).shape[:-1])  # type: ignore[arg-type]
    readers = [next(iter(product.users)) for product in site.products]
    views = tuple(view_of(reader) if reader.target in VIEWS else None for reader in readers)
    return ScatterProducts(node.args[1:], lead, tuple(map(described, site.products)), views)


def described(product: fx.Node) -> Product:
    """Return a matmul whose tensors other than the rows are left open."""
    return Product(product.target, tuple(OPEN if isinstance(a, fx.Node) else a for a in product.args[1:]))


def view_of(node: fx.Node) -> View:
    """Return the operator and the shape of a view."""
    return node.target, tuple(node.args[1])  # type: ignore[arg-type]


def read_by_more(site: Site) -> bool:
    """Return True if nodes other than the site's matmuls read the gathered value."""
    lefts = {product.args[0] for product in site.products}
    readers = {user for left in (site.collective, *lefts) for user in left.users}  # type: ignore[union-attr]
    return not readers <= {*site.products, *lefts}


def put_operator(
    before: fx.Node, work: GatherProducts | ScatterProducts, given: list[Any], made: list[fx.Node], ctx: ir.Context
) -> None:
    """Insert the operator that stands for a ring before a node, and replace these nodes by its results."""
    key = work, len(given)
    if key not in ctx.operators:
        op = ctx.operators[key] = define("local", work.name, work.ring, len(given), len(made))
        remember(op, work.ring, communicates=True, meaning=work.meaning)
    graph = before.graph
    with graph.inserting_before(before):
        call = graph.create_node("call_function", ctx.operators[key], tuple(given), name=work.name)
        several = len(made) > 1
        parts = [graph.call_function(operator.getitem, (call, i)) for i in range(len(made))] if several else [call]
    values = tuple(map(ir.value, made))
    ir.set_value(call, values if several else values[0])
    ir.copy_origin(call, before)
    for old, new in zip(made, parts, strict=True):
        ir.update(new, value=ir.value(old), spec=ir.spec(old))
        ir.copy_origin(new, old)
        old.replace_all_uses_with(new)
    erase_unread({*made, before})


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
        alike: dict[Any, list[Site]] = {}
        for site in sites_of(program):
            alike.setdefault(site.kind, []).append(site)
        if not alike:
            return program, ir.Report({"sites": 0}, (f"{OPTION}: no product could run beside a collective",))
        taken, notes = self.gaining(program, alike, ctx) if self.choice == "auto" else (list(alike), ())
        sites = [site for kind in taken for site in alike[kind]]
        counts = {
            "sites": sum(map(len, alike.values())),
            "gathers": sum(site.is_gather for site in sites),
            "scatters": sum(not site.is_gather for site in sites),
        }
        return (with_rings(program, taken, ctx) if taken else program), ir.Report(counts, notes)

    def gaining(
        self, program: ir.Program, alike: Mapping[Any, list[Site]], ctx: ir.Context
    ) -> tuple[list[Any], tuple[str, ...]]:
        """Return the kinds of sites whose rings make the step shorter, each tried with those before it, and notes."""
        taken, notes = list[Any](), []
        least = self.seconds(program, ctx)
        for kind, sites in alike.items():
            found = self.seconds(with_rings(program, [*taken, kind], ctx), ctx)
            verdict = "taken" if found < least else "left"
            first = sites[0].collective
            where = f"%{first.name} ({ir.source(first)}) and {len(sites) - 1} alike"
            notes.append(f"{where}: {verdict}, a step of {1e3 * least:,.3f} ms takes {1e3 * found:,.3f} with rings")
            if found < least:
                taken, least = [*taken, kind], found
        return taken, tuple(notes)

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
