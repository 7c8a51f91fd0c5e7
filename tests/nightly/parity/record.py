"""Results of cases, one JSON object a line."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from compiler_trainer.parity.compare import Outcome
from tests.nightly.parity.case import Case

TASKS = 25  # cases of a process, whose operators and traces no one frees


class Record(NamedTuple):
    """A case and what became of it."""

    case: Case
    outcome: Outcome

    def dumped(self) -> str:
        """As a line of a file."""
        return json.dumps({"case": str(self.case), **dataclasses.asdict(self.outcome)})

    @staticmethod
    def loaded(line: str) -> Record:
        """The record of a line."""
        fields = json.loads(line)
        return Record(Case.parse(fields.pop("case")), Outcome(**fields))


def load(path: Path) -> list[Record]:
    """The records of a file, of each case the last."""
    found = map(Record.loaded, path.read_text(encoding="utf-8").splitlines())
    return list({record.case: record for record in found}.values())


def judged(case: Case) -> Record:
    """A case, run in a process of its own kind: one thread, and silent."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Record(case, case.run())


def run_all(cases: Iterable[Case], jobs: int) -> Iterator[Record]:
    """Records as cases end, `jobs` side by side."""
    if jobs == 1:
        yield from map(judged, cases)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=TASKS) as pool:
        yield from pool.imap_unordered(judged, cases)
