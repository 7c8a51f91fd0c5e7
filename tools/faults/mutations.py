"""Faults by syntax: an operator or a constant in a function of the passes is replaced by another.

    a < b           a <= b              compare
    a and b         a or b              boolean
    not a           a                   negation
    a + b           a - b               arithmetic
    2               3                   number
    True            False               flag
    a if c else b   b if c else a       branch

A fault is named after its function, kind and number there: `sharding/atoms:refine/compare_2`.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.faults.fault import Fault

ROOT = Path(__file__).parent.parent.parent
UNSEEN = ("check", "cost")  # packages that verify and predict: a fault there changes no program
COMPARED = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "*", ast.Div: "*"}


def mutations(per_room: int) -> list[Fault]:
    """Return `per_room` faults by syntax for each package, spread evenly over its code."""
    rooms = sorted(path for path in (ROOT / "passes").iterdir() if path.is_dir() and path.name not in UNSEEN)
    chosen: list[Fault] = []
    for room in rooms:
        faults = [fault for path in sorted(room.rglob("*.py")) for fault in mutations_of(path)]
        count = min(per_room, len(faults))
        chosen += [faults[round((k + 0.5) * len(faults) / count - 0.5)] for k in range(count)]
    return chosen


def mutations_of(path: Path) -> Iterator[Fault]:
    """Yield every fault by syntax of a file."""
    source, file = Source(path.read_text()), path.relative_to(ROOT).as_posix()
    prefix = file.removeprefix("passes/").removesuffix(".py")
    for function, body in functions(ast.parse(source.text), f"{prefix}:"):
        counts = Counter[str]()
        for node in body:
            for kind, new in changes(node, source.of):
                counts[kind] += 1
                old = source.of(node)
                means = f"In `{function}` `{shown(old)}` is `{shown(new)}`."
                yield Fault(f"{function}/{kind}_{counts[kind]}", file, old, new, means, source.start(node))


class Source:
    """The text of a file, for cutting out expressions by their positions, which count bytes."""

    def __init__(self, text: str):
        self.text, self.bytes = text, text.encode()
        self.lines = [0, *itertools.accumulate(map(len, self.bytes.splitlines(keepends=True)))]

    def start(self, node: ast.expr) -> int:
        """Return the offset of an expression in the text."""
        return len(self.bytes[: self.lines[node.lineno - 1] + node.col_offset].decode())

    def of(self, node: ast.expr) -> str:
        """Return the text of an expression."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        first, last = (self.lines[line - 1] for line in (node.lineno, node.end_lineno))
        return self.bytes[first + node.col_offset : last + node.end_col_offset].decode()


def functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, list[ast.expr]]]:
    """Yield each outermost function and method by its dotted name, with the expressions in its body, in order."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            body = [each for statement in node.body for each in expressions(statement)]
            yield f"{prefix}{node.name}", body


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of a statement in order, except those in f-strings, which have no positions."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.expr):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from expressions(child)


def changes(node: ast.expr, text: Callable[[ast.expr], str]) -> Iterator[tuple[str, str]]:
    """Yield (kind, other text) for an expression."""
    match node:
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in COMPARED:
            yield "compare", f"({text(node.left)}) {COMPARED[type(op)]} ({text(right)})"
        case ast.BoolOp(op=op, values=[left, right]):
            other = "or" if isinstance(op, ast.And) else "and"
            yield "boolean", f"({text(left)}) {other} ({text(right)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negation", f"({text(operand)})"
        case ast.BinOp(op=op, left=left, right=right) if type(op) in COMPUTED and not is_text(left):
            yield "arithmetic", f"({text(left)}) {COMPUTED[type(op)]} ({text(right)})"
        case ast.Constant(value=bool() as flag):
            yield "flag", str(not flag)
        case ast.Constant(value=int() as number):
            yield "number", str(number + 1)
        case ast.IfExp(test=test, body=body, orelse=other):
            yield "branch", f"{text(other)} if {text(test)} else {text(body)}"


def is_text(node: ast.expr) -> bool:
    """Return True for a string, which cannot be subtracted from."""
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


def shown(source: str) -> str:
    """Return source in one short line of a table."""
    line = " ".join(source.split()).replace("|", "\\|")
    return line if len(line) <= 60 else f"{line[:57]}..."
