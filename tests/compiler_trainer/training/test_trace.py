"""Traces of steps: collectives have the graph's names, in the run's own folder."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from net_runs import MESH, Net, loss
from short_runs import no_file_above

import compiler_trainer as ct
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.training import trace
from passes.ir import ir
from passes.ir.operators import kind_of


@pytest.fixture(scope="module")
def step():
    plan = {"layers.*.up.weight": {"tp": 0}, "layers.*.down.weight": {"tp": 1}}
    return ct.compile_step(Net(), loss, {"x": torch.randn(8, 5, 12)}, mesh=MESH, ranks="lockstep", microbatches=2,
                           passes={"shard": {"plan": plan}})


def options(folder, steps: int) -> Config:
    cfg = Config()
    return replace(cfg, run=replace(cfg.run, dir=str(folder), profile=True), train=replace(cfg.train, steps=steps))


def event(node, at: float) -> dict:
    """Return the profiler's event of a node; steps are a fixed time apart."""
    dims = list(ir.value(node.args[0]).shape) if ir.is_tensor(node.args[0]) else [[1], [2]]
    return {"name": node.target._schema.name, "cat": "cpu_op", "ts": at, "args": {"Input Dims": [dims, []]}}


def test_collectives_and_waits_are_named_in_every_step(step):
    nodes = trace.nodes_of(step)
    accumulated = [n for n in step.train["accumulate"].program.calls() if kind_of(n)]
    assert sum(n in accumulated for n in nodes) == 2 * len(accumulated) > 0
    events = [event(node, i) for i, node in enumerate([*nodes, *nodes])]
    other = {"name": "aten::mm", "cat": "cpu_op", "ts": 0.5, "args": {"Input Dims": [[2, 2]]}}
    trace.name_collectives([*reversed(events), other], nodes)
    assert [e["name"] for e in events] == [trace.label(node) for node in [*nodes, *nodes]]
    assert other["name"] == "aten::mm"
    gathers = [e["name"] for e in events if e["name"].startswith("all_gather dp_shard %")]
    assert gathers and all(f"wait for {name}" in {e["name"] for e in events} for name in gathers)


def test_a_trace_is_written_into_the_run_folder(tmp_path):
    recorder = trace.Trace(options(tmp_path, steps=4), SimpleNamespace(train={}, training=([], None), microbatches=1), done=0)
    for number in range(1, 5):
        with recorder.record_step(number):
            torch.ones(3).sum()
    names = [e["name"] for e in json.load(gzip.open(tmp_path / trace.FILE))["traceEvents"]]
    assert [name for name in names if name.startswith("step ")] == ["step 3", "step 4"] and "aten::sum" in names
    measured = json.loads((tmp_path / trace.MEASURED).read_text())
    assert measured["steps"] == [3, 4] and measured["ranks"][0]["step_ms"] > 0


@pytest.mark.parametrize("most_bytes", [0, 3000])
def test_a_disk_that_does_not_take_the_trace_is_one_line(tmp_path, capsys, most_bytes):
    recorder = trace.Trace(options(tmp_path, steps=4), SimpleNamespace(train={}, training=([], None), microbatches=1), done=0)
    with no_file_above(most_bytes):
        for number in range(1, 5):
            with recorder.record_step(number):
                torch.ones(3).sum()
    (output,) = [line for line in capsys.readouterr().out.splitlines() if "cannot be written" in line]
    assert output.startswith(f"{tmp_path / trace.FILE} cannot be written (") and output.endswith("): there is no trace of this run")
    assert not list(tmp_path.iterdir())


def test_nothing_is_recorded_unasked(tmp_path):
    cfg = options(tmp_path, steps=3)
    recorder = trace.Trace(replace(cfg, run=replace(cfg.run, profile=False)), SimpleNamespace(train={}, training=([], None)), done=0)
    for number in range(1, 4):
        with recorder.record_step(number):
            pass
    assert not list(tmp_path.iterdir())


def test_a_run_too_short_to_record_is_refused(tmp_path):
    trace.check(options(tmp_path, steps=3), done=0)
    with pytest.raises(UserError, match=r"run.profile: true with train.steps=12 after step 10; the first 2 steps are not"):
        trace.check(options(tmp_path, steps=12), done=10)
