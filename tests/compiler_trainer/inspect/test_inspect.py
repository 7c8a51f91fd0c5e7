"""Questions about a run folder get tables with the passes' counts; bad questions are refused in one line."""

from __future__ import annotations

import shutil

import pytest
from commands import call
from net_runs import EVENTS, write_run

from compiler_trainer.inspect import glance, tables
from compiler_trainer.inspect.dumps import Run, load
from compiler_trainer.inspect.overview import totals


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return load(write_run(tmp_path_factory.mktemp("run"), remat={"policy": "full"}))


def test_dumps_are_the_same_byte_for_byte(run, tmp_path):
    again = write_run(tmp_path, remat={"policy": "full"})
    files = sorted(p.name for p in (run.folder / "graphs").iterdir())
    assert files == sorted(p.name for p in (again / "graphs").iterdir()) and len(files) == 4 * len(run.dumped)
    for name in files:
        assert (run.folder / "graphs" / name).read_bytes() == (again / "graphs" / name).read_bytes(), name


def test_costs_add_up_to_the_report(run):
    for stage in run.stages:
        costs = stage.report["accounting"]
        assert sum(sent for *_, sent in stage.costs["collectives"]) == sum(t["sent_bytes"] for t in costs["traffic"])
        assert sum(count for _, count in stage.costs["flops"]) == sum(costs["flops"].values())
        line, most = glance.peak_line(stage)
        assert most == costs["peak_bytes"] == sum(s.bytes for s in glance.alive(stage, line))


def test_bodies_and_how_often_they_are_called(run, capsys):
    """All computing operators are in compiled regions, as often as these are called; views may be outside."""
    views = {"view", "t", "movedim.int", "reshape", "narrow", "getitem", "split_with_sizes", "expand", "unsqueeze"}
    for stage in run.trained:
        bodies = run.bodies[stage.program]
        computing = sum(not node.is_input and node.op not in views for node in stage.by_name.values())
        assert sum(body.called * body.nodes for body in bodies) >= computing
        assert len({body.name for body in bodies}) == len(bodies) and all(body.first for body in bodies)
    call("inspect", run.folder)
    shown = capsys.readouterr().out
    assert "bodies of step" in shown and all(body.name in shown for body in run.bodies["step"])


def test_the_largest_reshard(run):
    first, *others = glance.reshards(run)
    assert first["sent_bytes"] >= max(r["sent_bytes"] for r in others)
    stage = run.stages[first["stage"]]
    by_name = {name: sent for name, _, _, sent in stage.costs["collectives"]}
    for r in (first, *others):
        assert r["sent_bytes"] == sum(by_name[name] for name in r["collectives"])
    notes = stage.report["report"]["notes"]
    assert any(f"%{first['node']} " in n and f"{first['sent_bytes']:,} bytes sent" in n for n in notes)


def test_recomputed_nodes_are_marked_and_counted(run):
    stage = run.trained[-1]
    again = [node for node in stage.nodes if node.recomputed]
    flops = dict(map(tuple, stage.costs["flops"]))
    assert again and all(node.phase == "backward" for node in again)
    assert sum(flops.get(n.name, 0) for n in again) == stage.report["accounting"]["recomputed_flops"] > 0
    assert totals(stage).recomputed_flops > 0


def test_what_lies_between_a_collective_and_its_wait(run):
    stage = run.trained[-1]
    for sent in glance.collectives(run, stage):
        wait = glance.first_wait(stage, stage.by_name[sent.node])
        assert stage.by_name[wait].op == "wait_tensor" and sent.line < stage.by_name[wait].line
        between = [n for n in stage.nodes if sent.line < n.line < stage.by_name[wait].line and glance.hides(n)]
        assert sent.between == len(between) and sent.exposed_ms is None


def test_gaps_go_to_what_ends_them():
    assert dict(glance.waits(EVENTS)) == {"0": 1.0, "1": 3.0}
    late = [*EVENTS[:2], {"node": "3", "stream": "tp", "start_ms": 2.5, "end_ms": 9.0}]
    assert dict(glance.waits(late)) == {"0": 1.0, "3": 6.0}


def shown(run: Run, capsys, *arguments: str) -> str:
    assert call("inspect", run.folder, *arguments) == 0
    return capsys.readouterr().out


def test_the_table_of_passes(run, capsys):
    out = shown(run, capsys)
    assert [stage.number for stage in run.dumped] == list(range(len(run.dumped))) and "segment" in out
    for stage in run.dumped:
        (row,) = [line.split() for line in out.splitlines() if line.startswith(stage.title)]
        assert f"{stage.report['nodes_after']:,}" in row
    assert f"largest reshard  %{glance.reshards(run)[0]['node']} " in out
    assert f"at %{run.trained[-1].report['accounting']['peak_node']} " in out
    assert f"most exposed  %{glance.collectives(run, run.trained[-1])[0].node} " in out


def test_of_a_run_of_an_earlier_version_passes_and_reports_are_shown(run, tmp_path, capsys):
    folder = shutil.copytree(run.folder, tmp_path / "earlier")
    for path in (folder / "graphs").glob("*.graph.json"):
        path.unlink()
    earlier = load(folder)
    out = shown(earlier, capsys)
    assert all(stage.title in out for stage in run.dumped) and "graph.json is missing: an earlier version wrote the run" in out
    assert "reshards" in shown(earlier, capsys, "--pass", "shard")
    for arguments in (["--node", "mm*"], ["--parameter", "*"], ["--html"]):
        assert call("inspect", folder, *arguments) == 2
        err = capsys.readouterr().err
        assert "graph.json: is missing: an earlier version wrote the run" in err and err.count("\n") == 1


def test_one_pass(run, capsys):
    out = shown(run, capsys, "--pass", "shard")
    assert "reshards" in out and all(f"%{r['node']}" in out for r in glance.reshards(run))
    calls = shown(run, capsys, "--pass", "step_segment")
    assert f"bodies {len(run.bodies['step'])}" in calls and all(f"{body.name}: {body.called} calls" in calls for body in run.bodies["step"])


def test_nodes_by_name_module_and_line(run, capsys):
    stage = run.trained[-1]
    node = next(n for n in stage.nodes if n.op == "mm" and n.module)
    out = shown(run, capsys, "--node", node.name, "--module", node.module, "--line", node.source)
    assert node.text in out
    wild = shown(run, capsys, "--pass", "joint", "--node", "mm*")
    joint = run.program("step")[0]
    assert f"{sum(n.name.startswith('mm') for n in joint.nodes)} of {len(joint.nodes):,} nodes" in wild


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pass", "shrad"], "error: --pass: no pass is called 'shrad', did you mean 'shard'?"),
        (["--node", "nothing"], "error: --node 'nothing': matches no node"),
        (["--html", "/no/such/folder/page.html"], "error: /no/such/folder/page.html: cannot be written"),
    ],
)
def test_refusals_are_one_line(run, capsys, arguments, message):
    assert call("inspect", run.folder, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(message) and err.count("\n") == 1


def test_sizes():
    assert [tables.size(n) for n in (0, 1023, 1536, 10 * 2**20, 3 * 2**30)] == ["0 B", "1,023 B", "1.5 KiB", "10 MiB", "3 GiB"]
    assert [tables.flops(n) for n in (0, 999, 1.5e9)] == ["", "999", "1.5 G"]
