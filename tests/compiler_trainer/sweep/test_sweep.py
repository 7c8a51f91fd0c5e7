"""A multirun: the rows of all points, failed points, interrupted sweeps, several ranks, other launchers."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser import cut, opened
from commands import call
from pyarrow import csv, parquet

from compiler_trainer.cli import app
from compiler_trainer.config.errors import UserError
from compiler_trainer.sweep import page, row, table
from compiler_trainer.sweep.stored import FILE, read
from compiler_trainer.training.metrics import FILE as METRICS

ROOT = Path(__file__).parents[3]
RECORDS = [
    {"step": 1, "loss": 4.0, "tokens_per_s": 10.0, "step_ms": 900.0, "peak_mem_bytes": 5},
    {"step": 2, "loss": 2.0, "tokens_per_s": 50.0, "step_ms": 100.0, "peak_mem_bytes": 7},
    {"step": 3, "loss": 3.0, "tokens_per_s": 70.0, "step_ms": 200.0, "peak_mem_bytes": 7, "eval_loss": 3.5},
]
TINY = (
    "lower.backend=eager model.dim=8 model.n_layers=1 model.n_heads=2 model.n_kv_heads=2 model.ffn_dim=8 "
    "train.seq_len=8 train.steps=2 train.global_batch_size=2 data=synthetic data.documents=20 optim=sgd "
    "run.dump_graphs=false checkpoint.interval=null"
).split()


class Trainer:
    """A stand-in for the trainer: writes a few metrics, and fails if `optim.lr` is above 1."""

    def __init__(self):
        self.ran: list[str] = []
        self.places: list[tuple[str | None, str | None]] = []

    def train(self, cfg):
        folder = Path(cfg.run.dir)
        self.ran.append(folder.name)
        self.places.append((cfg.checkpoint.dir, cfg.checkpoint.store))
        assert [p.name for p in folder.iterdir()] == [FILE] or cfg.checkpoint.resume == "auto"
        (folder / METRICS).write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
        if cfg.optim.lr > 1:
            raise FloatingPointError(f"lr is <{cfg.optim.lr}>\nand that is too much")
        return cfg.optim.lr


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    trainer = Trainer()
    monkeypatch.setattr(app, "outcome", trainer.train)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)
    return trainer


@pytest.fixture
def sweep(monkeypatch, trainer):
    """Run a multirun into the folder `s`; return its exit code and the trained points."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["compiler-trainer", "-m", "run.dir=s", *arguments])
        trainer.ran = []
        code = 0
        try:
            app.main()
        except SystemExit as exit:
            code = int(exit.code or 0)
        return code, trainer.ran

    return run


# Rows


@pytest.mark.full
def test_a_failed_point_is_a_row_and_the_sweep_goes_on(sweep, capsys):
    assert sweep("optim.lr=0.5,2.0,0.25", "train.seed=3") == (1, ["0", "1", "2"])
    found = parquet.read_table("s/sweep.parquet").to_pylist()
    assert [(r["point"], r["status"], r["optim.lr"], r["objective"]) for r in found] == [
        (0, "done", 0.5, 0.5),
        (1, "failed", 2.0, None),
        (2, "done", 0.25, 0.25),
    ]
    assert [r["error"] for r in found] == [None, "FloatingPointError: lr is <2.0> and that is too much", None]
    assert "point 1: FloatingPointError: lr is <2.0>" in capsys.readouterr().out
    assert csv.read_csv("s/sweep.csv").column_names == list(found[0])


@pytest.mark.full
def test_a_row_has_every_override_result_and_what_it_ran_on(sweep):
    sweep("optim.lr=0.5", "+passes.remat.ops.gelu=save", "mesh={tp:1,cp:1}")
    (found,) = parquet.read_table("s/sweep.parquet").to_pylist()
    overrides = {"optim.lr": 0.5, "passes.remat.ops.gelu": "save", "mesh.tp": 1, "mesh.cp": 1, "run.dir": "s"}
    results = {"steps": 3, "loss": 3.0, "best_loss": 2.0, "eval_loss": 3.5, "best_eval_loss": 3.5}
    speeds = {"tokens_per_s": 60.0, "step_ms": 150.0, "peak_mem_bytes": 7}
    assert {**overrides, **results, **speeds}.items() <= found.items()
    assert found["ranks"] == 1 and found["torch"] and found["cores"] == os.cpu_count() and found["wall_s"] >= 0


def test_communication_is_by_axis_and_a_failed_compilation_has_none():
    found = row.of_report({"seconds": {"capture": 1.5}, "sent_bytes": {"tp": 22, "cp": 4}})
    assert found == {"compile_s": 1.5, "wire_bytes": 26, "wire_bytes.tp": 22, "wire_bytes.cp": 4}
    assert row.of_report({}) == {"compile_s": 0, "wire_bytes": 0}


