"""The tool that judges models of other libraries tells right, wrong, refused, crash and time-out apart."""

from __future__ import annotations

import json

import pytest
from small_zoo import MODELS

from tests.nightly.models import command, judge
from tests.nightly.models.page import page
from tests.nightly.models.table import MODELS as TABLE

BY_NAME = {entry.name: entry for entry in MODELS}
BOTH = "dp_shard 2 x tp 2"


@pytest.mark.parametrize(("name", "verdict", "why"), [
    ("right", "right", ""), ("tied", "right", ""), ("right_rounded", "right", ""), ("wrong", "wrong", "step 2: loss differs by"),
    ("refused", "refused", "model: small_zoo.py:29 branches on a value"), ("unbuilt", "unbuilt", "ModuleNotFoundError"),
    ("drawn", "unbuilt", "ValueError: the model draws random numbers"),
])  # fmt: skip
@pytest.mark.sample(3)
def test_verdicts(name, verdict, why):
    (record,) = judge.judge(BY_NAME[name], [BOTH])
    assert record["verdict"] == verdict and record["why"].startswith(why)
    if verdict == "right":
        assert record["gathered"] == [] and 0.25 <= record["share"] < 0.5 and record["tolerance"] == judge.EXACT


def test_an_error_that_names_nothing_is_a_crash(monkeypatch):
    def fails(*_, **__):
        raise KeyError("lost")

    monkeypatch.setattr(judge.ct, "compile_step", fails)
    (record,) = judge.judge(BY_NAME["right"], [BOTH])
    assert record["verdict"] == "crash" and record["why"] == "KeyError: 'lost'" and "Traceback" in record["trace"]


def test_one_rank_that_is_a_little_off_is_wrong(monkeypatch):
    trained = judge.train
    monkeypatch.setattr(judge, "train", lambda *args: [r | {"layer.bias": r["layer.bias"] + 1e-6} for r in trained(*args)])
    (record,) = judge.judge(BY_NAME["right"], [BOTH])
    assert record["verdict"] == "wrong" and record["why"] == "step 1: layer.bias differs by 1.0e-06"


@pytest.mark.full
def test_each_is_a_process_and_known_ones_are_not_judged_again(tmp_path, capsys):
    results, wanted = tmp_path / "models.jsonl", tmp_path / "models.md"
    known = {"model": "refused", "mesh": "tp 2", "verdict": "refused", "why": "model: a|b"}
    results.write_text(json.dumps(known) + "\n")
    arguments = ["--table", "small_zoo", "--only", "[rc]*d", "--mesh", "tp 2", "--results", str(results), "--write", str(wanted)]
    assert command.main(arguments) == 0
    assert capsys.readouterr().out == "right_rounded on tp 2: right\n"
    before = results.read_text()
    assert command.main(arguments) == 0 and results.read_text() == before
    text = wanted.read_text()
    assert "| tp 2 | 1 | 1 | 0 | 0 | 0 | 0 |" in text and "| right_rounded | torch | 67% |  |" in text
    assert "| refused | model: a\\|b | refused |" in text


def test_a_process_that_ends_by_itself_is_a_crash(tmp_path, capsys):
    arguments = ["--table", "small_zoo", "--only", "crash", "--mesh", "tp 2", "--results", str(tmp_path / "models.jsonl")]
    assert command.main(arguments) == 0
    assert capsys.readouterr().out == "crash on tp 2: crash the process ended with code 7\n"


def test_one_that_takes_too_long_is_ended(tmp_path, capsys):
    arguments = ["--table", "small_zoo", "--only", "time-out", "--limit", "1", "--results", str(tmp_path / "models.jsonl")]
    assert command.main([*arguments, "--mesh", "dp_shard 2"]) == 0
    assert capsys.readouterr().out == "time-out on dp_shard 2: time-out after 1 s\n"


def test_a_pattern_that_names_no_model_is_bad_input(capsys):
    assert command.main(["--table", "small_zoo", "--only", "nothing"]) == 2
    assert "no model name matches 'nothing'" in capsys.readouterr().err


def test_what_is_wrong_is_told_by_the_exit_code_and_on_the_page(tmp_path):
    results = tmp_path / "models.jsonl"
    record = {"model": "wrong", "mesh": "tp 2", "verdict": "wrong", "why": "step 2: loss differs by 1.0e-04", "gathered": ["sort"]}
    results.write_text(json.dumps(record) + "\n")
    arguments = ["--table", "small_zoo", "--only", "wrong", "--mesh", "tp 2", "--results", str(results)]
    assert command.main(arguments) == 1
    text = page(MODELS, command.read(results))
    assert "| wrong | torch | wrong | sort |" in text and "| wrong | step 2: loss differs by 1.0e-04 | wrong |" in text


def test_the_table_is_large_and_varied_and_names_are_its_own():
    assert len({entry.name for entry in TABLE}) == len(TABLE) >= 60 and len({entry.library for entry in TABLE}) >= 5
