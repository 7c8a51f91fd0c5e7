"""Notice a rank that hangs, say which and what it was doing, and end the job.

A thread of each rank looks where its main thread is. If that has not moved for `run.timeout_s`, nor anything to or from
a store, the thread looks at what the others have last said of themselves: a rank that says nothing any more is stopped
or gone; one that is not waiting for others is what the others wait for.
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
LOOKS = 10  # in the time after which a rank counts as hung
LONGEST_S = 30.0  # between two looks
WAITS = re.compile(
    r"wait_tensor|all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|\.wait\(|arrive|\.item\("
)
NODES = re.compile(r"Source Nodes: \[([^\]]+)\]")
ABOVE = 40  # lines of generated code above one, in which its comment is looked for

Place = tuple[object, ...]


class Beat(NamedTuple):
    """What a rank says of itself: how often it looked, its last step, what it does, whether that waits for others."""

    looks: int
    step: int
    doing: str
    waits: bool


class Watch:
    """Watches the thread that enters it until it is left; `step` is to be kept current.

    What NCCL's flight recorder holds of a rank that hangs is written into the run `folder`.
    """

    def __init__(self, timeout_s: float, folder: Path):
        self.folder = folder / FLIGHTS
        self.timeout_s, self.every_s = timeout_s, min(timeout_s / LOOKS, LONGEST_S)
        self.step, self.looks, self.over = 0, 0, threading.Event()
        self.watched = threading.get_ident()
        self.store = another_store("watch")
        self.thread = threading.Thread(target=self.watch, daemon=True, name="watch")

    def watch(self) -> None:
        """Look again and again; end the process where nothing has moved for too long."""
        before: Place = ()
        still = 0  # looks, not seconds: a job that is stopped as a whole and goes on has not hung
        while not self.over.wait(self.every_s):
            place, doing = self.look()
            before, still = place, still + 1 if place == before else 0
            self.looks += 1
            beat = Beat(self.looks, self.step, doing, bool(WAITS.search(doing)))
            if self.store is not None:
                self.store.set(str(rank()), json.dumps(beat))
            if still * self.every_s >= self.timeout_s:
                self.end(beat, place)

    def look(self) -> tuple[Place, str]:
        """Where the watched thread is, and in words what it is doing there."""
        frames = []
        frame: FrameType | None = sys._current_frames().get(self.watched)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        turn = next((f.f_locals.get("turn") for f in frames if f.f_code is Step.take.__code__), None)
        place = (self.step, turn, TRAFFIC.value, *((id(f.f_code), f.f_lasti) for f in frames))
        doing = doing_of(frames[0]) if frames else "nothing"
        return place, f"{turn}, {doing}" if turn else doing

    def end(self, mine: Beat, place: Place) -> None:
        """Say on one rank who hangs, and end this one; nothing where it moves on after all."""
        if self.store is None:
            tell(self.timeout_s, [(0, mine, True)], self.keep_flight())
        else:
            size = dist.get_world_size()
            earlier = [self.beat_of(number) for number in range(size)]
            if self.over.wait(3 * self.every_s) or self.look()[0] != place:
                return
            later = [self.beat_of(number) for number in range(size)]
            found = [(n, b, n == rank() or b.looks > a.looks) for n, (a, b) in enumerate(zip(earlier, later))]
            kept = self.keep_flight()
            if self.store.add("told", 1) == 1:
                tell(self.timeout_s, found, kept)
            time.sleep(self.every_s)  # for the line to get out before torchrun ends the others
        os._exit(1)

    def keep_flight(self) -> str:
        """Write the collectives that this rank has begun and ended; where they are, empty without NCCL."""
        content = collectives_recorded()
        if not content:
            return ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"rank_{rank()}").write_bytes(content)
        except OSError as error:
            return f"; its collectives cannot be written to {self.folder} ({error.strerror})"
        return f"; collectives of each rank are in {self.folder}: torchfrtrace {self.folder} -p rank_"

    def beat_of(self, number: int) -> Beat:
        """What a rank has last said."""
        assert self.store is not None
        if not self.store.check([str(number)]):
            return Beat(0, 0, "nothing yet", False)
        return Beat(*json.loads(self.store.get(str(number))))

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.over.set()


def tell(timeout_s: float, found: Sequence[tuple[int, Beat, bool]], kept: str = "") -> None:
    """Print who hangs: those that are silent, else those that wait for nobody, else all; and what was kept of it."""
    silent = [f"rank {number} does not answer, it was last in {at(beat)}" for number, beat, alive in found if not alive]
    busy = [f"rank {number} is in {at(beat)}" for number, beat, _ in found if not beat.waits]
    stuck = [f"rank {number} waits in {at(beat)}" for number, beat, _ in found]
    lines = "; ".join((silent or busy or stuck)[:8])
    print(f"error: nothing has moved for {timeout_s:g} s (run.timeout_s): {lines}{kept}", file=sys.stderr, flush=True)


def at(beat: Beat) -> str:
    """A step, and what was being done in it."""
    return f"{beat.doing} after step {beat.step}"


def doing_of(frame: FrameType, at: int | None = None) -> str:
    """What a frame is `at`, or was: its line, and the nodes that it was made of where that line was generated."""
    file, number = frame.f_code.co_filename, frame.f_lineno if at is None else at
    line = linecache.getline(file, number).strip()
    above = (linecache.getline(file, n) for n in range(number, max(0, number - ABOVE), -1))
    made = next((match[1] for text in above if (match := NODES.search(text))), "")
    return f"{made or Path(file).name + ':' + str(number)} ({line[:120]})"