def test_columns_of_several_types_are_text():
    found = table.rows([point(0, {"a": [1, 2], "b": 1, "c": "x"}), point(1, {"a": 3, "b": 2.5})])
    assert [(r["a"], r["b"], r["c"]) for r in found] == [("[1, 2]", 1, "x"), ("3", 2.5, None)]


def test_the_choice_of_a_loss_and_null_are_in_the_table():
    points = [point(0, row.parsed(["loss=dpo", "train.ema=null"]), loss=2.0), point(1, row.parsed(["train.ema=0.9"]))]
    found = table.rows(points)
    columns = ("option.loss", "loss", "train.ema")
    assert [[r[c] for c in columns] for r in found] == [["dpo", 2.0, "null"], [None, None, "0.9"]]
    assert page.label(points[0], ["train.ema"]) == "0: ema=null"


def point(number, overrides=None, **result):
    return {"point": number, "status": "done", "overrides": overrides or {}, "environment": {}, "result": result}


# The page


@pytest.mark.full
def test_the_page_stands_alone_and_names_what_failed(sweep):
    sweep("optim.lr=0.5,2.0")
    text = Path("s", page.FILE).read_text()
    assert "Plotly.newPlot" in text and "<script src" not in text and "<link" not in text
    assert "lr is &lt;2.0&gt;" in text and "lr is <2.0>" not in text


def test_bars_and_lines_are_called_by_what_was_varied():
    names = ["optim.lr", "passes.remat.policy", "mesh.tp", "lr_schedule.name", "model.name"]
    assert [page.short(name, names) for name in names] == ["lr", "policy", "tp", "lr_schedule.name", "model.name"]
    found = [point(3, {"mesh.tp": 2, "optim.lr": 0.5}, tokens_per_s=1.0, peak_mem_bytes=1, compile_s=1.0)]
    assert page.label(found[0], names) == "3: lr=0.5 tp=2"
    (bars,) = page.bars([*found, point(4, {"mesh.tp": 4}, tokens_per_s=2.0)], "tokens_per_s", 1).data
    assert list(bars.y) in (["3: tp=2 lr=0.5", "4: tp=4"], ["3: lr=0.5 tp=2", "4: tp=4"])


def test_the_lowest_held_out_loss_is_best_and_comes_first():
    found = [point(0, {"optim.lr": 0.1}, loss=1.0, eval_loss=3.0), point(1, {"optim.lr": 0.001}, loss=2.0, eval_loss=2.0),
             {"point": 2, "status": "failed", "overrides": {"optim.lr": 9.0}, "environment": {}, "result": {"eval_loss": 0.5}},
             point(3, {"optim.lr": 0.01}, loss=1.5, eval_loss=2.5)]  # fmt: skip
    assert page.best(found)["point"] == 1 and [p["point"] for p in page.ranked(found)] == [1, 3, 0, 2]
    _, best, *others = page.table(found, Path("none"))
    assert 'class="best"' in best and "1 (best)" in best and not any("(best)" in row for row in others)
    found[0]["environment"] = {"ranks": 1, "commit": None}
    assert "Best: point 1 (lr=0.001), validation loss 2.0000" in page.summary(found) and "1 rank," in page.summary(found)
    without = [point(0, loss=2.0), point(1, loss=1.0)]
    assert page.best(without)["point"] == 1 and page.best([point(0)]) is None


def test_losses_are_drawn_over_what_was_varied():
    lrs, policies = (0.001, 0.01, 0.1), ("none", "full")
    found = [point(3 * j + i, {"optim.lr": lr, "remat.policy": policy}, loss=lr + j)
             for j, policy in enumerate(policies) for i, lr in enumerate(lrs[::-1])]  # fmt: skip
    plot = page.over_options(found, "loss", ["optim.lr", "remat.policy"])
    *lines, star = plot.data
    assert [(line.name, list(line.x), list(line.y)) for line in lines] == [
        ("policy=none", [0.001, 0.01, 0.1], [0.001, 0.01, 0.1]), ("policy=full", [0.001, 0.01, 0.1], [1.001, 1.01, 1.1])]  # fmt: skip
    assert (star.x, star.y, star.marker.symbol) == ((0.001,), (0.001,), "star")
    assert plot.layout.xaxis.type == "log" and plot.layout.xaxis.ticktext == ("0.001", "0.01", "0.1")
    assert page.over_options(found, "loss", ["remat.policy"]).layout.xaxis.type == "category"


