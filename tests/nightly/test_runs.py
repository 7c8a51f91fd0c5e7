"""Damaged run folders: a few of the hundreds, and the detection of a wrong reaction."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from compiler_trainer.cli.table import VERBS as KNOWN
from compiler_trainer.config import schema
from tests.nightly.odd.damage import Damage, change_one_field, damages, removals, replace_content
from tests.nightly.odd.runs import CONFIG, INDEX, METRICS, NEWEST, VERBS, Trial, find_fault_in_trial
from tests.nightly.odd.trial import Outcome

ROOT = __file__.rpartition("/tests/")[0]
RESUMES = VERBS[0]
INSPECTS = next(verb for verb in VERBS if verb.arguments[0] == "inspect")
GONE, TEXT = Damage("missing", replace_content("")), Damage("a number", replace_content("5"))


@pytest.mark.full
def test_damaged_runs_are_passed_over_or_refused_in_a_line():
    command = [sys.executable, "-m", "tests.nightly.odd", "--runs", "--count", "17"]  # one damage per file; a process that forks
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("17 commands: ")


@pytest.mark.full
def test_many_damaged_runs():
    command = [sys.executable, "-m", "tests.nightly.odd", "--runs", "--count", "150", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("file", "damage", "verb", "outcome", "wrong"), [
    (CONFIG, TEXT, RESUMES, (2, ""), ""),
    (CONFIG, TEXT, RESUMES, (0, ""), "accepts the damage"),
    (CONFIG, TEXT._replace(is_total=False), RESUMES, (0, ""), ""),
    (METRICS, GONE, INSPECTS, (0, ""), ""),
    (METRICS, TEXT, INSPECTS, (0, ""), "accepts the damage"),
    (INDEX, TEXT, RESUMES, (0, f"{NEWEST} is damaged and passed over: {INDEX}: cannot be read\n"), ""),
    (INDEX, TEXT, RESUMES, (0, ""), "continues silently"),
    (INDEX, TEXT, INSPECTS, (0, ""), ""),
])
def test_what_becomes_of_a_damage(file, damage, verb, outcome, wrong):
    assert find_fault_in_trial(Trial(file, damage, verb), Outcome(*outcome, "")) == wrong


def test_every_value_is_put_somewhere_and_everything_goes(tmp_path):
    texts = {text for _, text in change_one_field({"a": [1, {"b": 2}]}, random.Random(0), 600)}
    assert {'{"a": [1, {"b": null}]}', '{"a": [1, {}]}', "{}"} <= texts
    assert max(map(len, texts)) > 100_000
    for number, damage in enumerate(removals()):
        path = tmp_path / str(number)
        path.write_text("a")
        damage.act(path)
        assert not path.is_file() or path.is_symlink(), damage.name


def test_a_config_is_damaged_in_ways_that_differ(tmp_path):
    path = tmp_path / "config.yaml"
    schema.save(schema.Config(), path)
    intact, contents = path.read_bytes(), set()
    for damage in [*damages(path, random.Random(0))]:
        path.write_bytes(intact)
        if not damage.name.startswith(("missing", "a folder", "a FIFO", "a loop", "a link")):
            damage.act(path)
            contents.add(path.read_bytes())
    assert len(contents) > 100 and intact not in contents


def test_verbs_are_of_the_command():
    assert {verb.arguments[0] for verb in VERBS} >= set(KNOWN) - {"plan", "calibrate", "sweep", "launch", "check-model", "check-export", "check-data", "tokenize", "doctor", "compile", "clean", "profile", "resize", "chat", "new"}  # these take no run, or a run with measurements
