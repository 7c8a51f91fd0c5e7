"""Plans for several values of options, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from compiler_trainer.planning import answer
from compiler_trainer.planning.search import Plan


class Varied(NamedTuple):
    """A plan and its values of the varied options."""

    values: dict[str, Any]
    plan: Plan


def vary_table(varied: Sequence[Varied]) -> Table:
    """Return a table with the best setting of each plan, a row each."""
    names = list(varied[0].values)
    table = Table(*names, *answer.HEADINGS[1:], title=answer.title(varied[0].plan))
    for values, plan in varied:
        table.add_row(*(str(values[name]) for name in names), *answer.row(plan, "", plan.best)[1:])
    return table
