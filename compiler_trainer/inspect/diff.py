"""The differences between two runs: options, training graphs, communication, memory and loss.

Nodes of two graphs are equal if they compute the same: operator, constants, shape, placement and operands, recursively.
Of the remaining nodes, those of the same module, phase and operator are paired in order. A pair counts as changed if
its nodes differ themselves, not if only nodes before them differ. Nodes without a pair are added or removed. Names and
source lines are ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import fx

from compiler_trainer.config.options import flat, spelled
from compiler_trainer.inspect.dumps import Node, Run, Stage
from passes.ir.printer import format_operand

FIRST = 5  # nodes shown for each kind of change
MOST = 20  # rows of operators and modules
ITS_OWN = ("run.dir", "checkpoint.dir")  # options that differ between any two runs
NUMBER = re.compile(r"\d+")

Rows = list[tuple[str, ...]]


# ---- graphs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A node that is `added`, `removed` or `changed`: before (None if added) and after (None if removed)."""

    kind: str
    before: Node | None
    after: Node | None

    @property
    def node(self) -> Node:
        """The node after the change, or the removed node."""
        node = self.after or self.before
        assert node is not None
        return node


def itself(node: Node) -> tuple[str, ...]:
    """Return the properties of a node without its operands: operator, constants, value, placement, module and phase."""
    constants = fx.map_arg((node.node.args, dict(node.node.kwargs)), lambda operand: "%")
    return (node.op, node.label, format_operand(constants), node.value, node.spec, node.module, node.phase)


def role(node: Node) -> tuple[str, ...]:
    """Return the key by which two differing nodes are paired as one that changed."""
    return (node.op, node.module, node.phase, node.label)


def meanings(stage: Stage) -> dict[str, str]:
    """Return a hash of everything that each node computes, by the node's name."""
    hashes: dict[str, str] = {}
    for node in stage.by_name.values():
        parts = (*itself(node), *(hashes.get(operand, "") for operand in node.operands))
        hashes[node.name] = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return hashes


def compare_graphs(a: Stage, b: Stage) -> list[Change]:
    """Return the nodes added, removed and changed from one graph to the other."""
    hashes = meanings(a), meanings(b)
    pairs: dict[str, str] = {}  # names in a -> names in b
    left = list(a.by_name.values()), list(b.by_name.values())
    for key_a, key_b in (
        (lambda n: hashes[0][n.name], lambda n: hashes[1][n.name]),
        (itself, itself),
        (role, role),
    ):
        left = pair(*left, key_a, key_b, pairs)
    changes = [Change("changed", x, y) for x, y in changed(a, b, pairs)]
    changes += [Change("removed", node, None) for node in left[0]]
    return changes + [Change("added", None, node) for node in left[1]]


def pair(
    a: list[Node], b: list[Node], key_a: Callable[[Node], Any], key_b: Callable[[Node], Any], pairs: dict[str, str]
) -> tuple[list[Node], list[Node]]:
    """Pair nodes with equal keys in order; return the nodes left over."""
    waiting: dict[Any, list[Node]] = defaultdict(list)
    for node in reversed(b):
        waiting[key_b(node)].append(node)
    left = []
    for node in a:
        if same := waiting.get(key_a(node)):
            pairs[node.name] = same.pop().name
        else:
            left.append(node)
    paired = set(pairs.values())
    return left, [node for node in b if node.name not in paired]


def changed(a: Stage, b: Stage, pairs: Mapping[str, str]) -> Iterator[tuple[Node, Node]]:
    """Yield pairs whose nodes differ themselves, or whose operands are not paired with each other."""
    for name, other in pairs.items():
        x, y = a.by_name[name], b.by_name[other]
        if itself(x) != itself(y) or [pairs.get(o) for o in x.operands] != list(y.operands):
            yield x, y


# ---- the rest ------------------------------------------------------------------------------------


