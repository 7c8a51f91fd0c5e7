"""The load of experts along a run, from its metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compiler_trainer.inspect.balance import SPANS, balance
from compiler_trainer.inspect.dumps import Run

EMPTY = Run(Path("run"), {}, {}, [], [])


def records(count: int) -> list[dict]:
    return [{"step": 10 + i, "loss": 1.0, "expert_load_max": 1.0 + i, "dropped_rows": float(2 * i),
             "expert_load/layers.0": 1.0 + i, "expert_load/layers.3": 2.0} for i in range(count)]


def test_a_value_a_step():
    actual = balance(replace(EMPTY, metrics=records(3)))
    assert actual.spans == [(10, 10), (11, 11), (12, 12)]
    assert actual.loads == {"layers.0": [1.0, 2.0, 3.0], "layers.3": [2.0, 2.0, 2.0]}
    assert actual.beside == {"expert_load_max": [1.0, 2.0, 3.0], "dropped_rows": [0.0, 2.0, 4.0]}


def test_of_a_long_run_the_worst_load_and_the_mean_of_metrics():
    actual = balance(replace(EMPTY, metrics=records(2 * SPANS + 1)))
    assert actual.spans[0] == (10, 11) and actual.spans[-1][1] == 10 + 2 * SPANS and len(actual.spans) == SPANS
    assert actual.loads["layers.0"][0] == 2.0 and max(actual.loads["layers.0"]) == 2 * SPANS + 1
    assert actual.beside["dropped_rows"][0] == 1.0


def test_a_metric_that_ends_when_a_run_is_resumed_is_left_out():
    resumed = [{key: value for key, value in record.items() if key != "dropped_rows"} for record in records(5)[3:]]
    actual = balance(replace(EMPTY, metrics=[*records(3), *resumed]))
    assert list(actual.beside) == ["expert_load_max"] and actual.loads["layers.0"] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_nothing_without_experts():
    assert balance(replace(EMPTY, metrics=[{"step": 1, "loss": 2.0}])) is None
    assert balance(EMPTY) is None
