"""Generated parts of Markdown pages, between the lines `<!-- NAME -->` and `<!-- end of NAME -->`, and their tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def row(cells: Iterable[object]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table with its head."""
    return "\n".join([row(heads), "|---" * len(heads) + "|", *map(row, rows)])


def markers(name: str) -> tuple[str, str]:
    """Return the lines around a generated part."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def split(page: str, name: str) -> tuple[str, str, str]:
    """Return a page's texts before a generated part, in it and after it; raise ValueError if it has no such part."""
    begin, end = markers(name)
    before, _, remainder = page.partition(begin)
    part, is_there, after = remainder.partition(end)
    if not is_there:
        raise ValueError(f"has no lines {begin} and {end}; add them around the generated part")
    return before, part, after


def renewed(page: str, name: str, text: str) -> str:
    """Return a page with another text as a generated part; raise ValueError if it has no such part."""
    (before, _, after), (begin, end) = split(page, name), markers(name)
    return f"{before}{begin}\n{text}\n{end}{after}"


def renew(path: Path, name: str, text: str) -> None:
    """Replace a generated part in a file; raise ValueError if it has no such part."""
    path.write_text(renewed(path.read_text(encoding="utf-8"), name, text), encoding="utf-8")
