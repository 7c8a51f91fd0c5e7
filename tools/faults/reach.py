"""The models that run the code of each fault; others cannot notice it."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from tools.faults.fault import Fault
from tools.faults.judge import by_value, compiled
from tools.faults.models import make
from tools.faults.plant import ROOT

Lines = set[tuple[str, int]]  # file and number
PASSES = str(ROOT / "passes")


def lines_run(model: str) -> Lines:
    """Return the lines of the passes that run while a model is compiled and takes its steps."""
    lines: Lines = set()

    def note(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PASSES):
            return None
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return note

    threading.settrace(note)  # the passes run in a thread with room for deep recursion
    sys.settrace(note)
    try:
        step, error = compiled(case := make(model), "none")
        assert step is not None, error
        by_value(case, step)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return lines


def places(fault: Fault) -> Lines | None:
    """Return the lines of the statement with a fault; None if it runs when the module is imported."""
    path, text = str(ROOT / fault.file), (ROOT / fault.file).read_text()
    first = text[: fault.start(text)].count("\n") + 1
    last = first + fault.old.rstrip("\n").count("\n")
    tree = ast.parse(text)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= first and last <= (node.end_lineno or 0)]
    smallest = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    at_import = smallest in tree.body and not any(isinstance(node, ast.Lambda) for node in ast.walk(smallest))
    return None if at_import else {(path, k) for k in range(smallest.lineno, (smallest.end_lineno or 0) + 1)}


def reached(faults: Iterable[Fault], models: Iterable[str]) -> dict[str, list[str]]:
    """Return the models that run the code of each fault, by its name."""
    run = {model: lines_run(model) for model in models}
    where = {fault.name: places(fault) for fault in faults}
    return {name: [m for m in models if lines is None or lines & run[m]] for name, lines in where.items()}
