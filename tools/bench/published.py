"""Predicted against published: `python -m tools.bench.published`.

Each file of tools/bench/published has the rows of one source: the job, the cluster, and its speed. A row is compiled in
full, as a dry run is, and its prediction is compared with the figure. A row that a factor of a cluster was fitted to,
or that is not like for like, is shown and not judged.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from torch import fx

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import load_yaml
from compiler_trainer.planning.dry import compile_dry, predict_step
from passes.ir import ir
from tools.bench.command import check_page
from tools.bench.job import composed
from tools.pages import renew, table

ROWS = Path(__file__).parent / "published"
TITLE = "bench published"  # in markers
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One published figure: tokens a second and GPU, and GiB that a GPU's allocator reserved, if stated.

    `sets` names the factor that was fitted to this row, `gib_sets` the one fitted to its memory, `unlike` the reason
    why the two jobs differ. With an `eager_loss` the trainer did not compile the loss.
    """

    name: str
    source: str
    cluster: str
    gpus: int
    options: tuple[str, ...]
    tokens_per_s: float
    gib: float | None = None
    sets: str = ""
    gib_sets: str = ""
    unlike: str = ""
    eager_loss: bool = False

    @property
    def is_judged(self) -> bool:
        """True if the row's error counts."""
        return not (self.sets or self.unlike)


@dataclass(frozen=True)
class Outcome:
    """The prediction of a row, and the seconds it took."""

    row: Row
    tokens_per_s: float
    gib: float
    took_s: float

    @property
    def speed_error(self) -> float:
        """The relative error of the predicted throughput."""
        return self.tokens_per_s / self.row.tokens_per_s - 1

    @property
    def memory_error(self) -> float | None:
        """The relative error of the predicted memory."""
        return self.gib / self.row.gib - 1 if self.row.gib else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; exit with 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="a pattern of FILE/ROW, e.g. 'torchtitan_2024_12/8B*'")
    parser.add_argument("--write", type=Path, help="replace the table at `<!-- bench published -->` in a file")
    parser.add_argument("overrides", nargs="*", help="options for every row, e.g. cluster.throttle=1.0")
    args = parser.parse_args(arguments)
    try:
        rows = [row for row in read_rows() if fnmatch.fnmatch(row.name, args.only)]
        if not rows:
            raise UserError("--only", f"{args.only!r} names no row; there are {', '.join(r.name for r in read_rows())}")
        if args.write:
            check_page(args.write, TITLE)
        if args.write and (args.only != "*" or args.overrides):
            raise UserError("--write", "is for the table of all rows as published; leave out --only and options")
        outcomes = [outcome for row in rows if (outcome := tried(row, args.overrides))]
        Console(width=160).print(Markdown(report(outcomes)))
        if len(outcomes) < len(rows):
            raise UserError("--only", f"{len(rows) - len(outcomes)} rows could not be compiled")
        if args.write:
            renew(args.write, TITLE, report(outcomes))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def tried(row: Row, overrides: Sequence[str]) -> Outcome | None:
    """Return the prediction of a row; print the error and return None if it cannot be compiled."""
    try:
        outcome = predicted(row, overrides)
    except UserError as error:
        print(f"{row.name}: {error}", file=sys.stderr)
        return None
    print(f"{row.name}: {outcome.speed_error:+.1%}, {outcome.took_s:.0f} s", file=sys.stderr)
    return outcome


def read_rows() -> Iterator[Row]:
    """Yield every published row, by file."""
    for path in sorted(ROWS.glob("*.yaml")):
        source = load_yaml(path)
        for row in source["rows"]:
            yield read_row(path.stem, source, row)


def read_row(stem: str, source: dict[str, Any], row: dict[str, Any]) -> Row:
    """Return a row with its shared options: those of all rows, and the sets that `with` names."""
    shared = [option for name in row.get("with", ()) for option in source[name]]
    row = {key: value for key, value in source.items() if key in ("eager_loss", "gib_sets")} | row
    options = (f"cluster={source['cluster']}", *source["options"], *shared, *row["options"])
    fields = {key: value for key, value in row.items() if key in Row.__dataclass_fields__}
    overrides = {"name": f"{stem}/{row['name']}", "options": options, "cluster": source["cluster"]}
    return Row(**{"source": source["source"], **fields, **overrides})


def predicted(row: Row, overrides: Sequence[str] = ()) -> Outcome:
    """Compile a row for its mesh and return its prediction."""
    began = time.perf_counter()
    cfg = composed([*row.options, *overrides], row.gpus)
    cfg = replace(cfg, passes=replace(cfg.passes, verify="none"))
    fused = (lambda node: not is_of_loss(node)) if row.eager_loss else None
    report = predict_step(cfg, compile_dry(cfg, None), fused)
    memory = report["prediction"]["memory"]["reserved_bytes"] / GIB
    return Outcome(row, report["predicted"]["tokens_per_s_per_gpu"], memory, time.perf_counter() - began)


def is_of_loss(node: fx.Node) -> bool:
    """Return True if an operator belongs to the loss, forward or backward: no module made it."""
    return not ir.module_path(node) and ir.phase(node) != "optimizer"


# ---- the table ----------------------------------------------------------------------------------


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the table in Markdown, and the errors of the judged rows."""
    heads = ("row", "tokens/s/GPU published", "predicted", "GiB published", "predicted", "")
    return "\n".join([table(heads, map(line, outcomes)), "", *judgement([o for o in outcomes if o.row.is_judged])])


def line(outcome: Outcome) -> list[str]:
    """Return the cells of a row of the table."""
    row, memory = outcome.row, outcome.memory_error
    by_memory = f"its memory set the {row.gib_sets}" if row.gib_sets else ""
    notes = [f"set the {row.sets}" if row.sets else row.unlike, by_memory]
    return [
        row.name,
        f"{row.tokens_per_s:,.0f}",
        f"{outcome.tokens_per_s:,.0f} ({outcome.speed_error:+.0%})",
        f"{row.gib:.1f}" if row.gib else "",
        f"{outcome.gib:.1f}" + (f" ({memory:+.0%})" if memory is not None else ""),
        "; ".join(filter(None, notes)),
    ]


def judgement(judged: Sequence[Outcome]) -> list[str]:
    """Return lines with the median and the largest error of throughput and memory."""
    lines = []
    for quantity, errors in (
        ("throughput", [outcome.speed_error for outcome in judged]),
        ("memory", [e for outcome in judged if (e := outcome.memory_error) is not None and not outcome.row.gib_sets]),
    ):
        if errors:
            middle, worst = statistics.median(map(abs, errors)), max(errors, key=abs)
            lines.append(f"{quantity}: {len(errors)} rows are judged; median error {middle:.1%}, largest {worst:+.1%}.")
    return lines


if __name__ == "__main__":
    main()
