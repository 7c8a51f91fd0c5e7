"""The balance of a run's experts, from its metrics: the load of each layer along the steps, and related metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compiler_trainer.inspect.dumps import Run

LOAD = "expert_load/"  # prefix of the metrics of a layer's load
BESIDE = ("expert_load_max", "expert_load_mean", "expert_entropy", "balance_loss", "dropped_rows")
SPANS = 400  # most spans that are shown


@dataclass(frozen=True)
class Balance:
    """The load of experts over `spans` (first, last) of steps, in order; one value per span for each layer and metric.

    `loads` are the busiest expert's rows over the mean, the highest in a span; `beside` are means. Layers and metrics
    that some steps lack are left out, because options may change when a run is resumed.
    """

    spans: list[tuple[int, int]]
    loads: dict[str, list[float]]
    beside: dict[str, list[float]]


def balance(run: Run) -> Balance | None:
    """Return the balance of a run, None if no layer has experts."""
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
    """Return at most `SPANS` pieces (first, end) of `count` records, of equal lengths but for rounding."""
    pieces = min(count, SPANS)
    return ((i * count // pieces, (i + 1) * count // pieces) for i in range(pieces))
