"""Cut a finished program at the starts of its layers, and write equal pieces once, as bodies.

    embedding | layer 0 | layer 1 | head, loss | layer 1 | layer 0 | norm ... | update w0 | update w1 ...
    start     | block   | block   | head       | block'  | block'  | square   | adamw     | adamw

Consecutive operators with one role, which `overlap` gave them, are a piece. Operators that stand in a layer but work
for others (starts of gathers and reductions, and their waits) are pieces of their own, so that all layers are equal.
The update of each parameter is a piece. If layers do not repeat, a piece ends at the matmul before which it would grow
beyond `max_nodes`.

Views cross no border: they are made where they are read, so that no two values share memory. Nor do the numbers that
tell dropout's calls apart: they are made before all calls and passed to bodies. A collective's operand stays in memory
until the collective is waited for, in whichever piece.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import fx

from passes.communication.layer_starts import kernels_of
from passes.communication.node_order import in_flight
from passes.ir import ir
from passes.ir.bodies import Body, Piece, base_of, cut_out, insert_call, is_site, key_of, text_of
from passes.ir.layer import Layer
from passes.ir.operators import is_view, name_of
from passes.ir.stages import Stage
from passes.rules import pointwise

LONGEST_LINE = 2**31  # entries: kernels of flat bodies count in 32 bits
ELEMENTWISE = frozenset({*pointwise.RULES, "copy_"})


@dataclass(frozen=True)
class Segment(ir.Pass):
    """Write the program as calls of bodies; without `max_nodes`, as one."""

    max_nodes: int | None = 1000
    name = "segment"
    takes = (Stage.ORDERED,)
    gives = Stage.SEGMENTED

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        runs = [(None, list(program.calls()))] if self.max_nodes is None else list(cut(program, self.max_nodes))
        all_pieces = list(pieces(program, runs))
        bodies = bodies_of(all_pieces)
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in program.graph.nodes:
            if node.op in ("placeholder", "get_attr") or is_site(node):
                env[node] = graph.node_copy(node, env.__getitem__)
        for piece, body in zip(all_pieces, bodies, strict=True):
            insert_call(graph, body, piece, env)
        ir.copy_node(graph, program.graph.output_node(), env)
        calls = Counter(bodies)
        counts = {"calls": len(bodies), "bodies": len(calls)}
        notes = tuple(f"{body.name}: {n} calls, {len(body.graph.nodes)} nodes" for body, n in calls.items())
        return program.with_graph(graph), ir.Report(counts, notes)


# ---- cuts -------------------------------------------------------------------------------------------


Run = tuple[Layer | None, list[fx.Node]]  # consecutive operators, and the layer that they work for


def cut(program: ir.Program, max_nodes: int) -> Iterator[Run]:
    """Yield the operators in order, in runs of one role each: in a layer, for another layer, or an update."""
    kernels = kernels_of(program)
    operators = [node for node in program.calls() if not is_site(node)]
    for role, nodes in groupby(operators, ir.role):
        run: list[fx.Node] = []
        for node in nodes:
            if node in kernels and len(run) >= max_nodes:
                yield role.layer, run
                run = []
            run.append(node)
        yield role.layer, run


# ---- pieces -----------------------------------------------------------------------------------------


def pieces(program: ir.Program, runs: Sequence[Run]) -> Iterator[Piece]:
    """Yield the runs as graphs of their own, with views made where they are read."""
    run_of = {node: i for i, (_, run) in enumerate(runs) for node in run if not is_view(node)}
    returned = set(program.graph.output_node().all_input_nodes)
    members: list[dict[fx.Node, None]] = [{} for _ in runs]
    for i, (_, run) in enumerate(runs):
        for node in run:
            if node.target is operator.getitem and not is_view(node):  # items of a tuple stay with it
                run_of[node] = run_of[node.args[0]]
            if node in run_of or node in returned:
                place = run_of.setdefault(node, i)
                members[place].update(dict.fromkeys([*views_read(node, members[place]), node]))
    sent = sent_until(program, run_of)
    read = set(returned)
    for i, nodes in enumerate(members):
        read.update(n for node in nodes for n in node.all_input_nodes if n not in nodes)
        read.update(n for n in sent.get(i, ()) if n not in nodes)
    for i, nodes in enumerate(members):
        if nodes:
            results = [node for node in nodes if node in read and run_of.get(node) == i]
            own_nodes = [node for node in nodes if run_of.get(node) == i]
            outside = [node for node in nodes if run_of.get(node) != i]
            piece = cut_out(own_nodes, results, sent.get(i, ()), outside)
            piece = piece if is_flat(piece) else cut_out(list(nodes), results, sent.get(i, ()))
            yield replace(piece, layer=runs[i][0])


def views_read(node: fx.Node, inside: Container[fx.Node]) -> list[fx.Node]:
    """Return the views that a node reads and the views under these, in order, except those `inside` already."""
    views: list[fx.Node] = []
    for operand in node.all_input_nodes:
        if is_view(operand) and operand not in inside and operand not in views:
            views += [*(n for n in views_read(operand, inside) if n not in views), operand]
    return views


def sent_until(program: ir.Program, run_of: dict[fx.Node, int]) -> dict[int, list[fx.Node]]:
    """Return, for each run, the operands of collectives that began in other runs and are waited for in this one."""
    operands: dict[int, list[fx.Node]] = {}
    for start, wait in in_flight(program.graph.nodes):
        if run_of[start] != run_of[wait]:
            operands.setdefault(run_of[wait], []).extend(base_of(node) for node in start.all_input_nodes)
    return operands


# ---- bodies -----------------------------------------------------------------------------------------


def bodies_of(all_pieces: Sequence[Piece]) -> list[Body]:
    """Return the body of each piece; a body may return more than a piece needs."""
    graphs = [piece.graph(()) for piece in all_pieces]
    flat = [is_flat(piece) for piece in all_pieces]
    texts = [text_of(graph, line) for graph, line in zip(graphs, flat)]
    needed: dict[str, set[tuple[int, ...]]] = {}
    for piece, text in zip(all_pieces, texts):
        needed.setdefault(text, set()).add(piece.positions())
    names, bodies = Counter[str](), dict[tuple[str, tuple[int, ...]], Body]()
    chosen = []
    for piece, text, line in zip(all_pieces, texts, flat):
        serving = max((r for r in needed[text] if set(r) >= set(piece.positions())), key=len)
        if (text, serving) not in bodies:
            phase = ir.phase(piece.nodes[-1])
            key = key_of(f"{text} {serving}")
            bodies[text, serving] = Body(f"{phase}_{names[phase]}", piece.graph(serving), key, serving, line)
            names[phase] += 1
        chosen.append(bodies[text, serving])
    return chosen


def is_flat(piece: Piece) -> bool:
    """Return True if a piece is elementwise on contiguous tensors of one shape and on scalars.

    Full sums are allowed.
    """
    of_views = {n for view in piece.views for n in (view, *view.all_input_nodes)}
    if not of_views.isdisjoint((*piece.results, *piece.nodes)):
        return False  # these views cannot be made before the piece
    shapes = set()
    for node in (*piece.reads, *piece.nodes):
        if not ir.is_tensor(node):
            return False
        value = ir.example(node)
        if value.dim():
            shapes.add(value.shape)
        if not value.is_contiguous():
            return False
    if len(shapes) != 1 or math.prod(*shapes) >= LONGEST_LINE:
        return False
    return all(name_of(node) in ELEMENTWISE or is_whole_sum(node) for node in piece.nodes)


def is_whole_sum(node: fx.Node) -> bool:
    """Return True if an operator adds up all entries of a tensor."""
    return name_of(node) == "sum" and not ir.example(node).dim() and len(node.args) == 1
