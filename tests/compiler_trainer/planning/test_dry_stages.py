"""Dry runs with pipeline stages: simulated turns, memory and bytes by rank, schedules as files, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import (
    AccumulateConfig,
    CastConfig,
    ClusterConfig,
    CommunicationConfig,
    Config,
    LowerConfig,
    MeshConfig,
    ModelConfig,
    PassesConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from compiler_trainer.models import INPUTS
from compiler_trainer.models.subject import subject
from compiler_trainer.planning.dry import compile_dry, dry_run, idle, predict_step
from compiler_trainer.planning.simulate import kept_for_later, play
from compiler_trainer.step.compile import compile_step
from compiler_trainer.step.turns import turns_of_step
from compiler_trainer.training.speed import sent_bytes
from passes.ir.task import Task
from passes.pipeline import schedules

ROWS, LENGTH, DIM, PP, MICROBATCHES = 8, 32, 32, 2, 4
MODEL = ModelConfig(dim=DIM, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=64)
PLAIN = PassesConfig(CastConfig(None), verify="none")


def job(folder: Path | str, schedule: str = "1f1b", **changes) -> Config:
    cfg = Config(
        model=MODEL,
        train=TrainConfig(seq_len=LENGTH, global_batch_size=ROWS, microbatches=MICROBATCHES),
        mesh=MeshConfig(pp=PP, dp_shard=1, tp=2),
        passes=replace(PLAIN, pipeline=PipelineConfig(schedule)),
        cluster=ClusterConfig(),
        run=RunConfig(dir=str(folder), dry=True, dump_graphs=False),
    )
    return replace(cfg, **changes)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[Path, dict]:
    """Return the folder and the report of a dry run on two pipeline ranks."""
    folder = tmp_path_factory.mktemp("dry") / "run"
    dry_run(job(folder))
    return folder, json.loads((folder / "report.json").read_text())


# ---- simulated turns ----------------------------------------------------------------------------------------


def programs_like(schedule: schedules.Schedule) -> dict:
    """Return programs with the carried values of stages: activations, their gradients, and values kept by a stage."""
    last, split = schedule.stages - 1, schedule.is_split

    def program(reads: list[str], makes: list[str]) -> SimpleNamespace:
        both = ([SimpleNamespace(name=name, kind="carried") for name in names if name] for names in (reads, makes))
        return SimpleNamespace(**dict(zip(("inputs", "outputs"), both, strict=True)))

    programs = {}
    for s in range(schedule.stages):
        x, y, kept, dy, dx = s and f"x{s - 1}", s < last and f"x{s}", f"kept{s}", s < last and f"d{s}", s and f"d{s - 1}"
        programs[f"F{s}"] = program([x], [y, kept])
        programs[f"{'I' if split else 'B'}{s}"] = program([dy, kept], [dx, f"late{s}" if split else ""])
        if split:
            programs[f"W{s}"] = program([f"late{s}", kept], [])
    return programs


SCHEDULES = [schedules.gpipe(3, 5), schedules.one_f_one_b(4, 8), schedules.interleaved(2, 4, 2), schedules.zero_bubble(4, 6), schedules.zbv(3, 6)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("send", [0.0, 0.25])
def test_turns_end_when_their_table_does(schedule, send):
    programs, cost = programs_like(schedule), lambda task: schedules.unit(task) + task.stage / 8
    seconds = {name: cost(Task(int(name[1:]), name[0])) for name in programs}
    turns = turns_of_step(programs, schedule, schedule.microbatches)
    known = schedules.play(schedule, cost, send)
    timing = play(turns, programs, seconds, lambda message: send)
    assert timing.length == pytest.approx(known.length) and idle(timing) == pytest.approx(known.idle)
    assert timing.busy == pytest.approx(known.busy)


def test_messages_of_a_pair_follow_each_other():
    programs = programs_like(schedule := schedules.gpipe(2, 3))
    timing = play(turns_of_step(programs, schedule, 3), programs, dict.fromkeys(programs, 1.0), lambda message: 5.0)
    starts = [start for turn, (start, *_) in timing.spans.items() if turn.program == "F1"]
    assert starts == [6.0, 11.0, 16.0]  # made at 1, 2 and 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_keeps_what_its_forwards_left(schedule):
    programs = programs_like(schedule)
    size = {o.name: 1 if o.name.startswith("kept") else 0 for p in programs.values() for o in p.outputs}
    turns = turns_of_step(programs, schedule, schedule.microbatches)
    most = [max(beside for turn, beside in kept_for_later(turns, programs, rank, size)) for rank in range(schedule.ranks)]
    assert most == [count - 1 for count in schedules.most_alive(schedule)]  # one is read, or just made


# ---- the report ---------------------------------------------------------------------------------------------


def test_the_step_is_the_table_and_the_updates(found):
    _, report = found
    made_of, pipeline = report["prediction"], report["prediction"]["pipeline"]
    assert pipeline["schedule"] == "1f1b" and pipeline["ranks_of_stages"] == [0, 1] and pipeline["forwards_kept"] == [2, 1]
    assert pipeline["layers"] == [["layers.0", "layers.1"], ["layers.2", "layers.3"]]
    ends = [row[-1][2] for row in report["pipeline"]["slots"]]
    assert max(ends) == pytest.approx(report["predicted"]["step_ms"], abs=1e-3)
    assert [row[-1][0] for row in report["pipeline"]["slots"]] == ["U0", "U1"]
    spent = made_of["compute_ms"] + made_of["launch_ms"] + sum(made_of["exposed_ms"].values())
    assert spent == pytest.approx(report["predicted"]["step_ms"], rel=1e-3)
    for rank, row in enumerate(report["pipeline"]["slots"]):
        lasts = sum(pipeline["task_ms"][name[0] + name.rpartition(".")[2].lstrip("UGR")] for name, *_ in row)
        assert lasts == pytest.approx(pipeline["busy_ms"][rank]) == pytest.approx(sum(e - s for _, s, e in row), abs=1e-2)
    tokens = report["predicted"]["tokens_per_s_per_gpu"] * report["predicted"]["step_ms"] / 1e3
    assert tokens == pytest.approx(ROWS * LENGTH / 4)


def test_the_residual_stream_alone_is_sent(found):
    size = ROWS // MICROBATCHES * LENGTH * DIM * 4 // 2  # in fp32, the sequence over tp
    sent = found[1]["prediction"]["pipeline"]["sent_a_microbatch"]
    assert [(s["source"], s["to"], s["bytes"], len(s["values"])) for s in sent] == [(0, 1, size, 1), (1, 0, size, 1)]
    square = 4  # the squared norm
    assert found[1]["prediction"]["sent_bytes"]["pp"]["intra"] - MICROBATCHES * size in (0, square)


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "changes", "axis"), [
    (MeshConfig(pp=2, dp_shard=2), {}, "pp"),
    (MeshConfig(dp_shard=2), {"accumulate": AccumulateConfig(gather="step")}, "dp_shard"),
    (MeshConfig(tp=2, dp_shard=1), {"communication": CommunicationConfig(batch_overlap=2)}, "tp"),
])  # fmt: skip
def test_a_compiled_step_sends_the_predicted_bytes(tmp_path, mesh, changes, axis):
    cfg = job(tmp_path, mesh=mesh, passes=replace(PLAIN, **changes))
    batch = {key: torch.zeros(ROWS, LENGTH, dtype=torch.int64) for key in INPUTS}
    trained = subject(cfg)
    how = {"passes": cfg.passes, "optim": cfg.optim, "microbatches": MICROBATCHES, "lower": LowerConfig("eager")}
    step = compile_step(
        trained.module, trained.loss, batch, mesh=mesh, ranks="lockstep", initial=trained.initial(), evaluate=False, **how
    )
    predicted = predict_step(cfg, compile_dry(cfg, None))["sent_bytes"]
    nonzero = {axis: count for axis, count in predicted.items() if count}  # of the busiest pipeline rank
    assert axis in nonzero and sent_bytes(step) == pytest.approx(nonzero, rel=0.01)


def test_the_ranks_together_hold_what_one_stage_does(found, tmp_path):
    def state(kinds: dict) -> int:
        return sum(kinds.get(kind, 0) for kind in ("parameters", "gradients", "state of other programs"))

    memory = found[1]["prediction"]["pipeline"]["memory"]
    whole = predict_step(cfg := job(tmp_path, mesh=MeshConfig(dp_shard=1, tp=2)), compile_dry(cfg, None))
    parts, one = sum(state(each["kinds"]) for each in memory), state(whole["prediction"]["memory"]["kinds"])
    assert parts == pytest.approx(one, rel=0.2)  # gradients in flight count as communication
    assert memory[0]["kinds"]["kept for other programs"] > 0 and "kept for other programs" not in memory[1]["kinds"]
    largest = max(each["device_bytes"] for each in memory)
    assert found[1]["prediction"]["memory"]["device_bytes"] == largest


# ---- schedules as files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_table_is_read_as_it_was_written(schedule):
    assert schedules.from_text(schedules.as_text(schedule)) == schedule


def test_a_table_is_written_edited_and_given_back(found, tmp_path):
    folder, report = found
    written = (folder / "pipeline.txt").read_text()
    assert written.splitlines()[1:] == ["F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 B3.0", "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1"]
    edited = tmp_path / "mine.txt"
    edited.write_text(written.replace("F0.0 F1.0 B0.0 F2.0", "F0.0 B0.0 F1.0 F2.0"))
    again = dry_run(job(tmp_path / "run", str(edited)))
    assert [name for name, *_ in again["pipeline"]["slots"][0]][:4] == ["F0.0", "B0.0", "F1.0", "F2.0"]
    assert again["predicted"]["step_ms"] > report["predicted"]["step_ms"]  # the second rank waits for F1
    assert (tmp_path / "run" / "pipeline.txt").read_text() == edited.read_text()


GOOD = ["F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 B3.0", "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1"]
BAD = {
    "no slot": (GOOD[0].replace("F3.0", "F3"), GOOD[1], "rank 0 runs 'F3'; write F0.2 for"),
    "missing": (GOOD[0], GOOD[1].replace("B2.1 ", ""), "rank 1 never runs B2.1"),
    "twice": (f"{GOOD[0]} B3.0", GOOD[1], "rank 0 runs B3.0 2 times"),
    "another's": (f"{GOOD[0]} F1.1", GOOD[1], "rank 1 runs B0.1, which is not its own|rank 0 never runs"),
    "deadlock": ("B0.0 F0.0 F1.0 F2.0 B1.0 F3.0 B2.0 B3.0", GOOD[1], "rank 0 at B0.0 waits for F0.0 of rank 0"),
    "a stage": (GOOD[0], GOOD[1].replace(".1", ".2"), "no rank runs stage 1"),
    "ranks": ("F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 F3.0 B3.0", "", "is a schedule for mesh.pp=1, not 2"),
    "microbatches": ("F0.0 B0.0", "F0.1 B0.1", "is a schedule for train.microbatches=1, not 4; set train.microbatches=1"),
    "mixed": (GOOD[0], GOOD[1].replace("B3.1", "I3.1 W3.1"), "has both B2.1 and W3.1; write B, or I and W, for all backwards"),
    "empty": ("", "", "is empty; write a line of tasks for each rank"),
}


@pytest.mark.parametrize("why", BAD)
def test_schedules_that_never_end_are_refused(tmp_path, why):
    first, second, message = BAD[why]
    (file := tmp_path / "schedule.txt").write_text(f"# mine\n{first}\n{second}\n")
    with pytest.raises(UserError, match=f"{file}: .*({message})"):
        dry_run(job(tmp_path / "run", str(file)))
    assert not (tmp_path / "run").exists()


def test_a_schedule_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(UserError, match="passes.pipeline.schedule: no file, and '1f1c' is not one of gpipe, 1f1b.*; did you mean '1f1b'"):
        dry_run(job(tmp_path, "1f1c"))


# ---- searched schedules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [None, 0, 2, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 4), (8, 16)])
def test_auto_is_no_slower_than_zero_bubble_in_its_memory(slow, ranks, microbatches):
    def cost(task: Task) -> float:
        return schedules.unit(task) * (1.7 if task.stage == slow else 1.0) * {"I": 1.2, "W": 0.8}.get(task.kind, 1.0)

    found, known = schedules.auto(ranks, microbatches, cost), schedules.zero_bubble(ranks, microbatches)
    assert schedules.play(found, cost).length <= schedules.play(known, cost).length
    assert max(schedules.most_alive(found)) <= ranks


def test_auto_knows_what_tasks_take(tmp_path):
    pipeline, train = PipelineConfig("auto", stages=(1, 2, 1, 1)), TrainConfig(seq_len=LENGTH, global_batch_size=8, microbatches=8)
    changes = {"model": replace(MODEL, n_layers=5), "passes": replace(PLAIN, pipeline=pipeline), "train": train}
    step = compile_dry(job(tmp_path, mesh=MeshConfig(pp=4, dp_shard=1), **changes), None)

    def flops(task: Task) -> int:
        return sum(step.costs(str(task))["flops"].values()) if str(task) in step.programs else 0

    assert "I0" not in step.programs  # nobody waits for gradients of the first stage
    found, known = (schedules.play(t, flops).length for t in (step.schedule, schedules.auto(4, 8)))
    assert step.schedule.is_split and found < known
