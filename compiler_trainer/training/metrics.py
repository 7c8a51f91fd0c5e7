"""Write each step's metrics to disk as soon as they are known: `metrics.jsonl`, and the same for TensorBoard.

Metrics of mixtures of experts say how evenly experts are used, from the buffers in which routers store their latest
loads.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard.summary import scalar, text

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import lines_of, write_atomically
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say

FILE = "metrics.jsonl"

Record = dict[str, float]


class GrowingFile:
    """A file that grows; if the disk refuses content, this is reported once, and the content is written later."""

    def __init__(self, path: Path):
        self.path, self.pending, self.failure = path, b"", ""

    def add(self, content: bytes) -> None:
        """Append content, after any kept content."""
        self.pending += content
        previous, self.failure = self.failure, self.attempt()
        if self.failure and not previous:
            say(f"{self.path} cannot be written ({self.failure}): its content is kept and written later")
        if previous and not self.failure:
            say(f"{self.path} can be written again, nothing is missing")

    def attempt(self) -> str:
        """Write the kept content, all or nothing; return the reason for a failure, or an empty string."""
        try:
            with open(self.path, "ab", buffering=0) as file:
                size = file.tell()
                try:
                    remaining = memoryview(self.pending)
                    while remaining:
                        remaining = remaining[file.write(remaining) :]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            return error.strerror or str(error)
        self.pending = b""
        return ""

    def close(self) -> None:
        """Write a last time, and report the bytes that are lost."""
        if self.pending:
            self.add(b"")
        if self.pending:
            say(f"{self.path} lacks its last {len(self.pending):,} bytes: {self.failure}")


class Steps(ABC):
    """A file in a run folder that steps are appended to; steps beyond the run's start are dropped first.

    A resumed or rolled-back run repeats the steps since its checkpoint; the file has each step once.
    """

    file: GrowingFile

    def start(self, cfg: Config, done: int) -> None:
        """Open the file for the steps after `done`."""
        self.folder, self.last = Path(cfg.run.dir), done
        self.begin(done)

    def log(self, record: Record) -> None:
        """Append one step: `record["step"]` and its finite values."""
        step = int(record["step"])
        if step <= self.last:
            self.go_back(step - 1)
        self.last = step
        self.file.add(self.line(record))

    def go_back(self, after: int) -> None:
        """Drop the steps after `after`; if the disk does not permit it, they stay, and a message is printed."""
        self.file.close()
        try:
            self.begin(after)
        except UserError as error:
            say(f"{error}: it contains the steps after {after} twice")

    def close(self, failed: bool) -> None:
        """Write the remaining content."""
        self.file.close()

    @abstractmethod
    def begin(self, after: int) -> None:
        """Drop the steps after `after`, and open the file."""

    @abstractmethod
    def line(self, record: Record) -> bytes:
        """Return the bytes of one step."""


class JsonLines(Steps):
    """The file `metrics.jsonl`: one JSON object per step."""

    name, kind = FILE, Record

    def begin(self, after: int) -> None:
        """Drop later steps, and create the file even before the first step."""
        drop_later(self.folder / self.name, after, self.kind)
        self.file = GrowingFile(self.folder / self.name)
        self.file.add(b"")

    def line(self, record: Record) -> bytes:
        """Return one line; raise ValueError for a value that is not finite."""
        return json.dumps(record, allow_nan=False).encode() + b"\n"


class TensorBoard(Steps):
    """The same metrics in TensorBoard's format."""

    def begin(self, after: int) -> None:
        """Open a new file, whose first event makes TensorBoard drop later steps of older files."""
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = GrowingFile(self.folder / name)
        self.file.add(encode(Event(step=after + 1, file_version="brain.Event:2"), restart_event(after + 1)))

    def line(self, record: Record) -> bytes:
        """Return one event per value."""
        return encode(*scalars(record))

    def text(self, step: int, name: str, value: str) -> None:
        """Append a text at the last logged step."""
        self.file.add(encode(Event(step=step, summary=text(name, value))))


def encode(*events: Event) -> bytes:
    """Return events in TensorBoard's file format."""
    buffer = io.BytesIO()
    for event in events:
        event.wall_time = time.time()
        RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def restart_event(step: int) -> Event:
    """Return the event that makes TensorBoard drop other files' entries from `step` on."""
    return Event(step=step, session_log=SessionLog(status=SessionLog.START))


def scalars(record: Record) -> Iterator[Event]:
    """Yield one event per value of a record."""
    for name, value in record.items():
        if name != "step":
            yield Event(step=int(record["step"]), summary=scalar(name, value))


def read(path: Path, kind: Any = Record) -> list[Any]:
    """Return the records of a `metrics.jsonl`, without a truncated last line.

    Raises UserError naming any other damaged line.
    """
    records = lines_of(path, kind)
    if invalid := [number for number, record in enumerate(records, 1) if "step" not in record]:
        raise UserError(f"{path}, line {invalid[0]}", "has no step")
    return records


def drop_later(path: Path, after: int, kind: Any) -> None:
    """Keep only the records of the first `after` steps."""
    if not path.exists():
        return
    records = [record for record in read(path, kind) if record["step"] <= after]
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))


# ---- use of experts ------------------------------------------------------------------------------------

LOAD, AUXILIARY = ".router.load", ".router.auxiliary"  # endings of the buffers' names


def of_routers(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return numbers of each layer, fp64[] each, from routers' buffers: shares [E] and auxiliary losses [].

    `expert_load/LAYER`: the busiest expert's share over the mean share, from 1 to the number of experts.
    `expert_entropy/LAYER`: the entropy of the shares over that of even shares, from 0 to 1. `balance_loss/LAYER`: the
    auxiliary loss. Nothing is read from the device.
    """
    numbers = {}
    for name, value in buffers.items():
        if name.endswith(AUXILIARY):
            numbers[f"balance_loss/{name.removesuffix(AUXILIARY)}"] = value.double()
        elif name.endswith(LOAD) and value.numel() > 1:
            layer, share = name.removesuffix(LOAD), value.double()
            numbers[f"expert_load/{layer}"] = share.max() * share.numel()
            numbers[f"expert_entropy/{layer}"] = torch.special.entr(share).sum() / math.log(share.numel())
    return numbers


def unevenness(numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return metrics, fp64[] each, from the numbers of all layers: the loads themselves, and over layers.

    `expert_load_max` and `expert_load_mean`: the maximum and mean of loads. `expert_entropy`: the mean. `balance_loss`:
    the sum. Nothing is read from the device.
    """

    def over_layers(kind: str) -> Tensor:
        return torch.stack([value for name, value in numbers.items() if name.startswith(f"{kind}/")])

    loads = {name: value for name, value in numbers.items() if name.startswith("expert_load/")}
    if not loads:
        return {}
    has_losses = any(name.startswith("balance_loss/") for name in numbers)
    return {
        "expert_load_max": over_layers("expert_load").max(),
        "expert_load_mean": over_layers("expert_load").mean(),
        "expert_entropy": over_layers("expert_entropy").mean(),
        **({"balance_loss": over_layers("balance_loss").sum()} if has_losses else {}),
        **loads,
    }
