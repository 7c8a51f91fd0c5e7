"""Break down a rank's time from a trace of some steps: by kind, by axis waited for, and by place in the model.

On a CPU the host computes, so all the time of its thread is attributed. On CUDA kernels compute: each belongs to the
host's position when it was launched, and collectives count only while no other kernel runs.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.flop_counter import flop_registry

from compiler_trainer.training.spans import DATA, STEP, WAITS, Span, covered_time
from passes.context.operators import KERNELS
from passes.cost.accounting import FLOPS

ATTENTION, PRODUCTS, LOOPS, HOST = "attention", "products", "loops", "host"
COMPUTING = (PRODUCTS, ATTENTION, LOOPS)
OF_ATTENTION = frozenset(op._schema.name for op in KERNELS)
OF_PRODUCTS = frozenset(str(op).replace(".", "::", 1) for op in (*flop_registry, *FLOPS)) - OF_ATTENTION
WAIT, START = "wait ", "start "  # prefixes of kinds, before a collective's axis
BY_NAME = (
    (ATTENTION, re.compile("flash|fmha|attention")),
    (PRODUCTS, re.compile("gemm|gemv|cutlass|cublas|nvjet|xmma")),
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
    if outer.kind not in (HOST, LOOPS):
        return outer.kind, outer.place
    if mark := marks.get(event["name"]):
        return mark.kind, mark.place
    args = event.get("args", {})
    if axis := args.get("axis"):
        return f"{WAIT if args['operator'] in WAITS else START}{axis}", outer.place
    if event["name"] == DATA:
        return DATA, ""
    if event["name"] in OF_ATTENTION or event["name"] in OF_PRODUCTS:
        return ATTENTION if event["name"] in OF_ATTENTION else PRODUCTS, outer.place
    return LOOPS if outer.place else HOST, outer.place


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
    return next((kind for kind, pattern in BY_NAME if pattern.search(kernel.lower())), LOOPS)
