"""Report the failures of ranks: one that hangs, one that died, or one that is out of memory.

A thread of each rank samples the stack of its main thread. If neither the stack nor the traffic with a store has
changed for `run.timeout_s`, it compares the last reports of all ranks. A rank that no longer reports is stopped or
gone; a rank that is not waiting for others is the one that they wait for. The job ends, unless another rank makes
progress, such as one that generates samples or writes a checkpoint to a slower disk.

Ranks that wait for a killed rank fail in whatever collective they are in, and the error does not name the rank. So a
thread of each rank answers a call. The first rank that fails calls; ranks that do not answer are gone.
"""

from __future__ import annotations

import errno
import gc
import json
import linecache
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from compiler_trainer.config.errors import RunError
from compiler_trainer.places.store import TRAFFIC
from compiler_trainer.step.ranks import another_store, rank
from compiler_trainer.step.step import Step
from passes.ir.ir import CompileError
from passes.lower.heap import free_in_heap
from passes.torch_private import collectives_recorded

FLIGHTS = "flight_recorder"
LOOKS = 10  # samples per `run.timeout_s`
LONGEST_S = 30.0  # between two samples
MOST_PATIENT = 6  # times `run.timeout_s`: the longest wait for a rank that makes progress
WAITS = re.compile(
    r"wait_tensor|all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|\.wait\(|arrive|\.item\("
)
NODES = re.compile(r"Source Nodes: \[([^\]]+)\]")
ABOVE = 40  # lines of generated code searched upwards for the comment that names the nodes

Place = tuple[object, ...]


class Beat(NamedTuple):
    """A rank's report: number of samples, last step, current operation, and True if that waits for other ranks.

    `unchanged` is the number of last samples without progress.
    """

    looks: int
    step: int
    operation: str
    waits: bool
    unchanged: int = 0


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
        last_step = -1
        unchanged = 0  # counted in samples, not seconds: a suspended and continued job has not hung
        while not self.stop_event.wait(self.every_s):
            # Reading a stack keeps its values alive, which disturbs PyTorch while it traces: not after each step.
            place, operation = self.look() if self.step == last_step else ((self.step,), "a step")
            last_step = self.step
            last_place, unchanged = place, unchanged + 1 if place == last_place else 0
            self.looks += 1
            beat = Beat(self.looks, self.step, operation, bool(WAITS.search(operation)), unchanged)
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
            others_progress = any(alive and beat.unchanged * self.every_s < self.timeout_s for _, beat, alive in beats)
            if others_progress and mine.unchanged * self.every_s < MOST_PATIENT * self.timeout_s:
                return
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
    say_error(f"no progress for {timeout_s:g} s (run.timeout_s): {lines}{note}")


def say_error(message: str) -> None:
    """Print why a job ends, and write it where torchrun reads the first error of a rank."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    with suppress(OSError):
        get_error_handler().record_exception(RunError(message))


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


# ---- dead ranks ----------------------------------------------------------------------------------------

POLL_S, PATIENCE_S = 0.5, 5.0
SHOWN = 8
CLOSED = re.compile(  # messages of gloo, NCCL and the store
    r"Connection (closed|reset) by peer( \[[^\]]*\](:\d+)?)?|Broken pipe|ncclRemoteError|remote process exited"
    r"|Socket closed|failed to recv, got 0 bytes|Connection refused"
)


class Peers:
    """A context manager that answers calls for this rank, and ends the process with one line if a rank is gone.

    A process that `survives` the loss of a rank does not end.
    """

    def __init__(self, survives: bool) -> None:
        self.survives = survives
        self.store = another_store("peers")
        self.stop_event = threading.Event()
        self.thread = threading.Thread(target=self.answer, daemon=True, name="peers")

    def answer(self) -> None:
        """Answer when a rank calls."""
        while self.store is not None and not self.stop_event.wait(POLL_S):
            try:
                if self.store.check(["call"]):
                    self.store.set(key(rank()), "")
                    return
            except RuntimeError:  # the store is gone; the main thread reports it
                return

    def name_missing(self, problem: str) -> str:
        """Return a message naming the ranks that do not answer, or an empty string if another rank reports them."""
        assert self.store is not None
        try:
            missing = self.call(dist.get_world_size())
            if self.store.add("told", 1) > 1:
                return ""
        except RuntimeError:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return f"rank 0 or its node is gone: the store at {address} does not answer ({problem})"
        if not missing:
            return f"a connection between ranks failed, although all ranks answer: {problem}"
        ranks = ", ".join(str(number) for number in missing[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
        single = f"rank {ranks} is gone: it does not answer"
        return f"{single if len(missing) == 1 else f'ranks {ranks} are gone: they do not answer'} any more ({problem})"

    def call(self, size: int) -> list[int]:
        """Call all ranks, and return those that do not answer within `PATIENCE_S`."""
        assert self.store is not None
        self.store.set("call", "")
        self.store.set(key(rank()), "")
        end = time.monotonic() + PATIENCE_S
        while not self.store.check([key(number) for number in range(size)]):
            if time.monotonic() > end:
                return [number for number in range(size) if not self.store.check([key(number)])]
            time.sleep(POLL_S / 5)
        return []

    def leave(self) -> None:
        """Let the other ranks end before rank 0, whose process holds the store; it waits at most `PATIENCE_S`."""
        assert self.store is not None
        with suppress(RuntimeError):
            self.store.set(f"left{rank()}", "")
            remaining = [n for n in range(1, dist.get_world_size()) if self.store.check([key(n)])]
            end = time.monotonic() + PATIENCE_S
            while rank() == 0 and time.monotonic() < end and not self.store.check([f"left{n}" for n in remaining]):
                time.sleep(POLL_S / 5)

    def __enter__(self) -> Peers:
        self.thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        problem = "" if self.survives else closed_connection(error)
        if problem and self.store is not None:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to the remaining ranks
            if message := self.name_missing(problem):
                say_error(message)
            self.leave()
            os._exit(1)  # destroying groups with a dead rank may hang
        self.stop_event.set()


def key(number: int) -> str:
    """Return the store's key under which a rank answers."""
    return f"here{number}"


