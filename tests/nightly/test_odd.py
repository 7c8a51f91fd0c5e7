"""Odd commands: a few of the hundreds, and the detection of wrong reactions."""

from __future__ import annotations

import random

import pytest

from tests.nightly.odd import command
from tests.nightly.odd.cases import cases
from tests.nightly.odd.files import make
from tests.nightly.odd.trial import find_fault, listing


@pytest.mark.full
def test_odd_commands_train_or_are_refused_in_a_line(capsys):
    assert command.main(["--count", "60", "--seed", "1"]) == 0, capsys.readouterr().out


def test_there_are_as_many_cases_as_asked_for_and_every_file_is_given(tmp_path):
    files = make(tmp_path / "files")
    commands = [" ".join(case) for case in cases(400, files, random.Random(0))]
    assert len(commands) == 400
    assert all(any(path in case for case in commands) for paths in files.values() for path in paths)


@pytest.mark.parametrize(("code", "stderr", "stdout", "changes", "wrong"), [
    (0, "", "", True, ""),
    (2, "error: model: is none\n", "", False, ""),
    (2, "error: model: is none\n", "", True, "is refused but leaves files"),
    (None, "", "", False, "hangs for 60 s"),
    (1, "Traceback (most recent call last):\nKeyError: 1\n", "", False, "ends with 1: KeyError: 1"),
    (2, "warning: odd\nerror: model: is none\n", "", False, "prints more than the error"),
    (2, "a is damaged and passed over: b\nerror: a: all are damaged\n", "", False, ""),
    (2, "usage\n", "", False, "prints 0 error lines"),
    (2, "", "run/checkpoints/step_00000001: damaged, lacks a file\n", False, ""),
    (2, "", "whole\n", False, "prints 0 error lines"),
    (2, "error: : no such file\n", "", False, "the error names no place"),
])
def test_how_a_command_has_to_end(code, stderr, stdout, changes, wrong):
    assert find_fault(code, stderr, stdout, changes) == wrong


def test_what_changes_in_a_folder_is_seen(tmp_path):
    before = listing(tmp_path)
    (tmp_path / "left").touch()
    assert listing(tmp_path) != before
