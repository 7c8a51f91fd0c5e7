"""Record a Perfetto trace of a few steps, with the graph's names for collectives, and each rank's time breakdown.

PyTorch's profiler records an operator and its shapes, but neither the node nor the group. Collectives of the same kind
and shape run in the order of the graph, so the n-th such event belongs to the n-th such node. A rank's time is broken
down by kind, by axis waited for, and by place in the model. On a CPU the host computes, so all the time of its thread
is attributed. On CUDA kernels compute: each belongs to the host's position when it was launched, and collectives count
only while no other kernel runs.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import socket
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities
from torch.utils.flop_counter import flop_registry

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.step.ranks import gather, host_group, rank
from compiler_trainer.step.step import Compiled, Step
from passes.context.operators import KERNELS
from passes.cost.accounting import FLOPS
from passes.ir import ir
from passes.ir.operators import axis_of, kind_of
from passes.lower.backends import NamingInterpreter
from passes.lower.calls import Around, Calls
from passes.torch_private import OpOverload

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
            marks[f"%{node.name} of {program}"] = Mark(place_of(node), ELEMENTWISE if is_body else HOST)
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


# ---- spans ---------------------------------------------------------------------------------------------

STEP, DATA = "step ", "data"  # a step, with its number; the wait for a batch
WAITS = ("_c10d_functional::wait_tensor", "ct::arrive")  # for collectives

Span = tuple[float, float]


def covered_time(spans: Iterable[Span]) -> float:
    """Return the time that at least one of some spans covers."""
    total, end = 0.0, float("-inf")
    for begin, span_end in sorted(spans):
        total += max(0.0, span_end - max(begin, end))
        end = max(end, span_end)
    return total


# ---- breakdown of a rank's time ------------------------------------------------------------------------

ATTENTION, MATMULS, ELEMENTWISE, HOST = "attention", "products", "loops", "host"
COMPUTING = (MATMULS, ATTENTION, ELEMENTWISE)
ATTENTION_NAMES = frozenset(op._schema.name for op in KERNELS)
MATMUL_NAMES = frozenset(str(op).replace(".", "::", 1) for op in (*flop_registry, *FLOPS)) - ATTENTION_NAMES
WAIT, START = "wait ", "start "  # prefixes of kinds, before a collective's axis
BY_NAME = (
    (ATTENTION, re.compile("flash|fmha|attention")),
    (MATMULS, re.compile("gemm|gemv|cutlass|cublas|nvjet|xmma")),
)
HOSTS, LAUNCHES = ("cpu_op", "user_annotation"), ("cuda_runtime", "cuda_driver")
DEVICES = ("kernel", "gpu_memcpy", "gpu_memset")
US = 1e-3  # ms

Event = Mapping[str, Any]


@dataclass
class Spent:
    """Milliseconds of a step, averaged: by kind of kernel, waits by axis, host time, waits for data, by place."""

    step_ms: float = 0.0
    kinds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    host_ms: float = 0.0
    data_ms: float = 0.0
    places: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Mark(NamedTuple):
    """The meaning of an event's name: its place in the model, and its kind apart from the operators in it."""

    place: str
    kind: str


class Segment(NamedTuple):
    """A time span (us) of a thread, with its kind and place."""

    begin: float
    end: float
    kind: str
    place: str


def break_down(events: Sequence[Event], marks: Mapping[str, Mark]) -> Spent:
    """Return the time breakdown of a step, averaged over the steps of a trace; `marks` give the meanings of names."""
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(STEP)]
    kernels = [kernels_of(step, events) for step in steps]
    intervals = intervals_of(steps, kernels)
    is_ahead = any(begin > step["ts"] for step, (begin, _) in zip(steps, intervals))
    skipped = int(is_ahead)  # the step before the first was still running but is not in the trace
    total, count = Spent(), max(1, len(steps) - skipped)
    for step, step_kernels, (begin, end) in list(zip(steps, kernels, intervals))[skipped:]:
        host = list(segments(thread_events(step, events), marks))
        (add_device_step(total, end - begin, host, step_kernels) if step_kernels else add_host_step(total, host))
        total.step_ms += US * (end - begin)
    kinds, exposed, places = (mean(totals, count) for totals in (total.kinds, total.exposed_ms, total.places))
    return Spent(total.step_ms / count, kinds, exposed, total.host_ms / count, total.data_ms / count, places)


def kernels_of(step: Event, events: Sequence[Event]) -> list[tuple[float, Event]]:
    """Return (launch time, kernel) of each kernel that the host launched in a step; none on a CPU."""
    times = {e["args"].get("correlation"): e["ts"] for e in events if e.get("cat") in LAUNCHES}
    kernels = ((times.get(e["args"].get("correlation"), -1.0), e) for e in events if e.get("cat") in DEVICES)
    return [(at, kernel) for at, kernel in kernels if step["ts"] <= at < step["ts"] + step["dur"]]


