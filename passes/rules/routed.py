"""Rows sorted by expert (`passes/program/routed.py`): each rank sorts those of its own tokens.

The sorted dim is a factor like any other on the axes that data lies on, though in an order of its own: it is sharded as
`order` was, never converted. How many rows an expert has is then a rank's own count, a term of the sum over ranks, and
is used as such.
"""

from __future__ import annotations

from torch import fx

from passes.program import ir, routed
from passes.program.mesh import DATA_AXES
from passes.rules.base import Names, Rule, RuleMaker, opaque, tensor_operands, zero_if_zero

ONLY = frozenset(DATA_AXES)


def order(node: fx.Node) -> Rule:
    """ids[(t k)] -> slots in the order of their experts; padding goes nowhere."""
    slots, sizes = _slots(node)
    nowhere: float = node.args[1]  # type: ignore[assignment]
    return Rule(((slots,),), ((slots,),), sizes, whole=frozenset("k"), safe={0: nowhere}, only={"t": ONLY})


def ends(node: fx.Node) -> Rule:
    """ids[(t k)] -> how many are of a group or of those before it, [e]."""
    (_, groups, _), (slots, sizes) = node.args, _slots(node)
    return Rule(
        ((slots,),),
        ((("e",),),),
        sizes | {"e": groups},  # type: ignore[dict-item]
        {name: "sum" for name in slots},
        whole=frozenset("ek"),
        needs=groups,  # type: ignore[arg-type]
        only={"t": ONLY},
    )


def _slots(node: fx.Node) -> tuple[Names, dict[str, int]]:
    """The factors of ids, so many for each token, and their sizes."""
    ids, _, share = node.args
    sizes = {"t": ir.example(ids).shape[0] // share, "k": share}  # type: ignore
    return ("t", "k") if share != 1 else ("t",), sizes  # type: ignore[return-value]


def histogram(node: fx.Node) -> Rule:
    """x[n] -> how many fall into each of e bins of a range that is given."""
    x, bins, low, high = (*node.args, *(100, 0, 0)[len(node.args) - 1 :])
    size = ir.example(x).shape[0] if ir.example(x).dim() == 1 and low < high else None  # type: ignore
    if size is None:
        return opaque(node)
    sizes = {"n": size, "e": bins}
    return Rule(((("n",),),), ((("e",),),), sizes, {"n": "sum"}, whole=frozenset("e"), needs=high + 1)  # type: ignore


def rows(node: fx.Node) -> Rule:
    """x[t, ...], order[(t k)] -> [(t k), ...]: k rows a token, in the order of their experts."""
    x = tensor_operands(node)[0]
    rest, share = _rest(x), node.args[2]
    sizes = {"t": ir.example(x).shape[0], "k": share} | _sizes(x)
    slots: Names = ("t", "k") if share != 1 else ("t",)
    return Rule(
        ((("t",), *rest), (slots,)),
        ((slots, *rest),),
        sizes,  # type: ignore[arg-type]
        whole=frozenset("k"),
        only={"t": ONLY},
        leads={"t": 1},
        repeats=share != 1,
    )


def unorder(node: fx.Node) -> Rule:
    """rows[n, ...], order[n] -> [n, ...] where the slots were."""
    given = tensor_operands(node)[0]
    rest = _rest(given)
    return Rule(
        ((("n",), *rest), (("n",),)),
        ((("n",), *rest),),
        {"n": ir.example(given).shape[0]} | _sizes(given),
        linear=frozenset([frozenset([0])]),
        only={"n": ONLY},
        leads={"n": 1},
    )


def of_group(node: fx.Node) -> Rule:
    """table[e, ...], ends[e], order[n] -> [n, ...]: what the table holds of each row's expert."""
    table, counts, slots = tensor_operands(node)
    rest = _rest(table)
    return Rule(
        ((("e",), *rest), (("e",),), (("n",),)),
        ((("n",), *rest),),
        {"e": ir.example(counts).shape[0], "n": ir.example(slots).shape[0]} | _sizes(table),
        whole=frozenset("e"),
        linear=frozenset([frozenset([0])]),
        only={"n": ONLY},
        leads={"n": 2},
        terms={1: "n"},
    )


def grouped_mm(node: fx.Node) -> Rule:
    """rows[r, k], weight[e, k, n], ends[e] -> [r, n]: by the matrix of its expert; r is whole if ends are others'."""
    given, weight, counts = tensor_operands(node)
    e, k, n = ir.example(weight).shape
    return Rule(
        ((("r",), ("k",)), (("e",), ("k",), ("n",)), (("e",),)),
        ((("r",), ("n",)),),
        {"r": ir.example(given).shape[0], "e": e, "k": k, "n": n},
        {"k": "sum"},
        whole=frozenset("e" if counts.target is routed.ends else "er"),
        linear=frozenset([frozenset([0]), frozenset([1])]),
        fills=zero_if_zero,
        only={"r": ONLY},
        leads={"r": 0},
        terms={2: "r"},
    )


def _rest(x: fx.Node) -> tuple[Names, ...]:
    return tuple((f"d{i}",) for i in range(1, ir.example(x).dim()))


def _sizes(x: fx.Node) -> dict[str, int]:
    return {f"d{i}": n for i, n in enumerate(ir.example(x).shape) if i}


def rules() -> dict[str, RuleMaker]:
    """Operator name -> rule, for rows sorted by expert."""
    return {
        "histc": histogram,
        "ct::order": order,
        "ct::ends": ends,
        "ct::rows": rows,
        "ct::unorder": unorder,
        "ct::of_group": of_group,
        "ct::grouped_mm": grouped_mm,
    }
