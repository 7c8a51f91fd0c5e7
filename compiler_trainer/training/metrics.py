"""What each step measured, on disk as soon as it is known: `metrics.jsonl`, and the same for TensorBoard."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar, text

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import lines_of, put
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say

FILE = "metrics.jsonl"

Record = dict[str, float]


class Appended:
    """A file that grows; what its disk does not take is kept, said once, and tried again with what comes next."""

    def __init__(self, path: Path):
        self.path, self.kept, self.failure = path, b"", ""

    def add(self, content: bytes) -> None:
        """Write at the end, after what was kept."""
        self.kept += content
        before, self.failure = self.failure, self.attempt()
        if self.failure and not before:
            say(f"{self.path} cannot be written ({self.failure}): what belongs there is kept, and tried again")
        if before and not self.failure:
            say(f"{self.path} is written again, nothing is missing")

    def attempt(self) -> str:
        """Write what is kept, all or nothing; why it failed, empty if it did not."""
        try:
            with open(self.path, "ab", buffering=0) as file:
                size = file.tell()
                try:
                    left = memoryview(self.kept)
                    while left:
                        left = left[file.write(left) :]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            return error.strerror or str(error)
        self.kept = b""
        return ""

    def close(self) -> None:
        """Try a last time, and say what is lost."""
        if self.kept:
            self.add(b"")
        if self.kept:
            say(f"{self.path} lacks its last {len(self.kept):,} bytes: {self.failure}")


class Steps(ABC):
    """Appends to a file in a run folder, after its first steps; later ones are dropped.

    A resumed run repeats the steps since its checkpoint, and so does one that was rolled back: a step is in once.
    """

    file: Appended

    def start(self, cfg: Config, done: int) -> None:
        """Open the file for the steps after `done`."""
        self.folder, self.last = Path(cfg.run.dir), done
        self.begin(done)

    def log(self, record: Record) -> None:
        """Add one step: `record["step"]` and its values, finite numbers."""
        step = int(record["step"])
        if step <= self.last:
            self.go_back(step - 1)
        self.last = step
        self.file.add(self.line(record))

    def go_back(self, after: int) -> None:
        """Drop what is there of later steps; where the disk does not let that be, they stay, which is said."""
        self.file.close()
        try:
            self.begin(after)
        except UserError as error:
            say(f"{error}: it holds steps after {after} twice")

    def close(self, failed: bool) -> None:
        """Write what is not written yet."""
        self.file.close()

    @abstractmethod
    def begin(self, after: int) -> None:
        """Drop the steps after that one, and open the file."""

    @abstractmethod
    def line(self, record: Record) -> bytes:
        """What a step adds."""


class JsonLines(Steps):
    """`metrics.jsonl`: a JSON object a step."""

    name, kind = FILE, Record

    def begin(self, after: int) -> None:
        """It is there from the start."""
        drop_later(self.folder / self.name, after, self.kind)
        self.file = Appended(self.folder / self.name)
        self.file.add(b"")

    def line(self, record: Record) -> bytes:
        """Raises ValueError on what is no finite number."""
        return json.dumps(record, allow_nan=False).encode() + b"\n"


class TensorBoard(Steps):
    """The same for TensorBoard."""

    def begin(self, after: int) -> None:
        """A file a start, of which the first event drops what others have of later steps."""
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = Appended(self.folder / name)
        self.file.add(encoded(Event(step=after + 1, file_version="brain.Event:2"), start_at(after + 1)))

    def line(self, record: Record) -> bytes:
        """An event a value."""
        return encoded(*scalars(record))

    def text(self, step: int, name: str, written: str) -> None:
        """Add a text, of the step that was added last."""
        self.file.add(encoded(Event(step=step, summary=text(name, written))))


def encoded(*events: Event) -> bytes:
    """Events as TensorBoard reads them from a file."""
    buffer = io.BytesIO()
    for event in events:
        event.wall_time = time.time()
        RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def start_at(step: int) -> Event:
    """What tells TensorBoard to drop what other files have of a step and of those after it."""
    return Event(step=step, session_log=SessionLog(status=SessionLog.START))


def scalars(record: Record) -> Iterator[Event]:
    """A record's values, an event each."""
    for name, value in record.items():
        if name != "step":
            yield Event(step=int(record["step"]), summary=scalar(name, value))


def read(path: Path, kind: Any = Record) -> list[Any]:
    """The records of a `metrics.jsonl`; a last line that was cut short is none. Raises UserError naming another."""
    records = lines_of(path, kind)
    if lacking := [number for number, record in enumerate(records, 1) if "step" not in record]:
        raise UserError(f"{path}, line {lacking[0]}", "has no step")
    return records


def drop_later(path: Path, after: int, kind: Any) -> None:
    """Keep the records of the first `after` steps only."""
    if not path.exists():
        return
    kept = [record for record in read(path, kind) if record["step"] <= after]
    put(path, "".join(json.dumps(record) + "\n" for record in kept))
