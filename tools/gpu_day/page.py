"""The page of a GPU session: `docs/measured/gpu.md`."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.gpu_day.parts import PARTS, Part
from tools.gpu_day.results import Result, Session
from tools.pages import renew, split, table

GENERATED = "gpu day"  # the part of the page
COLUMNS = (
    "job", "tokens/s", "torch.compile", "ratio", "predicted", "MFU, %", "peak GiB", "torch.compile", "predicted",
    "first step, s", "torch.compile",
)  # fmt: skip
GIB, SHOWN = 2**30, 14
VERDICTS = (
    "works", "FAILS", "right ", "WRONG", "bodies compared", "further bodies", "error: ", "tokens/s", "free ", "WAITS",
    "killed after",
)  # fmt: skip
FACTS = ("loopback", "GiB free")  # of the machine, not of a part


def write(sessions: Sequence[Session], path: Path) -> None:
    """Replace the generated part of a page; for each part the newest result of all sessions counts."""
    split(path.read_text(encoding="utf-8"), GENERATED)  # raises before the predictions, which take minutes
    with tempfile.TemporaryDirectory() as folder:
        renew(path, GENERATED, "\n".join(lines(merged(sessions), Path(folder))))


def merged(sessions: Sequence[Session]) -> Session:
    """Return the results of all sessions, for each part the newest that was reached."""
    results: dict[str, Result] = {}
    for session in sessions:
        results |= {n: r for n, r in session.results.items() if r.code is not None or n not in results}
    return Session(sessions[-1].machine, sessions[-1].date, results)


def lines(session: Session, folder: Path) -> Iterator[str]:
    """Yield the page: the machine, what works, speeds next to predictions, outputs."""
    yield f"{session.date}: " + "; ".join(f"{name} {value}" for name, value in session.machine.items()) + "."
    results = [(r.name, outcome(r), f"{r.seconds:.0f}", f"`python -m {r.command}`") for r in session.results.values()]
    yield from ("", table(("part", "result", "seconds", "command"), results))
    measured = [part for part in PARTS if session.results.get(part.name, Result("", "")).rounds]
    if measured:
        rows = [speeds(part, session.results[part.name], prediction(part, folder)) for part in measured]
        yield from ("", table(COLUMNS, rows))
    for result in session.results.values():
        if output_lines := verdicts(result.output) if not result.rounds else []:
            yield from (f"\n{result.name}:\n", "```text", *output_lines, "```")


def verdicts(output: str) -> list[str]:
    """Return the lines of an output with verdicts."""
    lines = (
        " ".join(line.replace("│", " ").split()) for line in output.partition("Fatal Python error")[0].splitlines()
    )
    lines = (line for line in lines if not any(fact in line for fact in FACTS))
    chosen = [line for line in lines if any(word in line for word in VERDICTS)]
    return (
        [line for line in chosen if not re.fullmatch(r"(works|FAILS), [\d.]+ s", line)]
        if len(chosen) < SHOWN
        else chosen
    )


def outcome(result: Result) -> str:
    """Return a word for the result of a part."""
    if result.code is None:
        return "not reached"
    if result.code == 124:
        return "**out of time**"
    return "passed" if result.is_done else "**failed**"


def prediction(part: Part, folder: Path) -> dict[str, Any]:
    """Return the prediction of a dry run of a part's job for an H100; empty without one."""
    if command := part.prediction(folder):
        subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
        return json.loads((folder / "dry" / part.slug / "report.json").read_text())["predicted"]
    return {}


def speeds(part: Part, result: Result, predicted: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row of the table of speeds; MFU by the operations that the prediction counts."""
    ours, stock = ([r for r in result.rounds.get(name, ()) if "error" not in r] for name in ("ours", "whole"))
    speed, stock_speed = (statistics.median(r["tokens_per_s"] for r in of) if of else None for of in (ours, stock))
    predicted_speed = predicted.get("tokens_per_s_per_gpu")
    mfu = predicted["mfu"] * speed / predicted_speed if speed and predicted_speed else None
    peaks = [max(r["peak_bytes"] for r in of) / GIB if of else None for of in (ours, stock)]
    predicted_peak = predicted["peak_mem_bytes"] / GIB if predicted else None
    first = [of[0]["cold_s"] if of else None for of in (ours, stock)]
    ratio = speed / stock_speed if speed and stock_speed else None
    cells = (
        shown(speed, 0), shown(stock_speed, 0), shown(ratio, 2), shown(predicted_speed, 0), shown(mfu and 100 * mfu, 1),
        shown(peaks[0], 1), shown(peaks[1], 1), shown(predicted_peak, 1), shown(first[0], 0), shown(first[1], 0),
    )  # fmt: skip
    errors = "; ".join(
        f"{name}: {rounds[-1]['error']}" for name, rounds in result.rounds.items() if "error" in rounds[-1]
    )
    return part.name + (f" ({errors})" if errors else ""), *cells


def shown(number: float | None, digits: int) -> str:
    """Return a number for a table, nothing for None."""
    return "" if number is None else f"{number:,.{digits}f}"
