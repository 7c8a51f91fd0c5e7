"""Results of cases, one JSON object per line."""

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

TASKS = 25  # cases per process, which never frees its operators and traces


class Record(NamedTuple):
    """A case and its outcome."""

    case: Case
    outcome: Outcome

    def dumps(self) -> str:
        """Return the record as a line of JSON."""
        return json.dumps({"case": str(self.case), **dataclasses.asdict(self.outcome)})

    @staticmethod
    def loads(line: str) -> Record:
        """Parse the record of a line."""
        fields = json.loads(line)
        return Record(Case.parse(fields.pop("case")), Outcome(**fields))


def load(path: Path) -> list[Record]:
    """Read the last record of each case from a file."""
    records = map(Record.loads, path.read_text(encoding="utf-8").splitlines())
    return list({record.case: record for record in records}.values())


def run_case(case: Case) -> Record:
    """Run a case with one thread and without warnings."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Record(case, case.run())


def run_all(cases: Iterable[Case], jobs: int) -> Iterator[Record]:
    """Yield records as cases end, with `jobs` processes in parallel."""
    if jobs == 1:
        yield from map(run_case, cases)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=TASKS) as pool:
        yield from pool.imap_unordered(run_case, cases)
