"""On the first machine: decide which processes a job has, and which of them take part in each round."""

from __future__ import annotations

import itertools
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from compiler_trainer.elastic.machine import BEAT, CAME, ENDED, GONE, ORDERS, Came, Ended, Orders, exit_code
from compiler_trainer.elastic.member import (
    CAPACITY,
    COMING,
    ELASTIC,
    LEFT,
    LISTED,
    MESH,
    NEWEST,
    OUT,
    READY,
    TROUBLE,
    WAITING,
    WANTED,
)

SHAKEN_S = 60  # after a loss: other processes that crash in this time do so because of it
SILENCE_S, SILENCE_IN_TROUBLE_S = 4.0, 1.5  # after which a machine counts as lost
BEATS_S = 0.5
COMING_S = 600.0  # for all machines to come
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


class Rounds:
    """The processes of a job on `machines` machines; `poll` takes note of what happened.

    The processes end together, with the exit code of the first that fails. In a job of `run.elastic=true` a process
    that a signal kills is only left out, and so are those of a machine that is silent: the others are told that a round
    begins, with the list of those that are left. Up to `spares` new processes replace lost ones of machines that are
    there, and join when they are ready. So do as many others as the job has ranks replace processes that crash soon
    after another one was lost, as NCCL's do. A machine that comes later starts its processes, which join, too.
    """

    def __init__(self, store: dist.Store, machines: int, spares: int):
        self.store, self.expected, self.spares, self.code = store, machines, spares, 0
        self.numbers, self.left_out = itertools.count(), 0
        self.machines: dict[int, Came] = {}  # that are there, by number
        self.orders: dict[int, Orders] = {}  # by machine
        self.members: dict[int, int] = {}  # the machine of each process that is there
        self.listed: list[int] = []  # the processes of this round
        self.round, self.size = -1, 0
        self.wanted = ""  # the newest mesh that was asked for
        self.began, self.is_ending, self.is_over = time.monotonic(), False, False
        self.crashes_left, self.last_loss = 0, -math.inf
        self.beats: dict[int, tuple[bytes, float]] = {}  # the last one of each machine, and when it changed
        self.looked = 0.0

    def poll(self) -> None:
        """Take note of machines that came or are silent, of processes that ended, and of wishes; order what follows."""
        for message in popped(self.store, CAME):
            self.come(Came(*message))
        for message in popped(self.store, ENDED):
            self.ended(Ended(*message))
        if self.round < 0:
            self.begin_job()
        else:
            self.find_silent()
            self.go_on()
        self.is_over = self.is_over or self.round >= 0 and not self.members
        if self.is_over:
            for machine in self.machines:
                self.order(machine, lambda orders: orders._replace(code=self.code))

    # ---- machines --------------------------------------------------------------------------------------

    def come(self, came: Came) -> None:
        """Take note of a machine; refuse one that the job has no place for."""
        is_taken = came.node in (other.node for other in self.machines.values())
        if came.machines != self.expected or is_taken and self.round < 0:
            problem = f"has --node-rank={came.node}, as another one" if is_taken else f"has --nnodes={came.machines}"
            tell(f"error: machine {came.name} {problem}; the job has {self.expected} machines, counted from 0")
            self.order(came.machine, lambda orders: orders._replace(code=2))
            return
        self.machines[came.machine] = came
        self.beats[came.machine] = b"", time.monotonic()
        if self.round >= 0:
            tell(f"machine {came.name} has come, with {came.processes} processes")
            self.start(came.machine, came.processes)

    def has_followers(self) -> bool:
        """Return True while other machines have not read the exit code of a job that is over."""
        followers = [machine for machine, came in self.machines.items() if came.node]
        return not all(self.store.check([GONE.format(machine)]) for machine in followers)

    def begin_job(self) -> None:
        """Start the processes of all machines once all have come; end the job if some do not."""
        if len(self.machines) == self.expected:
            self.size = self.crashes_left = sum(came.processes for came in self.machines.values())
            for machine in sorted(self.machines, key=self.place_of_machine):
                self.start(machine, self.machines[machine].processes)
            self.begin_round([*self.members])
        elif time.monotonic() - self.began > COMING_S:
            fix = "start compiler-trainer launch on each, with the same --nnodes and --master-addr"
            tell(f"error: {len(self.machines)} of {self.expected} machines came within {COMING_S:.0f} s; {fix}")
            self.code, self.is_over = 1, True

    def start(self, machine: int, count: int) -> None:
        """Order new processes of a machine."""
        members = [*itertools.islice(self.numbers, count)]
        self.members |= dict.fromkeys(members, machine)
        self.order(machine, lambda orders: orders._replace(members=(*orders.members, *members), size=self.size))
        self.tell_capacity()

    def order(self, machine: int, change: Callable[[Orders], Orders]) -> None:
        """Change the orders of a machine."""
        old = self.orders.get(machine, Orders())
        self.orders[machine] = change(old)
        if self.orders[machine] != old:
            self.store.set(ORDERS.format(machine), json.dumps(self.orders[machine]))

    def find_silent(self) -> None:
        """Leave out the machines of which nothing has been heard for a while."""
        now = time.monotonic()
        if len(self.machines) < 2 or now < self.looked + BEATS_S:
            return
        paused, self.looked = now - self.looked > SILENCE_IN_TROUBLE_S and self.looked > 0, now
        is_in_trouble = self.store.check([TROUBLE.format(self.round)])
        for machine in [*self.machines]:
            key, (last, since) = BEAT.format(machine), self.beats[machine]
            beat = self.store.get(key) if self.store.check([key]) else b""
            if beat != last or paused:  # if this process was held up, the others may be well
                self.beats[machine] = beat, now
            elif now - since > (SILENCE_IN_TROUBLE_S if is_in_trouble else SILENCE_S):
                self.lose(machine)

    def lose(self, machine: int) -> None:
        """Leave out a machine; if it is heard of again, it ends its processes."""
        name, gone = self.machines.pop(machine).name, [n for n, where in self.members.items() if where == machine]
        self.order(machine, lambda orders: orders._replace(signal=signal.SIGKILL, code=1))
        for member in gone:
            del self.members[member]
        ranks = ", ".join(str(self.listed.index(member)) for member in gone if member in self.listed)
        self.last_loss, members = time.monotonic(), self.ready()
        tell(f"machine {name} is silent, and with it ranks {ranks}: {len(members)} are left")
        self.tell_capacity()
        if not self.store.check([ELASTIC]):
            self.fail(1)
        elif members:
            self.begin_round(members)

    def tell_capacity(self) -> None:
        """Tell those who ask for another mesh how many ranks there are GPUs for, if there are any."""
        if gpus := sum(came.gpus for came in self.machines.values()):
            self.store.set(CAPACITY, str(gpus - self.left_out))

    # ---- rounds ----------------------------------------------------------------------------------------

    def place_of_machine(self, machine: int) -> tuple[int, int]:
        """Return what machines are sorted by, so that the ranks of one follow each other: the engine's number first."""
        return self.machines[machine].node, machine

    def ready(self) -> list[int]:
        """Return the processes that are there and can take part in a round, machine by machine."""
        there = [n for n in self.members if n in self.listed or self.store.check([READY.format(n)])]
        return sorted(there, key=lambda n: (*self.place_of_machine(self.members[n]), n))

    def begin_round(self, members: Sequence[int]) -> None:
        """Begin a round of the given processes."""
        self.listed, self.round = list(members), self.round + 1
        if set(self.members) - set(members):
            self.store.set(COMING.format(self.round), "")
        if self.wanted:
            self.store.set(MESH.format(self.round), self.wanted)
        self.store.set(LISTED.format(self.round), json.dumps([(n, self.members[n]) for n in members]))
        self.store.set(NEWEST, str(self.round))

    def go_on(self) -> None:
        """Begin a round when the ranks left the last one for it, or none of them is there any more."""
        if self.store.check([WANTED]) and (wanted := self.store.get(WANTED).decode()) != self.wanted:
            self.resize(wanted)
        is_empty = not set(self.listed) & set(self.members)
        if (is_empty or self.store.check([LEFT.format(self.round)])) and (members := self.ready()):
            self.begin_round(members)

    def resize(self, wanted: str) -> None:
        """Start the processes that a wanted mesh lacks, for which ranks leave the round, or let them leave it now."""
        self.wanted, missing = wanted, json.loads(wanted)["ranks"] - len(self.members)
        for _ in range(missing):
            self.start(min(self.machines, key=self.load), 1)
        if missing <= 0:
            self.store.set(WAITING.format(self.round), "")

    def load(self, machine: int) -> tuple[int, int]:
        """Return what a machine's place for a further process is chosen by: the processes above its GPUs, then all."""
        count = sum(where == machine for where in self.members.values())
        return count - self.machines[machine].gpus, count

    def ended(self, ended: Ended) -> None:
        """Take note of a process that ended: leave it out and start another one, or end the others if it failed."""
        if self.members.pop(ended.member, None) is None:
            return  # of a machine that was lost
        is_going_on = not (ended.is_stopping or self.is_ending) and self.store.check([ELASTIC])
        if (ended.code < 0 or ended.is_out) and is_going_on:
            if ended.is_out:
                self.left_out += 1
                self.tell_capacity()
            elif self.is_replaced(-ended.code):
                self.start(ended.machine, 1)
            members = self.ready()
            self.tell_loss(ended, len(members))
            if members:
                self.begin_round(members)
            if self.members:
                return
        if ended.code and not self.code:
            self.fail(exit_code(ended.code))

    def fail(self, code: int) -> None:
        """End all processes, after they have saved, with an exit code."""
        self.code, self.is_ending = code, True
        for machine in self.machines:
            self.order(machine, lambda orders: orders._replace(signal=signal.SIGTERM))

    def is_replaced(self, number: int) -> bool:
        """Return True if another process replaces one that a signal ended."""
        last, self.last_loss = self.last_loss, time.monotonic()
        if number in CRASHES and self.last_loss - last < SHAKEN_S and self.crashes_left:
            self.crashes_left -= 1
            return True
        self.spares -= 1
        return self.spares >= 0

    def tell_loss(self, ended: Ended, left: int) -> None:
        """Print that a process is gone, and how many are left."""
        member = ended.member
        name = f"rank {self.listed.index(member)}" if member in self.listed else "a process that was starting"
        if ended.is_out:
            reason = self.store.get(OUT.format(member)).decode()
            tell(f"{name} is left out ({reason}): {left} are left")
            return
        further = ", and another one starts" if len(self.members) > left else ""
        tell(f"{name} is gone ({signal.Signals(-ended.code).name}): {left} are left{further}")


def popped(store: dist.Store, queue: str) -> Iterator[list]:
    """Yield the messages of a queue of the store, until it is empty."""
    while store.queue_len(queue):
        yield json.loads(store.queue_pop(queue))


def tell(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)