def test_lines_on_each_other_are_one_with_both_names():
    points = [{"point": n, "status": "done", "overrides": {"lr": lr, "policy": policy}, "result": {"loss": loss}}
              for n, (lr, policy, loss) in enumerate([(1, "none", 3.0), (2, "none", 2.0), (1, "full", 3.0), (2, "full", 2.0), (1, "half", 3.0), (2, "half", 2.5)])]
    plot = page.over_options(points, "loss", ["lr", "policy"])
    assert [trace.name for trace in plot.data if trace.mode == "lines+markers"] == ["policy=none = policy=full", "policy=half"]


def test_a_point_leads_to_its_page_or_its_folder(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / page.INSPECT).touch()
    rows = page.table([point(0), point(1)], tmp_path)
    assert 'href="0/"' in rows[1] and 'href="1/inspect.html"' in rows[2]


@pytest.mark.parametrize(("width", "scheme"), [(800, "light"), (800, "dark"), (1400, "dark")])
@pytest.mark.sample(2)
def test_nothing_of_the_page_is_cut(browser, tmp_path, width, scheme):
    ran = {"environment": {"ranks": 1, "device": "x86_64", "cores": 2, "torch": "2.13.0", "commit": "f" * 41}}
    results = {"tokens_per_s": 1234.5, "peak_mem_bytes": 3 * 10**8, "compile_s": 61.5, "wire_bytes": 10**9, "step_ms": 1e4}
    found = []
    for number in range(6):
        options = {"optim.lr": 10.0 ** (number % 3 - 4), "passes.remat.policy": ("selective", "full")[number // 3]}
        found.append(point(number, options, loss=3.0 + number, eval_loss=4.0 - number / 9, **results) | ran)
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / METRICS).write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    page.write(found, tmp_path)
    shown = opened(browser, tmp_path / page.FILE, width, scheme)
    assert shown.locator(".js-plotly-plot").count() == 7
    assert cut(shown) == [] and shown.errors == []


def test_the_front_has_what_no_other_point_beats():
    speeds = {(4, 40): 0, (2, 20): 1, (3, 10): 2, (4, 30): 3, (2, 15): 4, (9, 41): 5}
    found = [point(n, peak_mem_bytes=memory, tokens_per_s=speed) for (memory, speed), n in speeds.items()]
    assert [p["point"] for p in page.pareto_front(found)] == [1, 0, 5]


@pytest.mark.full
def test_a_sweep_is_rendered_again(sweep, monkeypatch, capsys):
    sweep("optim.lr=0.5,0.25")
    for name in ("sweep.parquet", "sweep.csv", page.FILE):
        Path("s", name).unlink()
    assert call("sweep", "s") == 0
    assert "optim.lr" in capsys.readouterr().out
    assert parquet.read_table("s/sweep.parquet").num_rows == 2 and Path("s", page.FILE).exists()
    message = "error: nowhere: holds no point of a sweep; name the run.dir of a multirun\n"
    assert (call("sweep", "nowhere"), capsys.readouterr().err) == (2, message)


# Continuing


@pytest.mark.full
def test_a_sweep_started_again_runs_what_is_not_done(sweep):
    sweep("optim.lr=0.5,2.0,0.25")
    before = read(Path("s/0"))
    half = {**read(Path("s/2")), "status": "running"}
    Path("s/2", FILE).write_text(json.dumps(half))
    assert sweep("optim.lr=0.5,2.0,0.25") == (1, ["1", "2"])
    assert read(Path("s/0")) == before
    assert read(Path("s/2"))["status"] == "done"


@pytest.mark.full
def test_each_point_has_checkpoints_of_its_own(sweep, trainer):
    sweep("optim.lr=0.5,0.25", "checkpoint.dir=kept", "checkpoint.store=memory://kept")
    assert trainer.places == [("kept/0", "memory://kept/0"), ("kept/1", "memory://kept/1")]


@pytest.mark.full
def test_an_interrupted_point_resumes_from_its_checkpoints(sweep):
    sweep("optim.lr=0.5")
    Path("s/0", FILE).write_text(json.dumps({**read(Path("s/0")), "status": "running"}))
    (saved := Path("s/0/checkpoints/step_2")).mkdir(parents=True)
    assert sweep("optim.lr=0.5", "checkpoint.resume=auto") == (0, ["0"]) and saved.exists()
    assert sweep("optim.lr=0.5") == (0, [])


@pytest.mark.full
def test_other_options_in_the_same_folder_are_refused_before_anything_runs(sweep, capsys):
    sweep("optim.lr=0.5,0.25")
    assert sweep("optim.lr=0.5,0.75") == (2, [])
    message = "run.dir: s/1 holds a point with optim.lr=0.25, not 0.75"
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_what_is_no_point_is_not_removed(sweep, tmp_path, capsys):
    (tmp_path / "s/0").mkdir(parents=True)
    (tmp_path / "s/0/thesis.txt").touch()
    assert sweep("optim.lr=0.5") == (2, [])
    assert "s/0 exists already" in capsys.readouterr().err and (tmp_path / "s/0/thesis.txt").exists()


@pytest.mark.parametrize(("changes", "says"), [
    ({"status": "<script>alert(1)</script>"}, "status: '<script>alert"),
    ({"point": "javascript:alert(1)"}, "point: 'javascript:alert"),
    ({"error": ["x"]}, "error: "),
    ({"result": {"loss": "<b>"}}, "result.loss: '<b>' is not a number"),
    ({"result": {"loss": 10**400}}, "is more than"),
    ({"environment": None}, "environment: "),
])  # fmt: skip
def test_a_crafted_point_is_refused_by_field(tmp_path, changes, says):
    whole = {"point": 0, "status": "done", "started": "", "overrides": {}, "config": {}, "environment": {}}
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / FILE).write_text(json.dumps(whole | changes))
    with pytest.raises(UserError, match="^[^\n]*$") as caught:
        table.points(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/0/{FILE}: ") and says in str(caught.value)


def test_a_folder_without_points_has_no_table(tmp_path):
    with pytest.raises(UserError, match="no point of a sweep"):
        table.points(tmp_path)


# Real processes

STAND_IN = """
import os, sys, time
import torch
import torch.distributed as dist
from compiler_trainer.cli import app
from compiler_trainer.step import ranks

def stand_in(cfg):
    ranks.start_ranks()
    if cfg.train.seed == 1 and os.environ.get("HANGS"):
        time.sleep(600)
    if cfg.train.seed == 1 and ranks.rank() == 1:
        raise MemoryError("rank 1 is full")
    total = torch.ones(1)
    if dist.is_initialized():
        dist.all_reduce(total)
    ranks.stop_ranks()
    return float(total)

app.outcome = stand_in
app.main()
"""


@pytest.fixture
def stand_in(tmp_path):
    """Start a sweep of three points with that trainer, on some ranks."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    def start(ranks=1, **variables):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *launch, "stand_in.py", "-m", "train.seed=0,1,2", "run.dir=s"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        return subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return start


def statuses(folder):
    return [(p["status"], p.get("objective")) for p in table.points(folder)]


@pytest.mark.full
def test_killed_and_started_again(stand_in, tmp_path):
    first = stand_in(HANGS="1")
    until = time.monotonic() + 60
    while not (tmp_path / "s/1" / FILE).exists() and time.monotonic() < until:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert statuses(tmp_path / "s") == [("done", 1.0), ("running", None)]
    assert parquet.read_table(tmp_path / "s/sweep.parquet")["status"].to_pylist() == ["done"]
    began = (tmp_path / "s/0" / FILE).stat().st_mtime_ns
    second = stand_in()
    output, _ = second.communicate(timeout=100)
    assert second.returncode == 0, output
    assert statuses(tmp_path / "s") == [("done", 1.0)] * 3
    assert (tmp_path / "s/0" / FILE).stat().st_mtime_ns == began


@pytest.mark.full
def test_one_rank_fails_and_both_go_on(stand_in, tmp_path):
    sweep = stand_in(ranks=2)
    output, _ = sweep.communicate(timeout=100)
    assert sweep.returncode == 1
    assert statuses(tmp_path / "s") == [("done", 2.0), ("failed", None), ("done", 2.0)], output
    assert [p.get("error") for p in table.points(tmp_path / "s")] == [None, "MemoryError: rank 1 is full", None]
    assert output.count("point 2: done") == 1


@pytest.mark.full
def test_optuna_minimizes_the_loss_past_failures_and_resumes(sweep):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=5", "hydra.sweeper.sampler.seed=1"]
    search += ["hydra.sweeper.direction=minimize", "optim.lr=interval(0.1,2)"]
    code, ran = sweep(*search)
    assert (code, ran) == (1, [str(n) for n in range(5)])
    found = table.points(Path("s"))
    done = [p["objective"] for p in found if p["status"] == "done"]
    assert 0 < len(done) < 5
    best = Path("s/optimization_results.yaml").read_text()
    assert math.isclose(float(best.rpartition("best_value:")[2]), min(done))
    failed = [str(p["point"]) for p in found if p["status"] == "failed"]
    assert sweep(*search) == (1, failed)


@pytest.mark.full
def test_joblib_runs_points_side_by_side(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    command = [sys.executable, "-m", "compiler_trainer", "-m", *TINY, "run.dir=s", "train.seed=1,2"]
    command += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = parquet.read_table(tmp_path / "s/sweep.parquet").to_pylist()
    assert [(r["status"], r["train.seed"], r["steps"]) for r in found] == [("done", 1, 2), ("done", 2, 2)]
    assert all(math.isclose(r["loss"], math.log(257), rel_tol=0.1) and r["compile_s"] > 0 for r in found)
