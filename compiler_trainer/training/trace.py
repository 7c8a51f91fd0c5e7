"""Record a Perfetto trace of a few steps, with the graph's names for collectives, and each rank's time breakdown.

PyTorch's profiler records an operator and its shapes, but neither the node nor the group. Collectives of the same kind
and shape run in the order of the graph, so the n-th such event belongs to the n-th such node.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import socket
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.step.ranks import gather, host_group, rank
from compiler_trainer.step.step import Compiled, Step
from compiler_trainer.training.measured import HOST, LOOPS, Mark, break_down
from compiler_trainer.training.spans import STEP, WAITS
from passes.lower.backends import NamingInterpreter
from passes.lower.calls import Around, Calls
from passes.program import ir
from passes.program.operators import axis_of, kind_of
from passes.program.torch_private import OpOverload

FILE, MEASURED = "trace.json.gz", "measured.json"
WARM_UP, STEPS = 2, 3  # steps skipped (the first one measures memory), then steps recorded

Key = tuple[str, tuple[int, ...]]  # operator, shape of the first operand


def check(cfg: Config, done: int) -> None:
    """Raise UserError if an option asks for a recording that this run, with `done` steps behind it, cannot make."""
    if cfg.run.memory_snapshot and not torch.cuda.is_available():
        raise UserError("run.memory_snapshot", "true, but it records the allocator of a GPU, and there is no GPU")
    if cfg.run.profile and cfg.train.steps - done <= WARM_UP:
        steps = f"train.steps={cfg.train.steps} after step {done}"
        raise UserError(
            "run.profile", f"true with {steps}; the first {WARM_UP} steps are not recorded; increase train.steps"
        )


class Trace:
    """The recorder of steps into the run folder, if enabled: the trace of rank 0, and the measurements of all ranks."""

    def __init__(self, cfg: Config, step: Step, done: int):
        self.folder, self.step, self.is_on = Path(cfg.run.dir), step, cfg.run.profile
        self.first = done + WARM_UP + 1
        self.last = min(self.first + STEPS - 1, cfg.train.steps)
        activities = [a for a in supported_activities() if a in (ProfilerActivity.CPU, ProfilerActivity.CUDA)]
        self.profiler = profile(activities=activities, record_shapes=True) if self.is_on else None
        self.group = host_group() if self.is_on else None

    @contextmanager
    def record_step(self, number: int) -> Iterator[None]:
        """Record the enclosed block as step `number`."""
        if self.profiler is None or not self.first <= number <= self.last:
            yield
            return
        if number == self.first:
            set_around(self.step, mark)
            self.profiler.start()
        with record_function(f"{STEP}{number}"):
            yield
        if number == self.last:
            self.profiler.stop()
            set_around(self.step, lambda program: nullcontext)
            self.keep()

    def keep(self) -> None:
        """Write the recording; if the disk refuses it, print a message, because training continues."""
        trace, reason = self.read()
        reports = gather(rank_report(trace["traceEvents"], marks_of(self.step)) if trace else None, self.group)
        if rank() == 0 and trace is None:
            say(f"{self.folder / FILE} cannot be written ({reason}): there is no trace of this run")
        elif rank() == 0:
            self.put(FILE, trace)
            self.put(MEASURED, {"steps": [self.first, self.last], "ranks": [report for report in reports if report]})

    def read(self) -> tuple[dict[str, Any] | None, str]:
        """Return (the trace with named collectives, ""), or (None, the reason why there is none).

        The profiler truncates its file silently when the disk is full.
        """
        assert self.profiler is not None
        try:
            with tempfile.TemporaryDirectory() as folder:
                raw = Path(folder, "trace.json")
                self.profiler.export_chrome_trace(str(raw))
                trace = json.loads(raw.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            problem = f"{tempfile.gettempdir()} is full"
            return None, (error.strerror or problem) if isinstance(error, OSError) else problem
        name_collectives(trace["traceEvents"], nodes_of(self.step))
        return trace, ""

    def put(self, name: str, content: Any) -> None:
        """Write a file; if that fails, remove it and print the reason."""
        path = self.folder / name
        try:
            with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else open(path, "w") as file:
                json.dump(content, file)
        except OSError as error:
            path.unlink(missing_ok=True)  # a truncated trace is of no use
            say(f"{path} cannot be written ({error.strerror}): there is no trace of this run")


# ---- names of calls ----------------------------------------------------------------------------------


def mark(program: str) -> Around:
    """Return a function that wraps each call of a program in a profiler event with the call's name."""
    return lambda name: record_function(f"%{name} of {program}")


