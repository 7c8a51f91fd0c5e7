"""The tool that runs whole jobs with random options: its draws, its verdicts, and a few jobs."""

from __future__ import annotations

import json
import random

import pytest

from tests.nightly import jobs


def test_options_of_every_kind_are_drawn_and_ranks_are_those_of_the_mesh(tmp_path):
    cases = [jobs.draw_job(random.Random(seed), tmp_path) for seed in range(300)]
    drawn = {option for options, _ in cases for option in options}
    assert drawn >= {"model=hf", "model=moe_debug", "loss=dpo", "mesh.ep=2", "mesh.pp=2", "data.packing=fit", "train.ema=0.9"}
    assert {f"model.path={tmp_path / name}" for name in jobs.FOLDERS} <= drawn
    for options, ranks in cases:
        sizes = dict(option.removeprefix("mesh.").split("=") for option in options if option.startswith("mesh."))
        product = 1
        for axis, size in sizes.items():
            product *= 1 if axis == "ep" else int(size)
        assert product == ranks, options


def test_losses_that_differ_are_wrong(tmp_path):
    for name, values in {"a": (2.0, 1.0), "b": (2.0, 1.001), "c": (2.0, 1.1), "d": (2.0,)}.items():
        (tmp_path / name).mkdir()
        rows = (json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(values, 1))
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(rows))
    verdicts = [jobs.compare_losses(tmp_path / "a", tmp_path / other) for other in "bcd"]
    assert verdicts == ["right", "wrong: losses differ by 9.1e-02", "wrong: 2 and 1 steps"]


@pytest.mark.parametrize(("option", "verdict"), [("optim.lr=x", "refused: error: optim.lr"), ("data=nothing", "refused: error: data")])
def test_a_refusal_is_told_from_a_crash(option, verdict):
    assert jobs.run_command(option).startswith(verdict)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_eight_jobs_end_well_or_are_refused(capfd):
    assert jobs.main(["--cases", "8", "--seed", "1"]) == 0
    assert "train on one rank: right" in capfd.readouterr().out
