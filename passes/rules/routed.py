"""Rows sorted by expert (`passes/program/routed.py`): each rank sorts those of its own tokens.

The sorted dim is a factor like any other on the axes that data lies on, though in an order of its own: it is sharded as
`order` was, never converted. How many rows an expert has is then a rank's own count, a term of the sum over ranks, and
is used as such. Owners of experts are a factor, too, put on the axes that experts are spread over.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.program import ir, routed
from passes.program.builder import Builder
from passes.program.mesh import DATA_AXES
from passes.program.spec import Spec
from passes.rules.base import SPREAD, Names, Rule, RuleMaker, opaque, tensor_operands, zero_if_zero

ONLY = frozenset({*DATA_AXES, SPREAD})


def spread(node: fx.Node) -> Rule:
    """ids[n] -> [d, n]: for each owner, which of its experts they are; padding is of none."""
    ids, groups, owners = node.args
    return Rule(
        ((("n",),),),
        ((("d",), ("n",)),),
        {"n": ir.example(ids).shape[0], "d": owners},  # type: ignore[arg-type, dict-item]
        pad_safe={0: groups},  # type: ignore[dict-item]
        pad_out=lambda fills: -(-groups // owners),  # type: ignore[operator]
        emit=_emit_spread,
        puts=frozenset("d"),
    )


def _emit_spread(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Each rank is the owner that its coordinate says: experts before its own are counted off."""
    ids, groups, owners = operands[0], *node.args[1:]
    (factor,) = results[0].dims[0]
    if not factor.axes:
        return builder.call(routed.spread, (ids, groups, owners))
    each = -(-groups // owners)  # type: ignore[operator]
    (axis_index,) = builder.at(factor).values()
    own = builder.trace(lambda ids, axis_index: torch.where(ids < groups, ids - each * axis_index, -1), ids, axis_index)
    return builder.call(routed.spread, (own, each, 1))


def order(node: fx.Node) -> Rule:
    """ids[d, (t k)] -> slots in the order of their experts; padding goes nowhere."""
    slots, sizes = _slots(node)
    nowhere: float = node.args[1]  # type: ignore[assignment]
    dims = (("d",), slots)
    return Rule((dims,), (dims,), sizes, whole=frozenset("k"), pad_safe={0: nowhere}, only={"t": ONLY})


def ends(node: fx.Node) -> Rule:
    """ids[d, (t k)] -> how many are of a group or of those before it, [d, e]."""
    (_, groups, _), (slots, sizes) = node.args, _slots(node)
    return Rule(
        ((("d",), slots),),
        ((("d",), ("e",)),),
        sizes | {"e": groups},  # type: ignore[dict-item]
        {name: "sum" for name in slots},
        whole=frozenset("ek"),
        pad_in=groups,  # type: ignore[arg-type]
        only={"t": ONLY},
    )


def _slots(node: fx.Node) -> tuple[Names, dict[str, int]]:
    """The factors of ids, so many for each token, and all sizes."""
    ids, _, share = node.args
    owners, size = ir.example(ids).shape  # type: ignore[arg-type]
    sizes = {"d": owners, "t": size // share, "k": share}  # type: ignore
    return ("t", "k") if share != 1 else ("t",), sizes  # type: ignore[return-value]


def histogram(node: fx.Node) -> Rule:
    """x[n] -> how many fall into each of e bins of a range that is given."""
    x, bins, low, high = (*node.args, *(100, 0, 0)[len(node.args) - 1 :])
    size = ir.example(x).shape[0] if ir.example(x).dim() == 1 and low < high else None  # type: ignore
    if size is None:
        return opaque(node)
    sizes = {"n": size, "e": bins}
    return Rule(((("n",),),), ((("e",),),), sizes, {"n": "sum"}, whole=frozenset("e"), pad_in=high + 1)  # type: ignore


def rows(node: fx.Node) -> Rule:
    """x[t, ...], order[d, (t k)] -> [(d t k), ...]: k rows a token, in the order of their experts."""
    x, slots_of = tensor_operands(node)
    rest, share = _rest(x), node.args[2]
    sizes = {"d": ir.example(slots_of).shape[0], "t": ir.example(x).shape[0], "k": share} | _sizes(x)
    slots: Names = ("t", "k") if share != 1 else ("t",)
    return Rule(
        ((("t",), *rest), (("d",), slots)),
        ((("d", *slots), *rest),),
        sizes,  # type: ignore[arg-type]
        whole=frozenset("k"),
        only={"t": ONLY},
        leads={"t": 1, "d": 1},
        repeats=share != 1 or sizes["d"] != 1,
    )


def unorder(node: fx.Node) -> Rule:
    """rows[(d n), ...], order[d, n] -> [n, ...] where the slots were, summed over owners."""
    given, slots = tensor_operands(node)
    rest, (owners, size) = _rest(given), ir.example(slots).shape
    return Rule(
        ((("d", "n"), *rest), (("d",), ("n",))),
        ((("n",), *rest),),
        {"d": owners, "n": size} | _sizes(given),
        {"d": "sum"},
        linear=frozenset([frozenset([0])]),
        only={"n": ONLY},
        leads={"n": 1, "d": 1},
    )


def sends(node: fx.Node) -> Rule:
    """ids[(t k)] -> [d, s, c] or [d, s, p]: of each source, a rank that holds tokens, what is for each owner."""
    ids, groups, share, owners, sources = node.args[:5]
    last = ir.example(node).shape[2]
    sizes = {"t": ir.example(ids).shape[0] // share, "k": share, "d": owners, "s": sources, "c": last}  # type: ignore
    return Rule(
        ((("t", "k"),),),
        ((("d",), ("s",), ("c",)),),
        sizes,
        whole=frozenset("kdsc"),
        pad_safe={0: groups},  # type: ignore[dict-item]
        resize=lambda args, shape: (*args[:4], shape[1], *args[5:]),
        only={"t": ONLY},
        rides={"s": "t"},
        splits="t",
    )


def received(node: fx.Node) -> Rule:
    """counts[d, s, p] -> [d, (s c)]: for which of its owner's experts each row is that came."""
    counts, capacity = node.args
    d, s, p = ir.example(counts).shape  # type: ignore[arg-type]
    sizes = {"d": d, "s": s, "p": p, "c": capacity}
    return Rule(
        ((("d",), ("s",), ("p",)),),
        ((("d",), ("s", "c")),),
        sizes,  # type: ignore[arg-type]
        whole=frozenset("pc"),
        only={"s": ONLY},
        puts=frozenset("d"),
    )


def pack(node: fx.Node) -> Rule:
    """x[t, ...], slots[d, s, c], ids[(t k)] -> [(d s c), ...]: the rows that each source sends."""
    x, slots, ids = tensor_operands(node)
    rest, share = _rest(x), node.args[3]
    return Rule(
        ((("t",), *rest), (("d",), ("s",), ("c",)), (("t", "k"),)),
        ((("d", "s", "c"), *rest),),
        _sent(slots) | {"t": ir.example(x).shape[0], "k": share} | _sizes(x),  # type: ignore[arg-type]
        whole=frozenset("kdsc"),
        linear=frozenset([frozenset([0])]),
        only={"t": ONLY},
        leads={"t": 2},
        rides={"s": "t"},
        splits="t",
    )


def unpack(node: fx.Node) -> Rule:
    """rows[(d s c), ...], slots[d, s, c], ids[t] -> [t, ...]: what came back, where the slots were."""
    given, slots, ids = tensor_operands(node)
    rest = _rest(given)
    return Rule(
        ((("d", "s", "c"), *rest), (("d",), ("s",), ("c",)), (("t",),)),
        ((("t",), *rest),),
        _sent(slots) | {"t": ir.example(ids).shape[0]} | _sizes(given),
        whole=frozenset("dsc"),
        linear=frozenset([frozenset([0])]),
        only={"t": ONLY},
        leads={"t": 2},
        rides={"s": "t"},
        splits="t",
    )


def _sent(slots: fx.Node) -> dict[str, int]:
    return dict(zip("dsc", ir.example(slots).shape))


def arrange(node: fx.Node) -> Rule:
    """x[(d n), ...], order[d, n] -> the rows of each owner in that order, or (`restore`) out of it."""
    x, slots = tensor_operands(node)
    rest, (owners, size) = _rest(x), ir.example(slots).shape
    dims = (("d", "n"), *rest)
    return Rule(
        (dims, (("d",), ("n",))),
        (dims,),
        {"d": owners, "n": size} | _sizes(x),
        linear=frozenset([frozenset([0])]),
        only={"n": ONLY},
        leads={"n": 1, "d": 1},
    )


def known(node: fx.Node) -> Rule:
    """rows[(d n), ...], ends[d, p] -> the rows, zero behind the last end."""
    given, counts = tensor_operands(node)
    rest, (owners, each) = _rest(given), ir.example(counts).shape
    sizes = {"d": owners, "p": each, "n": ir.example(given).shape[0] // owners} | _sizes(given)
    dims = (("d", "n"), *rest)
    return Rule(
        (dims, (("d",), ("p",))),
        (dims,),
        sizes,
        whole=frozenset("p"),
        linear=frozenset([frozenset([0])]),
        only={"n": ONLY},
        leads={"n": 0, "d": 1},
        terms={1: "n"},
    )


def of_group(node: fx.Node) -> Rule:
    """table[e, ...], ends[d, p], order[d, n] -> [(d n), ...]: what the table holds of each row's expert."""
    table, counts, slots = tensor_operands(node)
    rest, (owners, each) = _rest(table), ir.example(counts).shape
    groups = ir.example(table).shape[0]
    return Rule(
        ((("e",), *rest), (("d",), ("p",)), (("d",), ("n",))),
        ((("d", "n"), *rest),),
        {"e": groups, "d": owners, "p": each, "n": ir.example(slots).shape[1]} | _sizes(table),
        whole=frozenset("ep"),
        linear=frozenset([frozenset([0])]),
        only={"n": ONLY},
        leads={"n": 2, "d": 2},
        terms={1: "n"},
        rides={"e": "d"},
    )


def grouped_mm(node: fx.Node) -> Rule:
    """rows[(d r), k], weight[e, k, n], ends[d, p] -> [(d r), n]: by the matrix of its expert.

    If ends are no rank's own (`F.grouped_mm` as a model calls it) r is whole.
    """
    given, weight, counts = tensor_operands(node)
    e, k, n = ir.example(weight).shape
    *owners, each = ir.example(counts).shape
    own = counts.target is routed.ends
    d = owners[0] if owners else 1
    return Rule(
        ((("d", "r"), ("k",)), (("e",), ("k",), ("n",)), ((("d",), ("p",)) if owners else (("p",),))),
        ((("d", "r"), ("n",)),),
        {"d": d, "r": ir.example(given).shape[0] // d, "e": e, "p": each, "k": k, "n": n},
        {"k": "sum"},
        whole=frozenset("ep" if own else "epr"),
        linear=frozenset([frozenset([0]), frozenset([1])]),
        pad_out=zero_if_zero,
        only={"r": ONLY},
        leads={"r": 0, "d": 2},
        terms={2: "r"},
        rides={"e": "d"},
    )


def _rest(x: fx.Node) -> tuple[Names, ...]:
    return tuple((f"d{i}",) for i in range(1, ir.example(x).dim()))


def _sizes(x: fx.Node) -> dict[str, int]:
    return {f"d{i}": n for i, n in enumerate(ir.example(x).shape) if i}


def rules() -> dict[str, RuleMaker]:
    """Operator name -> rule, for rows sorted by expert."""
    return {
        "histc": histogram,
        "ct::spread": spread,
        "ct::order": order,
        "ct::ends": ends,
        "ct::rows": rows,
        "ct::unorder": unorder,
        "ct::sends": sends,
        "ct::counts": sends,
        "ct::received": received,
        "ct::pack": pack,
        "ct::unpack": unpack,
        "ct::arrange": arrange,
        "ct::restore": arrange,
        "ct::known": known,
        "ct::of_group": of_group,
        "ct::grouped_mm": grouped_mm,
    }
