"""How evenly a run used its experts, of its metrics: the load of each layer along the steps, and what goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compiler_trainer.inspect.dumps import Run

LOAD = "expert_load/"  # how the metrics of a layer's load begin
BESIDE = ("expert_load_max", "expert_load_mean", "expert_entropy", "balance_loss", "dropped_rows")
SPANS = 400  # at most so many are shown


@dataclass(frozen=True)
class Balance:
    """The steps in `spans` (first, last), all of them in order; of each layer and metric one value a span.

    `loads` are the busiest expert's rows over the mean, the most in a span; `beside` are means. What some steps lack,
    as options may change when a run is resumed, is left out.
    """

    spans: list[tuple[int, int]]
    loads: dict[str, list[float]]
    beside: dict[str, list[float]]


def balance(run: Run) -> Balance | None:
    """The balance of a run, None where no layer had experts."""
    records = [record for record in run.metrics if any(name.startswith(LOAD) for name in record)]
    if not records:
        return None
    spans = list(spans_of(len(records)))
    always = [name for name in records[0] if all(name in record for record in records)]
    layers = [name for name in always if name.startswith(LOAD)]
    metrics = [name for name in BESIDE if name in always]
    return Balance(
        [(int(records[first]["step"]), int(records[last - 1]["step"])) for first, last in spans],
        {name.removeprefix(LOAD): [max(r[name] for r in records[a:b]) for a, b in spans] for name in layers},
        {name: [sum(r[name] for r in records[a:b]) / (b - a) for a, b in spans] for name in metrics},
    )


def spans_of(count: int) -> Iterator[tuple[int, int]]:
    """At most `SPANS` pieces (first, end) of so many records, of equal lengths but for rounding."""
    pieces = min(count, SPANS)
    return ((i * count // pieces, (i + 1) * count // pieces) for i in range(pieces))