def marks_of(step: Step) -> dict[str, Mark]:
    """Return the meaning of each of these event names.

    A compiled region counts as elementwise kernels, except for the operators that the trace shows in it.
    """
    marks: dict[str, Mark] = {}
    for program, compiled in running(step).items():
        is_body = isinstance(compiled.executable, Calls)
        for node in (compiled.finished if is_body else compiled.program).calls():
            marks[f"%{node.name} of {program}"] = Mark(place_of(node), LOOPS if is_body else HOST)
    return marks


def place_of(node: fx.Node) -> str:
    """Return the phase and layer of an operator or a compiled region, such as `backward layers.3`."""
    role = ir.record(node).role
    layer = ir.layer(node) if role is None else role.layer
    return f"{ir.phase(node)} {layer or 'outside of layers'}"


def running(step: Step) -> dict[str, Compiled]:
    """Return the programs that this rank runs in a step, by name."""
    names = {turn.program for turn in step.training[0]}
    return {name: compiled for name, compiled in step.train.items() if name in names}


def set_around(step: Step, around: Callable[[str], Around]) -> None:
    """Wrap the calls of each program in `around(program)`.

    A recorded CUDA graph makes no calls, so it is not wrapped.
    """
    for name, compiled in running(step).items():
        if isinstance(compiled.executable, Calls | NamingInterpreter):
            compiled.executable.around = around(name)


def rank_report(events: list[dict[str, Any]], marks: Mapping[str, Mark]) -> dict[str, Any]:
    """Return this rank's measurements and its host."""
    return {"rank": rank(), "host": socket.gethostname(), **dataclasses.asdict(break_down(events, marks))}


# ---- names of collectives -----------------------------------------------------------------------------


def nodes_of(step: Step) -> list[fx.Node]:
    """Return the collectives that one step runs and the waits for them, in execution order."""
    times = Counter(turn.program for turn in step.training[0])
    runs = [[compiled.program] * times[name] for name, compiled in step.train.items()]
    return [n for programs in runs for program in programs for n in program.calls() if kind_of(n) or is_wait(n)]


def name_collectives(events: Iterable[dict[str, Any]], nodes: Iterable[fx.Node]) -> None:
    """Rename the events of collectives and waits after kind, axis and node; leave other events as they are."""
    nodes_by_key: dict[Key, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        nodes_by_key[key_of(node)].append(node)
    counts: Counter[Key] = Counter()
    for event in sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: e["ts"]):
        dims = event.get("args", {}).get("Input Dims") or [[]]
        key = event["name"], tuple(dims[0]) if all(isinstance(n, int) for n in dims[0]) else ()
        if matches := nodes_by_key.get(key):
            node = matches[counts[key] % len(matches)]
            counts[key] += 1
            event["args"] |= {"operator": event["name"], "source": ir.source(node), "module": ir.module_path(node)}
            event["args"] |= {"axis": axis} if (axis := axis_of(node if kind_of(node) else wait_target(node))) else {}
            event["name"] = label(node)


def key_of(node: fx.Node) -> Key:
    """Return what identifies a node in the profiler: its operator, and its first operand's shape if it is a tensor."""
    operand = node.args[0]
    return node.target._schema.name, tuple(ir.value(operand).shape) if ir.is_tensor(operand) else ()  # type: ignore


def is_wait(node: fx.Node) -> bool:
    """Return True if a node waits for a collective."""
    return isinstance(node.target, OpOverload) and node.target._schema.name in WAITS


def label(node: fx.Node) -> str:
    """Return the name of an event, such as `all_gather tp %all_gather_into_tensor_3`, or `wait for` that name."""
    if kind_of(node):
        return f"{kind_of(node)} {axis_of(node)} %{node.name}"
    return f"wait for {label(target)}" if kind_of(target := wait_target(node)) else f"wait %{node.name}"


def wait_target(node: fx.Node) -> fx.Node:
    """Return the collective that a wait belongs to, or the wait itself if there is none."""
    target = node.args[0]
    while isinstance(target, fx.Node) and not kind_of(target):
        target = target.args[0]
    return target if isinstance(target, fx.Node) else node