def closed_connection(error: BaseException | None) -> str:
    """Return the text about a closed connection in an error or its causes, or an empty string."""
    while error is not None:
        if isinstance(error, (RuntimeError, OSError)) and (match := CLOSED.search(str(error))):
            return match[0]
        error = error.__cause__
    return ""


# ---- out of memory -------------------------------------------------------------------------------------

SAID = re.compile(r"out of memory|can't allocate memory|std::bad_alloc", re.IGNORECASE)  # in messages of RuntimeError
ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
STATUS = Path("/proc/self/status")


class Failure(NamedTuple):
    """A failed allocation: its size (0 bytes if unknown), the operation, and the bytes that were in use."""

    asked_bytes: int
    where: str
    used_bytes: int


def failure_of(error: BaseException) -> Failure | None:
    """Return the failed allocation behind an error, or None if the error has another cause."""
    errors = list(chain(error))
    if not any(map(is_of_memory, errors)):
        return None
    match = next((m for e in errors if (m := ASKED.search(str(e)))), None)
    size = round(float(match[1]) * UNITS[match[2].lower()]) if match else 0
    node = next((e.node for e in errors if isinstance(e, CompileError) and e.node), None)
    operation = f"%{node.name}" if node else operation_at(errors[-1].__traceback__)
    return Failure(size, operation, used_bytes())


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, the original error last."""
    visited = set[int]()  # causes may form a cycle
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_of_memory(error: BaseException) -> bool:
    """Return True if this error itself, apart from its causes, is a failed allocation."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(SAID.search(str(error)))


def operation_at(traceback: TracebackType | None) -> str:
    """Return the operation that the innermost frame of a traceback ran when the error was raised."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return operation_of(traceback.tb_frame, traceback.tb_lineno) if traceback else "an allocation"


# ---- how much there is ------------------------------------------------------------------------------------


def used_bytes() -> int:
    """Return the bytes in use: on CUDA the peak of tensors; on a CPU the address space if limited, or resident memory.

    Memory that the CPU heap caches (`passes/lower/heap.py`) is not counted.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return max(0, status_bytes("VmSize" if limit_bytes() else "VmRSS") - free_in_heap())


def let_go() -> None:
    """Release unreferenced and cached memory, and reset CUDA's peak statistics."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def free_bytes() -> int:
    """Return the bytes that can still be allocated on the device, or in this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    if limit := limit_bytes():
        return max(0, limit - used_bytes())
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    available_bytes = 1024 * int(available.split()[1]) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return available_bytes + free_in_heap()


def limit_bytes() -> int:
    """Return the limit of this process's address space (ulimit -v), or 0 if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 0 if soft == resource.RLIM_INFINITY else soft


def status_bytes(name: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
