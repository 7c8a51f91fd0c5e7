"""Messages of pipeline ranks arrive under NCCL's rules, even if ranks wait for their whole device at any time."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import fx

from compiler_trainer.planning.simulate import in_flight
from compiler_trainer.step import messages as of_step
from compiler_trainer.step.messages import Post, Timetable, Ways, messages
from compiler_trainer.step.turns import CarriedValues, turns_of_step
from passes.ir import ir
from passes.ir.task import BACKWARD, FORWARD, INPUTS
from passes.pipeline.schedules import Slot, auto, gpipe, interleaved, one_f_one_b, play, zbv, zero_bubble

TABLES = {
    "gpipe": gpipe(3, 5),
    "1f1b": one_f_one_b(4, 7),
    "1f1b of two": one_f_one_b(2, 8),
    "interleaved": interleaved(2, 6, 2),
    "interleaved, uneven": interleaved(3, 8, 3),
    "zero_bubble": zero_bubble(3, 6),
    "zbv": zbv(3, 7),
    "zbv of six": zbv(6, 12),
    "auto": auto(4, 8),
}


class Asked(NamedTuple):
    """A send or receive requested by a rank after some waits of its stream and of its host."""

    kind: str
    number: int
    waits: int
    host_waits: int


class Nccl:
    """The requests of a rank to NCCL, by the queue in which they run: the pair of ranks, in a group.

    A wait of the host is for the whole device: all earlier requests are done when it ends.
    """

    def __init__(self, rank):
        self.rank, self.asked, self.waits, self.host_waits = rank, defaultdict(list), [], []

    def ask(self, kind, peer, group, number):
        line = group, *sorted((self.rank, peer))
        place = len(self.asked[line])
        self.asked[line].append(Asked(kind, number, len(self.waits), len(self.host_waits)))
        return SimpleNamespace(wait=lambda: self.waits.append((line, place)))

    def wait_for_device(self):
        self.host_waits.append(({line: len(operations) for line, operations in self.asked.items()}, len(self.waits)))

    def isend(self, tensor, to, group, tag):
        return self.ask("send", to, group, tag)

    def irecv(self, tensor, source, group, tag):
        return self.ask("receive", source, group, tag)

    def send(self, tensor, to, group):
        """Connections are made before."""

    recv = send


def ends(kind, names):
    return [SimpleNamespace(kind="carried", name=name) for name in names]


def program_of(task, stages):
    """Return the program of a task, with the values that it reads from and makes for other stages."""
    s, reads, makes = task.stage, [], []
    if task.kind == FORWARD:
        reads, makes = [f"a{s - 1}"] * (s > 0), [f"a{s}"] * (s < stages - 1)
    elif task.kind in (BACKWARD, INPUTS):
        reads, makes = [f"g{s + 1}"] * (s < stages - 1), [f"g{s}"] * (s > 0)
    node = fx.Graph().placeholder("value")
    ir.set_value(node, torch.empty(1))
    return SimpleNamespace(
        inputs=ends("in", reads), outputs=ends("out", makes), placeholders=lambda: [node] * len(reads)
    )


def asked_by(rank, table, ways, monkeypatch, waits_for_device=False):
    """Return the NCCL requests of a rank in a step; with waits, at any point of a turn."""
    programs = {str(slot.task): program_of(slot.task, table.stages) for row in table.rows for slot in row}
    turns, nccl = turns_of_step(programs, table, table.microbatches), Nccl(rank)
    monkeypatch.setattr(of_step, "dist", nccl)
    post = Post(turns, programs, rank, rank, 1, torch.device("cpu"), ways)
    carried = CarriedValues(turns, programs, [rank], post)
    wait = nccl.wait_for_device if waits_for_device else lambda: None
    carried.begin()
    for turn in (turn for turn in turns if turn.rank == rank):
        carried.start(turn)
        wait()  # to allocate buffers, to pin the batch
        for input_ in programs[turn.program].inputs:
            carried.get(turn, input_.name, rank, 1)
        wait()  # to tune kernels
        for output in programs[turn.program].outputs:
            carried.put(turn, output.name, {rank: torch.empty(1)})
        wait()
        carried.done(turn)
        wait()
    carried.end()
    return nccl


def in_memory_of_post(rank, table, programs, monkeypatch):
    """Return, for each turn of a rank, the receive buffers and the sent tensors in `Post`, once its inputs are taken.

    Sent tensors that turns of the rank itself read are left out.
    """
    turns = turns_of_step(programs, table, table.microbatches)
    monkeypatch.setattr(of_step, "dist", Nccl(rank))
    post = Post(turns, programs, rank, rank, 1, torch.device("cpu"), Ways("up", "down"))
    carried, counts = CarriedValues(turns, programs, [rank], post), []
    carried.begin()
    for turn in (turn for turn in turns if turn.rank == rank):
        carried.start(turn)
        for end in programs[turn.program].inputs:
            carried.get(turn, end.name, rank, 1)
        expected = {message.key for message, _ in post.next_buffers} | post.receive_buffers.keys()
        counts.append((turn, (len(expected), len({message.key for message in post.sends_in_flight} - carried.values.keys()))))
        for output in programs[turn.program].outputs:
            carried.put(turn, output.name, {rank: torch.empty(1)})
        carried.done(turn)
    return counts


def left_over(ranks):
    """Return the number of transfers that never run.

    A transfer runs once both sides have reached it, in queue, stream and host.
    """
    done, passed, host = defaultdict(int), [0] * len(ranks), [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for r, nccl in enumerate(ranks):
            for counts, waits in nccl.host_waits[host[r] :]:
                if passed[r] < waits or any(done[line] < count for line, count in counts.items()):
                    break
                host[r], moved = host[r] + 1, True
            for line, place in nccl.waits[passed[r] :]:
                if place >= done[line]:
                    break
                passed[r], moved = passed[r] + 1, True
        for line in {line for nccl in ranks for line in nccl.asked}:
            heads = [ranks[r].asked[line][done[line] :][:1] for r in line[1:]]
            if all(heads) and all(
                h[0].waits <= passed[r] and h[0].host_waits <= host[r] for h, r in zip(heads, line[1:])
            ):
                if heads[0][0].kind != heads[1][0].kind:
                    assert heads[0][0].number == heads[1][0].number, "ranks disagree on the order"
                    done[line], moved = done[line] + 1, True
    return sum(len(nccl.asked[line]) - done[line] for nccl in ranks for line in nccl.asked)


@pytest.mark.parametrize("schedule", TABLES)
def test_all_that_is_sent_gets_there(schedule, monkeypatch):
    table = TABLES[schedule]
    ranks = [asked_by(rank, table, Ways("up", "down"), monkeypatch) for rank in range(table.ranks)]
    assert left_over(ranks) == 0 and all(nccl.waits for nccl in ranks)


@pytest.mark.parametrize("schedule", TABLES)
def test_a_dry_run_counts_the_messages_that_are_in_memory(schedule, monkeypatch):
    table = TABLES[schedule]
    programs = {str(slot.task): program_of(slot.task, table.stages) for row in table.rows for slot in row}
    size = {end.name: 1 for program in programs.values() for end in program.outputs}
    turns = turns_of_step(programs, table, table.microbatches)
    most = 0
    for rank in range(table.ranks):
        counted = in_memory_of_post(rank, table, programs, monkeypatch)
        assert list(in_flight(turns, programs, rank, size)) == counted
        most = max(most, *(receives + sends for _, (receives, sends) in counted))
    assert 0 < most < table.microbatches * table.stages


@pytest.mark.parametrize("schedule", TABLES)
def test_waits_for_the_whole_device_are_harmless(schedule, monkeypatch):
    """First launches tune kernels, and the allocator and pinning wait, in the middle of a step."""
    table = TABLES[schedule]
    ranks = [asked_by(rank, table, Ways("up", "down"), monkeypatch, True) for rank in range(table.ranks)]
    assert left_over(ranks) == 0 and all(nccl.host_waits for nccl in ranks)


def test_receives_posted_too_early_would_wait_for_ever(monkeypatch):
    """A fixed number of messages ahead hung on two H100 ranks."""
    table = TABLES["1f1b of two"]

    class Hasty(Timetable):
        def __init__(self, turns, programs, rank):
            super().__init__(turns, programs, rank)
            self.receives = defaultdict(list, {0: [m for m in messages(turns, programs) if m.to == rank]})

    monkeypatch.setattr(of_step, "Timetable", Hasty)
    for waits_for_device in (False, True):
        ranks = [
            asked_by(rank, table, Ways("up", "down"), monkeypatch, waits_for_device) for rank in range(table.ranks)
        ]
        assert bool(left_over(ranks)) == waits_for_device


@pytest.mark.parametrize("schedule", TABLES)
def test_receives_are_posted_before_what_can_hide_them_and_sent_tensors_are_freed(schedule):
    """With 1F1B, a rank keeps as many sent tensors as there are ranks, for any number of microbatches."""
    table = TABLES[schedule]
    programs = {str(slot.task): program_of(slot.task, table.stages) for row in table.rows for slot in row}
    turns, spans = turns_of_step(programs, table, table.microbatches), play(table).spans
    ends = {turn: spans[Slot(turn.task, turn.microbatch)][1] for turn in turns}
    maker = {(o.name, turn.microbatch): turn for turn in turns for o in programs[turn.program].outputs}
    hidden = 0
    for rank in range(table.ranks):
        timetable = Timetable(turns, programs, rank)
        turns_here = [turn for turn in turns if turn.rank == rank]
        posted = {m: number for number, due in timetable.receives.items() for m in due}
        assert posted.keys() == {m for m in messages(turns, programs) if m.to == rank}
        for message, number in posted.items():
            read = next(n for n, t in enumerate(turns_here) if message.key in reads_of(t, programs))
            hides = [n for n in range(read) if ends[turns_here[n]] > ends[maker[message.key]]]
            assert number <= min([read, *hides])
            hidden += bool(hides)
        proven = [m for arrived in timetable.arrived.values() for m in arrived]
        sent = {m for of_key in timetable.sends.values() for m in of_key}
        assert len(proven) == len(set(proven)) and set(proven) <= sent
        if schedule.startswith("1f1b"):
            assert most_kept(timetable, turns_here, programs) <= 1 + table.ranks
    assert hidden or schedule == "gpipe"  # where each value is read immediately


def reads_of(turn, programs):
    return {(input_.name, turn.microbatch) for input_ in programs[turn.program].inputs}


def most_kept(timetable, turns_here, programs):
    """Return the largest number of sent tensors that a rank keeps."""
    count = most = 0
    for number, turn in enumerate(turns_here):
        for output in programs[turn.program].outputs:
            count += len(timetable.sends.get((output.name, turn.microbatch), ()))
        most = max(most, count)
        count -= len(timetable.arrived.get(number, ()))
    return most


@pytest.mark.parametrize("schedule", TABLES)
def test_one_group_both_ways_is_slower_but_does_not_hang(schedule, monkeypatch):
    """Two ranks request their messages in one order, so NCCL could run both directions in turn."""
    table = TABLES[schedule]
    ranks = [asked_by(rank, table, Ways("all", "all"), monkeypatch, True) for rank in range(table.ranks)]
    assert left_over(ranks) == 0


def test_connections_are_made_in_one_order(monkeypatch):
    """Each rank connects its own pairs that send."""
    table, made = TABLES["zbv"], {}
    for rank in range(table.ranks):
        met = made.setdefault(rank, [])
        monkeypatch.setattr(Nccl, "send", lambda self, tensor, to, group, met=met: met.append((self.rank, to)))
        monkeypatch.setattr(Nccl, "recv", lambda self, tensor, source, group, met=met: met.append((source, self.rank)))
        asked_by(rank, table, Ways("up", "down"), monkeypatch)
    assert all(met == sorted(met) and met for met in made.values())
    sent = {pair for rank, met in made.items() for pair in met if pair[0] == rank}
    assert sent == {pair for rank, met in made.items() for pair in met if pair[1] == rank}
