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

from compiler_trainer.training.spans import DATA, STEP, WAITS, Span, covered
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


def spent(events: Sequence[Event], marks: Mapping[str, Mark]) -> Spent:
    """Return the time breakdown of a step, averaged over the steps of a trace; `marks` give the meanings of names."""
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(STEP)]
    kernels = [kernels_of(step, events) for step in steps]
    intervals = intervals_of(steps, kernels)
    is_ahead = any(begin > step["ts"] for step, (begin, _) in zip(steps, intervals))
    skipped = int(is_ahead)  # the step before the first was still running but is not in the trace
    found, count = Spent(), max(1, len(steps) - skipped)
    for step, launched, (begin, end) in list(zip(steps, kernels, intervals))[skipped:]:
        host = list(segments(thread_of(step, events), marks))
        (of_device(found, end - begin, host, launched) if launched else of_host(found, host))
        found.step_ms += US * (end - begin)
    kinds, exposed, places = (mean(each, count) for each in (found.kinds, found.exposed_ms, found.places))
    return Spent(found.step_ms / count, kinds, exposed, found.host_ms / count, found.data_ms / count, places)


def kernels_of(step: Event, events: Sequence[Event]) -> list[tuple[float, Event]]:
    """Return (launch time, kernel) of each kernel that the host launched in a step; none on a CPU."""
    times = {e["args"].get("correlation"): e["ts"] for e in events if e.get("cat") in LAUNCHES}
    launched = ((times.get(e["args"].get("correlation"), -1.0), e) for e in events if e.get("cat") in DEVICES)
    return [(at, kernel) for at, kernel in launched if step["ts"] <= at < step["ts"] + step["dur"]]


def intervals_of(steps: Sequence[Event], kernels: Sequence[Sequence[tuple[float, Event]]]) -> list[Span]:
    """Return each step's span; a step begins when the device ends the previous one, even if launched earlier."""
    intervals, end = list[Span](), float("-inf")
    for step, launched in zip(steps, kernels):
        begin = max(step["ts"], end)
        end = max([step["ts"] + step["dur"], *(kernel["ts"] + kernel["dur"] for _, kernel in launched)])
        intervals.append((begin, end))
    return intervals


def mean(total_ms: Mapping[str, float], count: int) -> dict[str, float]:
    """Return the averages of sums over `count` steps."""
    return {key: ms / count for key, ms in total_ms.items()}


def thread_of(step: Event, events: Iterable[Event]) -> list[Event]:
    """Return the events of a step's thread during the step, outer ones before inner ones."""
    first, last = step["ts"], step["ts"] + step["dur"]
    own = (e for e in events if e.get("cat") in HOSTS and (e["pid"], e["tid"]) == (step["pid"], step["tid"]))
    return sorted((e for e in own if first <= e["ts"] < last), key=lambda e: (e["ts"], -e["dur"]))


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
        around = stack[-1] if stack else Segment(at, at, HOST, "")
        stack.append(Segment(at, at + event["dur"], *inside(event, around, marks)))


def inside(event: Event, around: Segment, marks: Mapping[str, Mark]) -> tuple[str, str]:
    """Return (kind, place) of a nested event; all events inside a matmul, a wait or batch preparation belong to it."""
    if around.kind not in (HOST, LOOPS):
        return around.kind, around.place
    if mark := marks.get(event["name"]):
        return mark.kind, mark.place
    args = event.get("args", {})
    if axis := args.get("axis"):
        return f"{WAIT if args['operator'] in WAITS else START}{axis}", around.place
    if event["name"] == DATA:
        return DATA, ""
    if event["name"] in OF_ATTENTION or event["name"] in OF_PRODUCTS:
        return ATTENTION if event["name"] in OF_ATTENTION else PRODUCTS, around.place
    return LOOPS if around.place else HOST, around.place


# ---- CPU: the host computes -----------------------------------------------------------------------------


def of_host(found: Spent, host: Iterable[Segment]) -> None:
    """Add a step on a CPU to `found`."""
    for begin, end, kind, place in host:
        add(found, kind, place, US * (end - begin))


def add(found: Spent, kind: str, place: str, ms: float) -> None:
    if kind.startswith(WAIT):
        found.exposed_ms[kind.removeprefix(WAIT)] += ms
    elif kind in COMPUTING:
        found.kinds[kind] += ms
        found.places[place] += ms
    elif kind == DATA:
        found.data_ms += ms
    else:
        found.host_ms += ms


# ---- CUDA: the device computes --------------------------------------------------------------------------


def of_device(found: Spent, duration: float, host: Sequence[Segment], launched: Iterable[tuple[float, Event]]) -> None:
    """Add a step of `duration` us on a GPU to `found`, from the kernels that were launched in it."""
    begins = [each.begin for each in host]
    busy, travelling = list[Span](), dict[str, list[Span]]()
    for at, kernel in launched:
        by = host[bisect_right(begins, at) - 1]
        span = kernel["ts"], kernel["ts"] + kernel["dur"]
        if by.kind.startswith((START, WAIT)):
            travelling.setdefault(by.kind.partition(" ")[2], []).append(span)
        elif "nccl" in kernel["name"].lower():
            travelling.setdefault("?", []).append(span)
        else:
            busy.append(span)
            add(found, by.kind if by.place else by_name(kernel["name"]), by.place, US * kernel["dur"])
    seen = covered(busy)
    for axis, spans in travelling.items():
        busy += spans
        found.exposed_ms[axis] += US * (covered(busy) - seen)
        seen = covered(busy)
    idle = max(0.0, US * (duration - seen))
    data = min(idle, sum(US * (s.end - s.begin) for s in host if s.kind == DATA))
    found.data_ms += data
    found.host_ms += idle - data


def by_name(kernel: str) -> str:
    """Return the kind of a kernel by its name, for kernels without a marked caller, such as those of a CUDA graph."""
    return next((kind for kind, pattern in BY_NAME if pattern.search(kernel.lower())), LOOPS)
