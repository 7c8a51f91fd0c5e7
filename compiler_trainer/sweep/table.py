"""The rows of a sweep as files and on the console."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet
from rich.table import Table

from compiler_trainer.config.errors import UserError
from compiler_trainer.console import wide
from compiler_trainer.sweep.stored import FILE, Point, read

Row = dict[str, Any]
HEAD = ("point", "status", "error", "started", "objective")
MIB = 2**20

# column, heading, format
SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("loss", "loss", "{:.4f}".format),
    ("eval_loss", "eval loss", "{:.4f}".format),
    ("tokens_per_s", "tokens/s", "{:,.0f}".format),
    ("step_ms", "step ms", "{:,.0f}".format),
    ("peak_mem_bytes", "peak MiB", lambda value: f"{value / MIB:,.1f}"),
    ("wire_bytes", "sent MiB", lambda value: f"{value / MIB:,.2f}"),
    ("compile_s", "compile s", "{:.1f}".format),
)


def points(folder: Path) -> list[Point]:
    """Return the points of the sweep in `folder`, by number; raise UserError if there are none."""
    unsorted = [read(file.parent) for file in folder.glob(f"*/{FILE}")]
    if not unsorted:
        raise UserError(str(folder), "holds no point of a sweep; name the run.dir of a multirun")
    return sorted((p for p in unsorted if p is not None), key=lambda p: p["point"])


def write(folder: Path) -> None:
    """Write `sweep.parquet` and `sweep.csv`: a row a point, a column an override, result, or environment entry."""
    columns = pa.Table.from_pylist(rows(points(folder)))
    for name, save in (("sweep.parquet", parquet.write_table), ("sweep.csv", csv.write_csv)):
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}", delete=False) as partial:
            save(columns, partial)
        os.chmod(partial.name, 0o644)
        os.replace(partial.name, folder / name)  # concurrent jobs each write all rows so far


def rows(points: Sequence[Point]) -> list[Row]:
    """Return each point as one flat row, all with the same columns; columns of several types are text."""
    results = {column for column, _, _ in SHOWN}

    def options(p: Point) -> Row:
        return {f"option.{name}" if name in results else name: value for name, value in p["overrides"].items()}

    flattened = [
        {**{name: p.get(name) for name in HEAD}, **options(p), **p.get("result", {}), **p["environment"]}
        for p in points
    ]
    names = list(dict.fromkeys(name for row in flattened for name in row))
    mixed = {name for name in names if not is_uniform([row.get(name) for row in flattened])}
    return [{name: as_text(row.get(name)) if name in mixed else row.get(name) for name in names} for row in flattened]


def is_uniform(values: Sequence[Any]) -> bool:
    """Return True if all values but None are of one type that a column can have."""
    kinds = {type(value) for value in values if value is not None}
    return kinds <= {int, float} or len(kinds) == 1 and kinds <= {str, bool}


def as_text(value: Any) -> str | None:
    """Return a value as the command line would have it."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def varying(points: Sequence[Point]) -> list[str]:
    """Return the names of the overrides in which points differ."""
    names = dict.fromkeys(name for p in points for name in p["overrides"])
    return [n for n in names if any(p["overrides"].get(n) != points[0]["overrides"].get(n) for p in points)]


def show(points: Sequence[Point], folder: Path) -> None:
    """Print the sweep as a table, with the errors of failed points below."""
    console = wide(markup=False)
    names = varying(points)
    table = Table(title=str(folder), title_justify="left")
    for heading in ("point", *names, "status"):
        table.add_column(heading)
    for _, heading, _ in SHOWN:
        table.add_column(heading, justify="right")
    for p in points:
        table.add_row(str(p["point"]), *(as_text(p["overrides"].get(n)) for n in names), p["status"], *figures(p))
    console.print(table)
    for p in points:
        if "error" in p:
            console.print(f"point {p['point']}: {p['error']}", highlight=False)


def figures(point: Point) -> list[str]:
    """Return the shown results of a point, empty if there is no value."""
    result = point.get("result", {})
    return ["" if result.get(column) is None else text(result[column]) for column, _, text in SHOWN]
