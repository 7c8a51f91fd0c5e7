"""What pipeline ranks send each other gets there as NCCL carries it: in turn between two ranks of a group, none ahead."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from compiler_trainer.step import turns as of_step
from compiler_trainer.step.turns import Carried, Post, Ways, turns_of_step
from passes.pipeline.tables import gpipe, interleaved, one_f_one_b, zbv, zero_bubble
from passes.pipeline.tasks import BACKWARD, FORWARD, INPUTS

TABLES = {
    "gpipe": gpipe(3, 5),
    "1f1b": one_f_one_b(4, 7),
    "interleaved": interleaved(2, 6, 2),
    "zero_bubble": zero_bubble(3, 6),
    "zbv": zbv(3, 7),
}


class Asked(NamedTuple):
    """A send or a receive that a rank asked for, after so many waits."""

    kind: str
    number: int
    waits: int


class Nccl:
    """What a rank asks of NCCL, by what runs in turn: the pair of ranks, in a group."""

    def __init__(self, rank):
        self.rank, self.asked, self.waits = rank, defaultdict(list), []

    def ask(self, kind, peer, group, number):
        line = group, *sorted((self.rank, peer))
        place = len(self.asked[line])
        self.asked[line].append(Asked(kind, number, len(self.waits)))
        return SimpleNamespace(wait=lambda: self.waits.append((line, place)))

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
    """What a task reads of other stages, and what it makes for them."""
    s, reads, makes = task.stage, [], []
    if task.kind == FORWARD:
        reads, makes = [f"a{s - 1}"] * (s > 0), [f"a{s}"] * (s < stages - 1)
    elif task.kind in (BACKWARD, INPUTS):
        reads, makes = [f"g{s + 1}"] * (s < stages - 1), [f"g{s}"] * (s > 0)
    node = SimpleNamespace(meta={"val": torch.empty(1)})
    return SimpleNamespace(inputs=ends("in", reads), outputs=ends("out", makes), placeholders=lambda: [node] * len(reads))


def asked_by(rank, table, ways, monkeypatch):
    """What a rank asks of NCCL in a step."""
    programs = {str(slot.task): program_of(slot.task, table.stages) for row in table.rows for slot in row}
    turns, nccl = turns_of_step(programs, table, table.microbatches), Nccl(rank)
    monkeypatch.setattr(of_step, "dist", nccl)
    post = Post(turns, programs, rank, rank, 1, torch.device("cpu"), ways)
    carried = Carried(turns, programs, [rank], post)
    carried.begin()
    for turn in (turn for turn in turns if turn.rank == rank):
        for given in programs[turn.program].inputs:
            carried.get(turn, given.name, rank, 1)
        for output in programs[turn.program].outputs:
            carried.put(turn, output.name, {rank: torch.empty(1)})
        carried.done(turn)
    carried.end()
    return nccl


def left_over(ranks):
    """What never gets there: a transfer runs once both sides have come to it, in their line and in their computation."""
    done, passed = defaultdict(int), [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for r, nccl in enumerate(ranks):
            for line, place in nccl.waits[passed[r] :]:
                if place >= done[line]:
                    break
                passed[r], moved = passed[r] + 1, True
        for line in {line for nccl in ranks for line in nccl.asked}:
            heads = [ranks[r].asked[line][done[line] :][:1] for r in line[1:]]
            if all(heads) and all(head[0].waits <= passed[r] for head, r in zip(heads, line[1:])):
                if heads[0][0].kind != heads[1][0].kind:
                    assert heads[0][0].number == heads[1][0].number, "ranks disagree on the order"
                    done[line], moved = done[line] + 1, True
    return sum(len(nccl.asked[line]) - done[line] for nccl in ranks for line in nccl.asked)


@pytest.mark.parametrize("schedule", TABLES)
def test_all_that_is_sent_gets_there(schedule, monkeypatch):
    table = TABLES[schedule]
    ranks = [asked_by(rank, table, Ways("up", "down"), monkeypatch) for rank in range(table.ranks)]
    assert left_over(ranks) == 0 and all(nccl.waits for nccl in ranks)


def test_one_group_both_ways_would_wait_for_ever(monkeypatch):
    """Room for the next forwards stands before the backward that the other rank waits for."""
    table = TABLES["1f1b"]
    ranks = [asked_by(rank, table, Ways("all", "all"), monkeypatch) for rank in range(table.ranks)]
    assert left_over(ranks) > 0


def test_connections_are_made_in_one_order(monkeypatch):
    """Each rank its own, of the pairs that send."""
    table, made = TABLES["zbv"], {}
    for rank in range(table.ranks):
        met = made.setdefault(rank, [])
        monkeypatch.setattr(Nccl, "send", lambda self, tensor, to, group, met=met: met.append((self.rank, to)))
        monkeypatch.setattr(Nccl, "recv", lambda self, tensor, source, group, met=met: met.append((source, self.rank)))
        asked_by(rank, table, Ways("up", "down"), monkeypatch)
    assert all(met == sorted(met) and met for met in made.values())
    sent = {pair for rank, met in made.items() for pair in met if pair[0] == rank}
    assert sent == {pair for rank, met in made.items() for pair in met if pair[1] == rank}
