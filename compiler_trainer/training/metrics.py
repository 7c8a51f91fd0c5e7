"""What each step measured, on disk as soon as it is known: `metrics.jsonl`, and the same for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import lines_of, put

FILE = "metrics.jsonl"

Record = dict[str, float]


class Metrics:
    """Appends to the metrics in a run folder, after those of the first `after` steps; later ones are dropped.

    A resumed run repeats the steps since its checkpoint, and so does one that was rolled back: a step is in once.
    """

    def __init__(self, folder: Path, after: int = 0):
        self.folder = folder
        self.begin(after)

    def begin(self, after: int) -> None:
        """Open both for the steps after that one."""
        self.last = after
        drop_later(self.folder / FILE, after)
        self.file = open(self.folder / FILE, "a", encoding="utf-8")
        self.events = SummaryWriter(str(self.folder), purge_step=after + 1)

    def close(self) -> None:
        """Close both."""
        self.file.close()
        self.events.close()

    def write(self, record: Record) -> None:
        """Add one step: `record["step"]` and its values, finite numbers."""
        step = int(record["step"])
        if step <= self.last:
            self.close()
            self.begin(step - 1)
        self.last = step
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        self.file.flush()
        for name, value in record.items():
            if name != "step":
                self.events.add_scalar(name, value, record["step"])
        self.events.flush()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def read(path: Path) -> list[Record]:
    """The records of a `metrics.jsonl`; a last line that was cut short is none. Raises UserError naming another."""
    records = lines_of(path, Record)
    if lacking := [number for number, record in enumerate(records, 1) if "step" not in record]:
        raise UserError(f"{path}, line {lacking[0]}", "has no step")
    return records


def drop_later(path: Path, after: int) -> None:
    """Keep the records of the first `after` steps only."""
    if not path.exists():
        return
    kept = [record for record in read(path) if record["step"] <= after]
    put(path, "".join(json.dumps(record) + "\n" for record in kept))
