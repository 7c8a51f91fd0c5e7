"""Choose the calls of a program that are recorded together: all except those that read the host, and their transfers.

    start of a gather | layer 0 | its wait, layer 1 | layer 2, which reads the host | layer 3 | head | update ...
    recorded                                        | not                           | recorded

A recording neither begins nor ends between a start and its wait: a replay would not know of a transfer that was started
outside of it, nor the host of a transfer that a replay started. So calls between which a transfer is in flight form a
block, and a block is left out if one of its calls reads the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from torch import fx

from passes.communication.node_order import in_flight
from passes.ir import ir
from passes.ir.bodies import body_of_call, flatten
from passes.lower.calls import steps_of
from passes.lower.host_reads import Break, find_breaks
from passes.ops.host import there

SHOWN = 3  # most nodes that a message names


class Run(NamedTuple):
    """Consecutive calls of a program, from `first` to before `last`, and whether they are recorded."""

    recorded: bool
    first: int
    last: int


def runs_of(program: ir.Program) -> list[Run]:
    """Return the calls of a compiled program as runs, recorded and not."""
    steps = steps_of(program)
    at = {name: i for i, step in enumerate(steps) for name in names_in(step)}
    hosts = {at[obstacle.node.name] for obstacle in find_breaks(program)}
    inside = {i for start, wait in transfers(flatten(program).graph) for i in range(at[start.name], at[wait.name])}
    blocks = [list(block) for block in without_cuts(len(steps), inside)]
    runs = []
    for recorded, run in groupby(blocks, lambda block: hosts.isdisjoint(block)):
        first, *_, last = [i for block in run for i in (block[0], block[-1])]
        runs.append(Run(recorded, first, last + 1))
    return runs


def names_in(step: fx.Node) -> Sequence[str]:
    """Return the names of the nodes of the flat program that a step stands for."""
    return [node.name for node in ir.record(step).body_nodes] if body_of_call(step) else [step.name]


def transfers(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each start with its wait: of collectives, and of copies from and to the host."""
    yield from in_flight(graph.nodes)
    yield from ((node.args[0], node) for node in graph.nodes if node.target is there)  # type: ignore[misc]


def without_cuts(count: int, inside: set[int]) -> Iterator[list[int]]:
    """Yield `count` steps in blocks that must not be cut: after the steps `inside`, a transfer is in flight."""
    block = []
    for i in range(count):
        block.append(i)
        if i not in inside:
            yield block
            block = []


def describe_recordings(programs: Mapping[str, ir.Program], compiled: bool) -> list[str]:
    """Return sentences that say which parts of programs are recorded, and name the nodes that are not, with reasons."""
    obstacles = {name: find_breaks(program, compiled) for name, program in programs.items()}
    parts = [describe_part(name, programs[name], compiled, nodes) for name, nodes in obstacles.items() if nodes]
    recorded = [name for name, nodes in obstacles.items() if not nodes]
    return [*parts, *([f"{', '.join(recorded)} {'is' if len(recorded) == 1 else 'are'} recorded"] if recorded else [])]


def describe_part(name: str, program: ir.Program, compiled: bool, obstacles: Sequence[Break]) -> str:
    """Return the sentence for a program of which some nodes cannot be recorded."""
    runs = runs_of(program) if compiled else []
    count, recorded = sum(run.last - run.first for run in runs), sum(r.last - r.first for r in runs if r.recorded)
    part = f"{recorded} of {count} calls of {name} are recorded" if recorded else f"{name} is not recorded"
    return f"{part}: {list_obstacles(obstacles)}"


def list_obstacles(obstacles: Sequence[Break]) -> str:
    """Return the first nodes that cannot be recorded, and the number of the others."""
    rest_text = f"; and {len(obstacles) - SHOWN} more" if len(obstacles) > SHOWN else ""
    return "; ".join(map(str, obstacles[:SHOWN])) + rest_text