def intervals_of(steps: Sequence[Event], kernels: Sequence[Sequence[tuple[float, Event]]]) -> list[Span]:
    """Return each step's span; a step begins when the device ends the previous one, even if launched earlier."""
    intervals, end = list[Span](), float("-inf")
    for step, step_kernels in zip(steps, kernels):
        begin = max(step["ts"], end)
        end = max([step["ts"] + step["dur"], *(kernel["ts"] + kernel["dur"] for _, kernel in step_kernels)])
        intervals.append((begin, end))
    return intervals


def mean(total_ms: Mapping[str, float], count: int) -> dict[str, float]:
    """Return the averages of sums over `count` steps."""
    return {key: ms / count for key, ms in total_ms.items()}


def thread_events(step: Event, events: Iterable[Event]) -> list[Event]:
    """Return the events of a step's thread during the step, outer ones before inner ones."""
    first, last = step["ts"], step["ts"] + step["dur"]
    own_events = (e for e in events if e.get("cat") in HOSTS and (e["pid"], e["tid"]) == (step["pid"], step["tid"]))
    return sorted((e for e in own_events if first <= e["ts"] < last), key=lambda e: (e["ts"], -e["dur"]))


def segments(events: Iterable[Event], marks: Mapping[str, Mark]) -> Iterator[Segment]:
    """Yield a thread's time in segments: each moment belongs to the innermost of its nested events."""
    stack: list[Segment] = []
    at = 0.0
    for event in (*events, {"name": "", "ts": float("inf"), "dur": 0.0}):
        while stack and stack[-1].end <= event["ts"]:
            top = stack.pop()
            yield top._replace(begin=at, end=max(at, top.end))
            at = max(at, top.end)
        if stack:
            yield stack[-1]._replace(begin=at, end=event["ts"])
        at = event["ts"]
        outer = stack[-1] if stack else Segment(at, at, HOST, "")
        stack.append(Segment(at, at + event["dur"], *classify(event, outer, marks)))


def classify(event: Event, outer: Segment, marks: Mapping[str, Mark]) -> tuple[str, str]:
    """Return (kind, place) of a nested event; all events inside a matmul, a wait or batch preparation belong to it."""
    if outer.kind not in (HOST, ELEMENTWISE):
        return outer.kind, outer.place
    if mark := marks.get(event["name"]):
        return mark.kind, mark.place
    args = event.get("args", {})
    if axis := args.get("axis"):
        return f"{WAIT if args['operator'] in WAITS else START}{axis}", outer.place
    if event["name"] == DATA:
        return DATA, ""
    if event["name"] in ATTENTION_NAMES or event["name"] in MATMUL_NAMES:
        return ATTENTION if event["name"] in ATTENTION_NAMES else MATMULS, outer.place
    return ELEMENTWISE if outer.place else HOST, outer.place


# ---- CPU: the host computes -----------------------------------------------------------------------------


def add_host_step(total: Spent, host: Iterable[Segment]) -> None:
    """Add a step on a CPU to `total`."""
    for begin, end, kind, place in host:
        add_time(total, kind, place, US * (end - begin))


def add_time(total: Spent, kind: str, place: str, ms: float) -> None:
    if kind.startswith(WAIT):
        total.exposed_ms[kind.removeprefix(WAIT)] += ms
    elif kind in COMPUTING:
        total.kinds[kind] += ms
        total.places[place] += ms
    elif kind == DATA:
        total.data_ms += ms
    else:
        total.host_ms += ms


# ---- CUDA: the device computes --------------------------------------------------------------------------


def add_device_step(
    total: Spent, duration: float, host: Sequence[Segment], kernels: Iterable[tuple[float, Event]]
) -> None:
    """Add a step of `duration` us on a GPU to `total`, from the kernels that were launched in it."""
    begins = [segment.begin for segment in host]
    busy, travelling = list[Span](), dict[str, list[Span]]()
    for at, kernel in kernels:
        caller = host[bisect_right(begins, at) - 1]
        span = kernel["ts"], kernel["ts"] + kernel["dur"]
        if caller.kind.startswith((START, WAIT)):
            travelling.setdefault(caller.kind.partition(" ")[2], []).append(span)
        elif "nccl" in kernel["name"].lower():
            travelling.setdefault("?", []).append(span)
        else:
            busy.append(span)
            add_time(
                total,
                caller.kind if caller.place else kind_by_name(kernel["name"]),
                caller.place,
                US * kernel["dur"],
            )
    covered_us = covered_time(busy)
    for axis, spans in travelling.items():
        busy += spans
        total.exposed_ms[axis] += US * (covered_time(busy) - covered_us)
        covered_us = covered_time(busy)
    idle = max(0.0, US * (duration - covered_us))
    data = min(idle, sum(US * (s.end - s.begin) for s in host if s.kind == DATA))
    total.data_ms += data
    total.host_ms += idle - data


def kind_by_name(kernel: str) -> str:
    """Return the kind of a kernel by its name, for kernels without a marked caller, such as those of a CUDA graph."""
    return next((kind for kind, pattern in BY_NAME if pattern.search(kernel.lower())), ELEMENTWISE)
