"""The first tab of the page: curves, facts, seconds and the options that were set."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tool_runs import run_folder

from compiler_trainer.config.compose import default_job
from compiler_trainer.inspect.balance import SPANS
from compiler_trainer.inspect.course import changed, course, curve, seconds
from compiler_trainer.inspect.dumps import load

PACKED = {"source": "books", "rows": 1200, "padding": 0.0041, "cut": 0.125}


def test_many_steps_become_means_of_spans_and_none_is_lost():
    count = 3 * SPANS + 1
    points = curve([{"step": i + 1, "loss": float(i)} for i in range(count)], "loss")
    assert len(points) == SPANS and points[-1][0] == count
    starts = [0, *(step for step, _ in points)]
    means = [(a + b - 1) / 2 for a, b in zip(starts, starts[1:], strict=False)]
    assert [value for _, value in points] == pytest.approx(means)


def test_a_metric_of_some_steps_is_a_curve_of_those():
    records = [{"step": i, "loss": 1.0} | ({"eval_loss": float(i)} if i % 3 == 0 else {}) for i in range(1, 8)]
    assert curve(records, "eval_loss") == [(3, 3.0), (6, 6.0)] and curve(records, "lr") == []


def test_seconds_are_of_following_the_model_the_passes_and_the_kernels():
    by_pass = {"capture": 1.0, "forward.cast": 0.5, "forward.shard": 0.25, "step.joint": 2.0, "step.lower": 4.0}
    assert seconds(by_pass) == [("capture", 1.0), ("passes of forward", 0.75), ("passes of step", 2.0), ("kernels of step", 4.0)]


def test_facts_and_what_differs_from_the_defaults():
    run = load(run_folder())
    actual = course(replace(run, report=run.report | {"machine": {"processor": "any"}, "data": [PACKED]}, config={"optim": {"name": "sgd", "eps": 1e-8}}))
    facts, options = dict(actual.facts), dict(actual.changed)
    assert facts["parameters on a rank"].endswith("in 5 tensors") and facts["processor"] == "any"
    assert facts["packing of books"] == "1,200 sequences, 0.41% padding, 12.5% of documents cut"
    assert options["optim.name"] == "sgd" and "optim.eps" not in options


def test_a_run_with_two_options_set_lists_two():
    job = {"run.dir": "runs/x", "mesh.dp_shard": 1, "cluster.hbm_gib": 9.0, "train.steps": 7, "optim.lr": 0.5}
    options: dict = {}
    for name, value in {**default_job(), **job}.items():
        inner = options
        for part in name.split(".")[:-1]:
            inner = inner.setdefault(part, {})
        inner[name.split(".")[-1]] = value
    assert dict(changed(options)) == {"train.steps": 7, "optim.lr": 0.5}


