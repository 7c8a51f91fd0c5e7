"""Results of a GPU session: a JSON file that grows with each part."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = "gpu_day.json"

Rounds = dict[str, list[dict[str, Any]]]  # of `tools.bench`: a result a round, by contender


@dataclass(frozen=True)
class Result:
    """The outcome of a part: exit code (None: not reached), seconds, output, and the rounds of a benchmark."""

    name: str
    command: str
    code: int | None = None
    seconds: float = 0.0
    output: str = ""
    rounds: Rounds = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """True if the part ended well; `tools.bench` exits with 0 even if our trainer fails."""
        ours = self.rounds.get("ours", [{}])
        return self.code == 0 and "error" not in ours[-1]


@dataclass
class Session:
    """All results on one machine, by part; `machine` are its facts, `date` is the day of the session."""

    machine: dict[str, str] = field(default_factory=dict)
    date: str = ""
    results: dict[str, Result] = field(default_factory=dict)

    def add(self, result: Result, out: Path) -> None:
        """Add a result, and write all results to the folder `out`."""
        self.results[result.name] = result
        parts = [asdict(each) for each in self.results.values()]
        text = json.dumps({"machine": self.machine, "date": self.date, "parts": parts}, indent=1)
        (out / FILE).write_text(text + "\n")


def read(path: Path) -> Session:
    """Return the session in a file."""
    session = json.loads(path.read_text())
    return Session(session["machine"], session["date"], {each["name"]: Result(**each) for each in session["parts"]})
