"""Rules for rows sorted by expert (`passes/ops/routed.py`): each rank sorts the rows of its own tokens.

`dispatch` turns tokens into rows, `combine` rows into tokens. `_place` places both: tokens have the placement of their
expert ids; owners of experts, `d`, lie on the axes over which experts are spread:

    dispatch    x[t, ...], ids[(t k)] -> [(d t k), ...]     gathered on these axes; each owner takes its own rows
                                      -> [(d s c), ...]     sent by each source `s` that has tokens; exchanged
    combine     the reverse: a sum over owners, or rows sent back to their slots

In between, rows are sharded like any dim, though each rank has its own order. They are never converted: the same ids
place both ends and the groups of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from passes.ir import ir
from passes.ir.mesh import DATA_AXES, Mesh
from passes.ir.spec import Dim, Factor, Spec
from passes.ops import routed
from passes.ops.routed import Way
from passes.rules.base import Held, Rule, RuleMaker, from_text, opaque, parse_dims, tensor_operands
from passes.trace.builder import Builder, Emit

ONLY = frozenset(DATA_AXES)
FEATURES = "uvwxyz"  # factors of dims other than tokens and rows


def histogram(node: fx.Node) -> Rule:
    """x[n] -> counts[e] of the entries in each of e bins of a given range."""
    x, _, low, high = (*node.args, *(100, 0, 0)[len(node.args) - 1 :])
    if ir.example(x).dim() != 1 or low >= high:  # type: ignore[arg-type, operator]
        return opaque(node)
    return replace(from_text("n -> e; sum n; whole e")(node), pad_in=high + 1)  # type: ignore[operator]


# ---- tokens to rows, and back --------------------------------------------------------------------------------


def dispatch(node: fx.Node) -> Rule:
    """x[t, ...], ids[(t k)] -> [(d t k), ...] or [(d s c), ...], the rows of each owner."""
    x, _, share, way = *node.args[:3], Way(*node.args[3])  # type: ignore[misc]
    features, tokens = _features(x), "tk" if share == 1 else "t"  # type: ignore[arg-type]
    rule = _rule(node, way, f"({tokens}){features}, (tk) -> ({_rows(way)}){features}", _emit_dispatch)
    if way.sources:
        return replace(rule, linear=frozenset([frozenset([0])]))
    return replace(rule, repeats=share != 1 or way.owners != 1)


def combine(node: fx.Node) -> Rule:
    """rows[(d t k), ...] or [(d s c), ...], ids[(t k)] -> [(t k), ...]: rows in their slots, summed over owners."""
    way, features = Way(*node.args[2]), _features(node.args[0])  # type: ignore[arg-type, misc]
    rule = _rule(node, way, f"({_rows(way)}){features}, (tk) -> (tk){features}", _emit_combine)
    return replace(rule, reduced={} if way.sources else {"d": "sum"}, linear=frozenset([frozenset([0])]))


def groups(node: fx.Node) -> Rule:
    """ids[(t k)] -> [d, (t k)] or [d, (s c)]: the expert of each of an owner's rows."""
    way = Way(*node.args[1])  # type: ignore[misc]
    return _rule(node, way, f"(tk) -> d({_rows(way)[1:]})", _emit_groups)


def sent(node: fx.Node) -> Rule:
    """ids[(t k)] -> []: the number of rows for which there is room."""
    return replace(_rule(node, Way(*node.args[1]), "(tk) ->", _emit_sent), reduced={"t": "sum", "k": "sum"})  # type: ignore[misc]