def unequal(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield keys whose values differ, and both values; None if a mapping lacks the key."""
    for key in dict.fromkeys([*a, *b]):
        if a.get(key) != b.get(key):
            yield key, a.get(key), b.get(key)


def traffic(run: Run) -> dict[str, int]:
    """Return calls and bytes sent of a step's collectives, by kind and axis."""
    totals: Counter[str] = Counter()
    for stage in run.trained:
        for part in stage.report["accounting"]["traffic"]:
            totals[f"{part['kind']} over {part['axis']}, calls"] += part["calls"]
            totals[f"{part['kind']} over {part['axis']}, bytes sent"] += part["sent_bytes"]
    return dict(totals)


def memory(run: Run) -> dict[str, int]:
    """Return bytes at the peak of the program that needs most: the total, and by content."""
    highest = max((s.report["accounting"] for s in run.trained), key=lambda cost: cost["peak_bytes"])
    return {"peak": highest["peak_bytes"], **highest["alive"]}


def losses(a: Run, b: Run) -> Rows:
    """Return the first step whose loss differs, and the step with the largest difference."""
    first, second = ({record["step"]: record["loss"] for record in run.metrics if "loss" in record} for run in (a, b))
    apart = [(abs(y - x), step, x, y) for step, x, y in unequal(first, second) if x is not None and y is not None]
    rows: Rows = [("steps", str(len(first)), str(len(second)), "")] if first.keys() != second.keys() else []
    for label, (by, step, x, y) in (("first", apart[0]), ("largest", max(apart))) if apart else ():
        rows.append((f"{label} difference, step {step}", f"{x:.9g}", f"{y:.9g}", f"{by:.3g}"))
    return rows


# ---- showing -------------------------------------------------------------------------------------


def sections(a: Run, b: Run) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
    """Yield title, column heads and rows of each table; no rows if nothing differs."""
    yield "options", ("option", "A", "B"), options(flat(a.config), flat(b.config))
    programs = [{stage.program: stage for stage in run.trained} for run in (a, b)]
    missing = unequal(*(dict.fromkeys(p, "yes") for p in programs))
    yield "programs", ("program", "in A", "in B"), [(name, x or "no", y or "no") for name, x, y in missing]
    for name in programs[0]:
        if name in programs[1]:
            changes = compare_graphs(programs[0][name], programs[1][name])
            yield f"graph of {name}", ("operator", "module", "added", "removed", "changed"), counts(changes)
            yield f"first changes of {name}", ("", "A", "B"), firsts(changes)
    for name in a.bodies.keys() & b.bodies.keys():
        calls = ({body.name: body.called for body in run.bodies[name]} for run in (a, b))
        yield f"bodies of {name}", ("body", "calls in A", "B", "B - A"), numbers(*calls)
    yield "communication of a step", ("what", "A", "B", "B - A"), numbers(traffic(a), traffic(b))
    yield "bytes at the peak of memory", ("what", "A", "B", "B - A"), numbers(memory(a), memory(b))
    yield "loss", ("", "A", "B", "difference"), losses(a, b)


def options(a: Mapping[str, Any], b: Mapping[str, Any]) -> Rows:
    """Return options that differ, as a command line takes them; empty if a run has no such option."""
    names = [name for name, _, _ in unequal(a, b) if name not in ITS_OWN]
    return [(name, *(spelled(run[name]) if name in run else "" for run in (a, b))) for name in names]


def numbers(a: Mapping[str, int], b: Mapping[str, int]) -> Rows:
    """Return rows with both numbers and their difference, for numbers that differ."""
    rows = ((name, x or 0, y or 0) for name, x, y in unequal(a, b))
    return [(name, f"{x:,}", f"{y:,}", f"{y - x:+,}") for name, x, y in rows]


def counts(changes: Iterable[Change]) -> Rows:
    """Return the number of changes by operator and module, layers together, most first."""
    by_place: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for change in changes:
        by_place[change.node.op, NUMBER.sub("*", change.node.module)][change.kind] += 1
    order = sorted(by_place.items(), key=lambda item: (-item[1].total(), item[0]))
    rows: Rows = [(*key, *(str(n[kind] or "") for kind in ("added", "removed", "changed"))) for key, n in order[:MOST]]
    if others := [n for _, n in order[MOST:]]:
        kinds = [sum(n[kind] for n in others) for kind in ("added", "removed", "changed")]
        rows.append((f"{len(others)} more", "", *(str(n or "") for n in kinds)))
    return rows


def firsts(changes: Iterable[Change]) -> Rows:
    """Return the first few changes of each kind, as lines of text."""
    shown: Counter[str] = Counter()
    rows = []
    for change in changes:
        shown[change.kind] += 1
        if shown[change.kind] <= FIRST:
            rows.append((change.kind, *(node.text if node else "" for node in (change.before, change.after))))
    return rows


def show(a: Run, b: Run, out: Console) -> bool:
    """Print the differences; return True if there are any."""
    differs = False
    for title, heads, rows in sections(a, b):
        if not rows:
            continue
        differs = True
        table = Table(*heads, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        out.print(table)
    if not differs:
        out.print("no difference")
    return differs
