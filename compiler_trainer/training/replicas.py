"""Compare the copies of parameters, moments and buffers that ranks hold; a flipped bit would otherwise go unnoticed.

Each rank sums the bits of its state. One sum of all tensors with the same axes is gathered first. Only if copies differ
are sums per tensor gathered, which identify the tensor and the rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiler_trainer.config.errors import RunError
from compiler_trainer.config.schema import Config
from compiler_trainer.step.step import Step
from compiler_trainer.training.progress import announce
from compiler_trainer.training.stop import how_to_go_on
from passes.program.mesh import Mesh
from passes.program.spec import Spec

SHOWN = 4
WORD_BYTES = 8


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies differ; `right` are the ranks of the majority, empty if there is none."""

    name: str
    right: tuple[int, ...]
    wrong: tuple[int, ...]

    def __str__(self) -> str:
        if not self.right:
            return f"{self.name} is not the same on ranks {listed(self.wrong)}, and no majority tells which is right"
        return f"{self.name} on {named(self.wrong)} is not what it is on {named(self.right)}"


class Replicas:
    """The periodic comparison of copies, which stops the run or repairs it as `train.replica_check` says."""

    def __init__(self, cfg: Config, step: Step):
        self.cfg, self.step = cfg, step
        self.is_on = cfg.train.replica_check.interval is not None and step.runtime.mesh.world_size > 1

    def check(self, number: int) -> None:
        """Compare copies after step `number`; raise RunError if they differ and are not repaired."""
        found = differences(self.step) if self.is_on else []
        if not found:
            return
        said = "; ".join(map(str, found[:SHOWN])) + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
        if self.cfg.train.replica_check.action == "repair" and all(each.right for each in found):
            repair(self.step, found)
            announce(f"after step {number}: {said}; repaired")
            return
        what = f"{said} after step {number} (train.replica_check.action={self.cfg.train.replica_check.action})"
        raise RunError(f"{what}; the last checkpoint is from before, go on with: {how_to_go_on(self.cfg.run.dir)}")


class Copies(NamedTuple):
    """A key of the ranks that hold copies of a tensor.

    They are ranks of some pipeline stages, with equal coordinates on the axes `apart`.
    """

    apart: tuple[str, ...]
    stages: tuple[int, ...]


def differences(step: Step) -> list[Difference]:
    """Return the tensors whose copies differ between ranks; every rank must call this."""
    state = {name: held for name, held in step.state.items() if not name.startswith("gradient.")}
    of = [Copies(axes_of(held.spec, step.mesh), held.stages) for held in state.values()]
    kinds = sorted(set(of))
    factors = torch.arange(1, 2 * len(of), 2, device=step.device)  # odd, so that multiplying modulo 2^64 loses no bit
    sums = {r: torch.stack([sum_of(held.local.get(r), step.device) for held in state.values()]) for r in step.ranks}
    members = [torch.tensor([each == kind for each in of], device=step.device) for kind in kinds]
    joint = {r: torch.stack([(factors * sums[r])[which].sum() for which in members]) for r in step.ranks}
    if not any(differing(kinds, step.runtime.all_locals(joint), step)):
        return []
    names = list(state)
    return [judged(names[number], values) for number, values in differing(of, step.runtime.all_locals(sums), step)]


def differing(of: list[Copies], by_rank: list[Tensor], step: Step) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield (column, its value by rank) for each group of copies whose values differ."""
    rows = [row.tolist() for row in by_rank]
    places = [step.mesh.coordinates(rank) for rank in range(len(rows))]
    for number, (axes, stages) in enumerate(of):
        copies: dict[tuple[int, ...], dict[int, int]] = {}
        for rank, place in enumerate(places):
            if step.runtime.stage_of(rank) in stages:
                copies.setdefault(tuple(place[axis] for axis in axes), {})[rank] = rows[rank][number]
        yield from ((number, values) for values in copies.values() if len(set(values.values())) > 1)


def judged(name: str, values: dict[int, int]) -> Difference:
    """Return the difference, with the ranks that hold the most frequent value as `right` if they are a majority."""
    (value, count), *_ = Counter(values.values()).most_common()
    if 2 * count <= len(values):
        return Difference(name, (), tuple(values))
    right = tuple(rank for rank, found in values.items() if found == value)
    return Difference(name, right, tuple(rank for rank in values if rank not in right))


def repair(step: Step, found: list[Difference]) -> None:
    """Overwrite wrong copies with a right one; every rank must call this."""
    for each in found:
        held = step.state[each.name]
        step.runtime.send(held.local, each.right[0], each.wrong, held.like)


def axes_of(spec: Spec, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of the mesh on which ranks hold different parts of a tensor."""
    sharded = {axis for name in spec.sharded for axis in mesh.over(name)}
    return tuple(axis for axis in mesh.axes if axis in sharded or spec.state(axis) != "invariant")


def sum_of(local: Tensor | None, device: torch.device) -> Tensor:
    """Return the sum of a tensor's bits as 64-bit words, modulo 2^64, or 0 for None.

    Every single flipped bit changes it.
    """
    if local is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    flat = local.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % WORD_BYTES:
        flat = flat.clone()
    whole = len(flat) // WORD_BYTES * WORD_BYTES
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)


def named(numbers: tuple[int, ...]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {listed(numbers)}"


def listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
