"""The timeline of a step on one rank: kernels in order on its compute stream, collectives on one stream an axis.

A collective starts when what was issued before it is done and its axis is free; a wait holds the compute stream until
its collective is done, and what it is held counts as exposed on that axis. While kernels and collectives run beside
each other both are slower (`cluster.Beside`). The host launches one thing after another; nothing starts before that.
Where the host is the device it launches nothing while it computes or waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from passes.cost.cluster import Beside
from passes.cost.fusion import Kernel
from passes.program.operators import axis_of

COMPUTE = "compute"
NOTHING_S = 1e-15  # what rounding leaves of a collective that is done


@dataclass(frozen=True)
class Cost:
    """The seconds that a kernel or a collective takes alone, and whether memory limits it, not arithmetic."""

    seconds: float
    is_moving: bool = True


@dataclass(frozen=True)
class Event:
    """One kernel or collective on the timeline: its stream is `compute` or an axis."""

    node: str
    stream: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step on one rank: how long; of that how much computing, `slowed_s` of it beside collectives more than alone.

    How long each axis kept it waiting, and how long it had nothing launched.
    """

    step_s: float
    compute_s: float
    slowed_s: float
    exposed_s: Mapping[str, float]
    launch_s: float
    events: tuple[Event, ...]


@dataclass(eq=False)
class Flight:
    """A collective on its way, and the seconds of it that are left."""

    kernel: Kernel
    axis: str
    left_s: float
    start_s: float | None = None
    done: bool = False


@dataclass
class Clock:
    """The streams of a rank at one moment; on each axis the first collective travels and the others queue."""

    beside: Beside
    now: float = 0.0
    queues: dict[str, deque[Flight]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def issue(self, flight: Flight) -> None:
        """Put a collective at the end of its axis."""
        self.queues.setdefault(flight.axis, deque()).append(flight)

    def first(self) -> list[Flight]:
        """The collectives that travel now."""
        return [queue[0] for queue in self.queues.values() if queue]

    def advance(self, step_s: float, speed: float) -> None:
        """Let time pass, no more than until the first collective is done."""
        travelling = self.first()
        for flight in travelling:
            if flight.start_s is None:
                flight.start_s = self.now
            flight.left_s -= step_s * speed
        self.now += step_s
        for flight in travelling:
            if flight.left_s <= NOTHING_S:
                flight.done = True
                self.queues[flight.axis].popleft()
                name = flight.kernel.nodes[-1].name
                self.events.append(Event(name, flight.axis, flight.start_s or 0.0, self.now))

    def compute(self, cost: Cost, name: str) -> float:
        """Run a kernel; the seconds that it took."""
        began, left_s = self.now, cost.seconds
        while left_s > NOTHING_S:
            travelling = self.first()
            speed = (self.beside.moving if cost.is_moving else self.beside.computing) if travelling else 1.0
            ends = [flight.left_s / self.beside.sending for flight in travelling]
            step_s = min([left_s / speed, *ends])
            self.advance(step_s, self.beside.sending)
            left_s -= step_s * speed
        self.events.append(Event(name, COMPUTE, began, self.now))
        return self.now - began

    def idle(self, until: Callable[[], bool], at: float = float("inf")) -> float:
        """Compute nothing until something holds, or the time `at`; the seconds that passed."""
        began = self.now
        while not until() and self.now < at:
            step_s = min([at - self.now, *(flight.left_s for flight in self.first())])
            self.advance(step_s, 1.0)
        return self.now - began


def play(
    kernels: Iterable[Kernel],
    cost: Callable[[Kernel], Cost],
    beside: Beside,
    launch_s: Callable[[Kernel], float],
    host_computes: bool = False,
) -> Timeline:
    """Let the kernels run in the given order, each on its stream."""
    clock, flights = Clock(beside), dict[Kernel, Flight]()
    exposed: Counter[str] = Counter()
    computing = alone = launching = host_s = 0.0
    for kernel in kernels:
        if kernel.kind == "wait":
            flight = next(flights[k] for k in kernel.after if k in flights)
            exposed[flight.axis] += clock.idle(lambda flight=flight: flight.done)  # type: ignore[assignment, misc]
            continue
        host_s = (clock.now if host_computes else host_s) + launch_s(kernel)
        if host_s > clock.now:
            launching += clock.idle(lambda: False, at=host_s)
        took = cost(kernel)
        if kernel.kind == "collective":
            flights[kernel] = Flight(kernel, str(axis_of(kernel.nodes[0])), took.seconds)
            clock.issue(flights[kernel])
        else:
            alone += took.seconds
            computing += clock.compute(took, kernel.nodes[-1].name)
    clock.idle(lambda: not clock.first())
    events = tuple(sorted(clock.events, key=lambda event: (event.start_s, event.end_s)))
    return Timeline(clock.now, computing, computing - alone, dict(exposed), launching, events)


def longest(timeline: Timeline, count: int) -> list[Event]:
    """The kernels and collectives that take longest."""
    return sorted(timeline.events, key=lambda event: event.start_s - event.end_s)[:count]
