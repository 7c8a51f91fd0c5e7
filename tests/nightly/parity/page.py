"""Write the page of compared cases: by axis, model and option, and by pairs of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

from compiler_trainer.parity.compare import Verdict
from tests.nightly.parity.features import AXES, features
from tests.nightly.parity.record import Record
from tools.pages import renew

NAMES = re.compile(r"%\w+|\d+(\.\d+)?(e-?\d+)?|\S+\.py:\d+|'[^']*'")
VERDICTS: tuple[Verdict, ...] = ("right", "refused", "wrong", "crash")


def write(records: Sequence[Record], path: Path) -> None:
    """Replace the generated part of the page."""
    renew(path, "parity", "\n".join(lines(records)))


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of the tables."""
    known = {record: features(record.case) for record in records}
    seconds = sum(record.outcome.seconds for record in records)
    counts = Counter(record.outcome.verdict for record in records)
    yield f"{len(records):,} cases, {seconds / 60:.0f} minutes of one process: " + ", ".join(
        f"{counts[verdict]:,} {verdict}" for verdict in VERDICTS
    ) + "."
    yield "\n## By axis, model and option\n"
    yield "Worst error of right cases in fp64: the largest difference, relative to the largest entry of the value.\n"
    verdicts = [verdict for verdict in VERDICTS if counts[verdict]]
    yield f"| with | cases | {' | '.join(verdicts)} | worst error |\n|---|---|{'---|' * len(verdicts)}---|"
    names = sorted({name for features_of_case in known.values() for name in features_of_case}, key=order)
    for name in names:
        yield row(name, [record for record in records if name in known[record]], verdicts)
    yield "\n## By pair of an axis and another feature\n"
    yield "Right cases among those that are not refused; `-`: no case, `refused`: all are refused.\n"
    axes = [axis for axis in AXES if axis in names]
    yield f"| with | {' | '.join(axes)} |\n|---|{'---|' * len(axes)}"
    for name in names:
        cells = (cell([r for r in records if {axis, name} <= known[r]]) if axis != name else "" for axis in axes)
        yield f"| {name} | {' | '.join(cells)} |"
    yield "\n## Pairs without a right case\n"
    yield "In brackets: the number of cases, none of them right. Without brackets: no case was drawn.\n"
    yield from gaps(records, known, names)
    yield "\n## Refused, by reason\n"
    yield "| cases | reason | for example |\n|---|---|---|"
    yield from reasons([r for r in records if r.outcome.verdict == "refused"])
    if failing := [r for r in records if r.outcome.verdict in ("wrong", "crash")]:
        yield "\n## Wrong and crashing\n"
        yield from (f"- `{r.case}`: {shown(str(r.outcome))}" for r in failing)


def order(name: str) -> tuple[int, str]:
    """Return the sort key of a name: axes first."""
    return (AXES.index(name), "") if name in AXES else (len(AXES), name)


def row(name: str, of: Sequence[Record], verdicts: Sequence[Verdict]) -> str:
    """Return a row of the first table."""
    counts = Counter(record.outcome.verdict for record in of)
    exact = [r.outcome.error for r in of if r.outcome.verdict == "right" and r.outcome.allowed < 1e-6]
    worst = f"{max(exact):.0e}" if exact else ""
    return f"| {name} | {len(of)} | {' | '.join(str(counts[verdict]) for verdict in verdicts)} | {worst} |"


def cell(of: Sequence[Record]) -> str:
    """Return the number of right cases among those that were not refused."""
    right = sum(record.outcome.verdict == "right" for record in of)
    ran = sum(record.outcome.verdict != "refused" for record in of)
    if not of:
        return "-"
    return "refused" if not ran else str(right) if right == ran else f"**{right} of {ran}**"


def gaps(records: Sequence[Record], known: dict[Record, frozenset[str]], names: Sequence[str]) -> Iterator[str]:
    """Yield the pairs without a right case, by their first name: never drawn, or refused each time."""
    drawn, right = Counter[frozenset[str]](), Counter[frozenset[str]]()
    for record in records:
        pairs = [frozenset(pair) for pair in combinations(known[record], 2)]
        drawn.update(pairs)
        right.update(pairs if record.outcome.verdict == "right" else [])
    for name in names:
        others = [other for other in names if order(other) > order(name) and not right[frozenset((name, other))]]
        if others:
            shown = (f"{o} ({n})" if (n := drawn[frozenset((name, o))]) else o for o in others)
            yield f"- {name}: {', '.join(shown)}"


def reasons(refused: Iterable[Record]) -> Iterator[str]:
    """Yield refusals, grouped if they are equal except for names and numbers, the most frequent first."""
    alike: dict[str, list[Record]] = {}
    for record in refused:
        alike.setdefault(NAMES.sub("_", record.outcome.reason)[:80], []).append(record)
    by_count: Callable[[list[Record]], int] = len
    for group in sorted(alike.values(), key=by_count, reverse=True):
        yield f"| {len(group)} | {shown(group[0].outcome.reason)} | `{min((str(r.case) for r in group), key=len)}` |"


def shown(text: str) -> str:
    """Truncate and escape text for a table cell."""
    return text[:300].replace("|", "\\|")
