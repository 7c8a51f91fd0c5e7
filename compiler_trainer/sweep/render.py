"""All output of a sweep, from its points."""

from __future__ import annotations

from pathlib import Path

from compiler_trainer.sweep import page, table


def render(folder: Path) -> bool:
    """Write the sweep's files and print its table; return True if all points are done.

    Raises UserError if there are none.
    """
    points = table.points(folder)
    table.write(folder)
    page.write(points, folder)
    table.show(points, folder)
    print(f"{folder}: sweep.parquet, sweep.csv, {page.FILE}")
    return all(p["status"] == "done" for p in points)