def _rule(node: fx.Node, way: Way, text: str, emit: Emit) -> Rule:
    """Return the rule of an operator whose last operand, ids, routes rows; `_place` places all its factors."""
    operands, results = ([parse_dims(dims, 0) for dims in side.split(",")] for side in text.split("->"))
    first, *_, ids = (ir.example(n) for n in (*tensor_operands(node)[:1], *tensor_operands(node)))
    sizes = {"t": ids.shape[0] // way.share, "k": way.share, "d": way.owners, "s": way.sources, "c": way.room}
    sizes |= dict(zip(_features(node.args[0]), first.shape[1:]))  # type: ignore[arg-type]
    unsharded = frozenset(sizes) - frozenset(FEATURES)
    return Rule(tuple(operands), tuple(results), sizes, whole=unsharded, emit=emit, place=partial(_place, node, way))


def _rows(way: Way) -> str:
    """Return the factors of rows."""
    return "dsc" if way.sources else "dtk"


def _features(x: fx.Node) -> str:
    """Return the factors of all dims but the first."""
    return FEATURES[: ir.example(x).dim() - 1]


def _place(node: fx.Node, way: Way, operands: Held, mesh: Mesh) -> Mapping[str, tuple[str, ...]]:
    """Return the axes of each factor: tokens as ids are placed, owners on the axes over which experts are spread.

    Rows are gathered over the axes of experts, or sent from tokens that all these axes split. Raises Refused if tokens
    cannot be split like that.
    """
    allowed = {*DATA_AXES, *mesh.experts} if way.sources else {*DATA_AXES} - {*mesh.experts}
    ids = {atom: factor for atom, factor in operands[-1].items() if atom.split(".#")[0] == "t"}
    tokens = {atom: tuple(a for x in f.axes for a in mesh.over(x) if a in allowed) for atom, f in ids.items()}
    axes_of = {"t": (), "d": _owners(mesh)} | tokens
    if way.sources:
        over = {a for axes in tokens.values() for a in axes}
        if left := tuple(a for a in mesh.experts if a not in over):
            atom = next((atom for atom, factor in ids.items() if factor.label == "sequence"), None)
            if atom is None:
                fix = "which of their dims is the sequence is not known; set passes.moe.dispatch=all_gather"
                raise ir.Refused("shard", node, f"tokens are to be split over {left[0]}: {fix}")
            axes_of[atom] = (*tokens[atom], *left)
        axes_of["s"] = mesh.together(over.difference(mesh.experts))
    return axes_of


def _owners(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of owners of experts."""
    return (mesh.experts_over,) if mesh.experts_over else ()


# ---- a rank's nodes -------------------------------------------------------------------------------------------

Nodes = list[fx.Node]
Specs = list[Spec]


@dataclass(frozen=True)
class _Routing:
    """The nodes that route a rank's slots: the experts of its rows, their order, and, if rows are sent, the slots sent.

    `counts` are the rows sent to each expert; `here` and `there` are the dims of rows on the sending and on the
    receiving ranks.
    """

    groups: fx.Node
    order: fx.Node
    slots: fx.Node | None
    counts: fx.Node | None
    here: Dim
    there: Dim


def _routing(builder: Builder, node: fx.Node, ids: fx.Node, spec: Spec, way: Way) -> _Routing:
    """Return the routing by ids in one placement, inserted once for all operators."""
    key = ids, way
    if key not in builder.operators:
        filled = builder.fill_padding(ids, spec, way.groups)
        routing = _exchanged(builder, node, filled, spec, way) if way.sources else _gathered(builder, filled, way)
        builder.operators[key] = routing
    return builder.operators[key]


def _gathered(builder: Builder, ids: fx.Node, way: Way) -> _Routing:
    """Return the routing of gathered tokens; a rank is the owner at its coordinate, and its experts count from 0."""
    owner = Factor(way.owners, _owners(builder.mesh))
    sizes = way.groups, way.owners
    if owner.axes:
        (axis_index,) = builder.at(owner).values()
        groups, each, sizes = way.groups, way.each, (way.each, 1)
        ids = builder.trace(lambda ids, at: torch.where(ids < groups, ids - each * at, -1), ids, axis_index)
    groups_ = builder.call(routed.spread, (ids, *sizes))
    return _Routing(groups_, builder.call(routed.order, (groups_, way.each, way.share)), None, None, (), ())


def _exchanged(builder: Builder, node: fx.Node, ids: fx.Node, spec: Spec, way: Way) -> _Routing:
    """Return the routing of rows sent to the owners of their experts, which receive the counts of these rows."""
    mesh, over = builder.mesh, {a for name in spec.sharded for a in builder.mesh.over(name)}
    here, there = (Factor(way.sources, mesh.together(axes)) for axes in (over, over.difference(mesh.experts)))
    all_owners, owner, room = Factor(way.owners), Factor(way.owners, _owners(mesh)), Factor(way.room)
    local = list(way._replace(sources=here.local(mesh)))
    slots, counts = (builder.call(target, (ids, local)) for target in (routed.sends, routed.counts))
    before, after = (((d,), (s,), (Factor(way.each),)) for d, s in ((all_owners, here), (owner, there)))
    received = builder.reshard(node, counts, Spec(before), Spec(after), "counts of rows for their owners")
    groups = builder.call(routed.received, (received, way.room))
    order = builder.call(routed.order, (groups, way.each, 1))
    return _Routing(groups, order, slots, counts, (all_owners, here, room), (owner, there, room))


def _emit_groups(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, results: Specs) -> fx.Node:
    at = _routing(builder, node, operands[0], specs[0], Way(*node.args[1]))  # type: ignore[misc]
    return builder.call(at.groups.target, at.groups.args)  # type: ignore[arg-type]  # counts do not depend on the order


def _emit_sent(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, results: Specs) -> fx.Node:
    at = _routing(builder, node, operands[0], specs[0], Way(*node.args[1]))  # type: ignore[misc]
    return builder.call(torch.ops.aten.sum.default, (at.counts,))


def _emit_dispatch(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, results: Specs) -> fx.Node:
    (x, ids), share = operands, node.args[2]
    at = _routing(builder, node, ids, specs[1], Way(*node.args[3]))  # type: ignore[misc]
    if at.slots is None:
        return builder.call(routed.rows, (x, at.order, share))
    sent = builder.call(routed.pack, (x, at.slots, ids, share))
    here, there = (replace(specs[0], dims=(rows, *specs[0].dims[1:])) for rows in (at.here, at.there))
    received = builder.reshard(node, sent, here, there, "rows for their experts")
    return builder.call(routed.arrange, (received, at.order))


def _emit_combine(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, results: Specs) -> fx.Node:
    (rows, ids), way = operands, Way(*node.args[2])  # type: ignore[misc]
    at = _routing(builder, node, ids, specs[1], way)
    if at.slots is None:
        if way.owners > 1:  # rows of other owners are in those owners' terms of the sum
            rows = builder.call(routed.known, (rows, builder.call(routed.ends, (at.groups, way.each, 1))))
        return builder.call(routed.unorder, (rows, at.order))
    here, there = (replace(specs[0], dims=(rows, *specs[0].dims[1:])) for rows in (at.here, at.there))
    restored = builder.call(routed.restore, (rows, at.order))
    max(rows, at.order).append(restored)  # as early as possible: gradients of other parts are sent before it
    returned = builder.reshard(node, restored, there, here, "rows for their tokens")
    return builder.call(routed.unpack, (returned, at.slots, ids))


# ---- rows and their experts' weights---------------------------------------------------------------------------


def expert_mm(node: fx.Node) -> Rule:
    """rows[(d r), k], weight[e, k, n], groups[d, r] -> [(d r), n]: each row times the matrix of its expert."""
    return _of_rows(node, "(dr)k, ekn, dr -> (dr)n; sum k; whole e; linear 0; linear 1", _emit_expert_mm)


def of_expert(node: fx.Node) -> Rule:
    """table[e, ...], groups[d, r] -> [(d r), ...]: the table's entry for each row's expert."""
    features = _features(node.args[0])  # type: ignore[arg-type]
    rule = _of_rows(node, f"e{features}, dr -> (dr){features}; whole e; linear 0", _emit_of_expert)
    return replace(rule, pad_out=lambda fills: None)


def each_mm(node: fx.Node) -> Rule:
    """rows[e, m, k], weight[e, k, n] -> [e, m, n]: all rows times the matrix of each expert."""
    rule = from_text("emk, ekn -> emn; sum k; linear 0; linear 1")(node)
    return replace(rule, emit=_emit_each_mm, place=_by_owner)


def _of_rows(node: fx.Node, text: str, emit: Emit) -> Rule:
    """Return the rule of an operator on rows and their experts' weights; experts are placed with their owners."""
    return replace(from_text(text)(node), only={"r": ONLY}, emit=emit, place=_by_owner)


def _by_owner(operands: Held, mesh: Mesh) -> Mapping[str, tuple[str, ...]]:
    """Return the axes of experts, those of their owners: the same number for each owner, the last may have fewer."""
    return dict.fromkeys("de", _owners(mesh))


def _ends(builder: Builder, groups: fx.Node, experts: fx.Node) -> fx.Node:
    """Return the ends of each expert's rows on a rank, inserted once."""
    owners, each = ir.example(groups).shape[0], ir.example(experts).shape[0]
    key = routed.ends, groups, each // owners
    if key not in builder.operators:
        builder.operators[key] = builder.call(routed.ends, (groups, each // owners, 1))
    return builder.operators[key]


def _emit_expert_mm(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, results: Specs) -> fx.Node:
    (rows, weight), groups = _summed(builder, operands, specs, (1, 1)), operands[2]
    return builder.call(routed.grouped_mm, (rows, weight, _ends(builder, groups, weight), node.args[3]))


def _emit_each_mm(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, results: Specs) -> fx.Node:
    return builder.call(torch.ops.aten.bmm.default, tuple(_summed(builder, operands, specs, (2, 1))))


def _summed(builder: Builder, factors: Nodes, specs: Specs, dims: tuple[int, int]) -> Nodes:
    """Return the factors of a matmul, with zeros as padding of the summed dims."""
    triples = zip(factors, specs, dims)
    return [x if spec.fill == 0.0 else builder.fill_padding(x, spec, 0.0, [dim]) for x, spec, dim in triples]


def _emit_of_expert(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, results: Specs) -> fx.Node:
    table, groups = operands
    return builder.call(routed.of_group, (table, _ends(builder, groups, table), groups))


RULES: dict[str, RuleMaker] = {
    "histc": histogram,
    "ct::dispatch": dispatch,
    "ct::combine": combine,
    "ct::groups": groups,
    "ct::sent": sent,
    "ct::expert_mm": expert_mm,
    "ct::of_expert": of_expert,
    "ct::each_mm": each_mm,
    "ct::grouped_mm": from_text("rk, ekn, e -> rn; sum k; whole e r; linear 0; linear 1"),
}
