"""Detect a rank that hangs, report which one and its current operation, and end the job.

A thread of each rank samples the stack of its main thread. If neither the stack nor the traffic with a store has
changed for `run.timeout_s`, it compares the last reports of all ranks. A rank that no longer reports is stopped or
gone; a rank that is not waiting for others is the one that they wait for.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch.distributed as dist

from compiler_trainer.places.store import TRAFFIC
from compiler_trainer.step.ranks import another_store, rank
from compiler_trainer.step.step import Step
from passes.program.torch_private import collectives_recorded

FLIGHTS = "flight_recorder"
LOOKS = 10  # samples per `run.timeout_s`
LONGEST_S = 30.0  # between two samples
WAITS = re.compile(
    r"wait_tensor|all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|\.wait\(|arrive|\.item\("
)
NODES = re.compile(r"Source Nodes: \[([^\]]+)\]")
ABOVE = 40  # lines of generated code searched upwards for the comment that names the nodes

Place = tuple[object, ...]


class Beat(NamedTuple):
    """A rank's report: number of samples, last step, current operation, and True if that waits for other ranks."""

    looks: int
    step: int
    operation: str
    waits: bool


class Watch:
    """A context manager that watches the thread that enters it; the caller keeps `step` current.

    If a rank hangs, the records of NCCL's flight recorder are written into the run `folder`.
    """

    def __init__(self, timeout_s: float, folder: Path):
        self.folder = folder / FLIGHTS
        self.timeout_s, self.every_s = timeout_s, min(timeout_s / LOOKS, LONGEST_S)
        self.step, self.looks, self.stop_event = 0, 0, threading.Event()
        self.watched = threading.get_ident()
        self.store = another_store("watch")
        self.thread = threading.Thread(target=self.watch, daemon=True, name="watch")

    def watch(self) -> None:
        """Sample the main thread until the run is over; end the process if nothing has changed for too long."""
        last_place: Place = ()
        unchanged = 0  # counted in samples, not seconds: a suspended and continued job has not hung
        while not self.stop_event.wait(self.every_s):
            place, operation = self.look()
            last_place, unchanged = place, unchanged + 1 if place == last_place else 0
            self.looks += 1
            beat = Beat(self.looks, self.step, operation, bool(WAITS.search(operation)))
            if self.store is not None:
                self.store.set(str(rank()), json.dumps(beat))
            if unchanged * self.every_s >= self.timeout_s:
                self.end(beat, place)

    def look(self) -> tuple[Place, str]:
        """Return the watched thread's position, and a text with its current operation."""
        frames = []
        frame: FrameType | None = sys._current_frames().get(self.watched)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        turn = next((f.f_locals.get("turn") for f in frames if f.f_code is Step.take.__code__), None)
        place = (self.step, turn, TRAFFIC.value, *((id(f.f_code), f.f_lasti) for f in frames))
        operation = operation_of(frames[0]) if frames else "nothing"
        return place, f"{turn}, {operation}" if turn else operation

    def end(self, mine: Beat, place: Place) -> None:
        """Report on one rank which ranks hang, and end this process; return if it makes progress after all."""
        if self.store is None:
            report(self.timeout_s, [(0, mine, True)], self.write_flight_record())
        else:
            size = dist.get_world_size()
            earlier = [self.read_beat(number) for number in range(size)]
            if self.stop_event.wait(3 * self.every_s) or self.look()[0] != place:
                return
            later = [self.read_beat(number) for number in range(size)]
            beats = [(n, b, n == rank() or b.looks > a.looks) for n, (a, b) in enumerate(zip(earlier, later))]
            note = self.write_flight_record()
            if self.store.add("told", 1) == 1:
                report(self.timeout_s, beats, note)
            time.sleep(self.every_s)  # lets the line out before torchrun kills the other ranks
        os._exit(1)

    def write_flight_record(self) -> str:
        """Write this rank's record of started and finished collectives.

        Return a text with their location, or an empty one without NCCL.
        """
        content = collectives_recorded()
        if not content:
            return ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"rank_{rank()}").write_bytes(content)
        except OSError as error:
            return f"; its collectives cannot be written to {self.folder} ({error.strerror})"
        return f"; collectives of each rank are in {self.folder}: torchfrtrace {self.folder} -p rank_"

    def read_beat(self, number: int) -> Beat:
        """Return a rank's last report."""
        assert self.store is not None
        if not self.store.check([str(number)]):
            return Beat(0, 0, "nothing yet", False)
        return Beat(*json.loads(self.store.get(str(number))))

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop_event.set()


def report(timeout_s: float, beats: Sequence[tuple[int, Beat, bool]], note: str = "") -> None:
    """Print the ranks that hang: the silent ones, otherwise those that wait for nobody, otherwise all of them."""
    silent = [f"rank {n} does not answer, it was last in {position(beat)}" for n, beat, alive in beats if not alive]
    busy = [f"rank {n} is in {position(beat)}" for n, beat, _ in beats if not beat.waits]
    stuck = [f"rank {n} waits in {position(beat)}" for n, beat, _ in beats]
    lines = "; ".join((silent or busy or stuck)[:8])
    print(
        f"error: no progress for {timeout_s:g} s (run.timeout_s): {lines}{note}",
        file=sys.stderr,
        flush=True,
    )


def position(beat: Beat) -> str:
    """Return a report's operation and step as text."""
    return f"{beat.operation} after step {beat.step}"


def operation_of(frame: FrameType, lineno: int | None = None) -> str:
    """Return a frame's current line as text, or line `lineno` of it.

    For generated code, name the graph nodes that the line was generated from.
    """
    file, number = frame.f_code.co_filename, frame.f_lineno if lineno is None else lineno
    line = linecache.getline(file, number).strip()
    above = (linecache.getline(file, n) for n in range(number, max(0, number - ABOVE), -1))
    nodes = next((match[1] for text in above if (match := NODES.search(text))), "")
    return f"{nodes or Path(file).name + ':' + str(number)} ({line[:120]})"
