"""Compare the copies that ranks hold of parameters, moments and buffers: a bit that flips in one goes unnoticed else.

Each rank sums the bits of its state. One sum for all tensors that lie over the same axes is gathered; only where ranks
that should hold copies have others, a sum a tensor, which tells the tensor and the rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

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
    """A tensor of which ranks hold other bits; those of most ranks are `right`, of none where there is no majority."""

    name: str
    right: tuple[int, ...]
    wrong: tuple[int, ...]

    def __str__(self) -> str:
        if not self.right:
            return f"{self.name} is not the same on ranks {listed(self.wrong)}, and no majority tells which is right"
        return f"{self.name} on {named(self.wrong)} is not what it is on {named(self.right)}"


class Replicas:
    """Compares copies of a run's state now and then, and stops or repairs it as `train.replica_check` says."""

    def __init__(self, cfg: Config, step: Step):
        self.cfg, self.step = cfg, step
        self.is_on = cfg.train.replica_check.interval is not None and step.mesh.world_size > 1

    def check(self, number: int) -> None:
        """Compare after step `number`; raises RunError where copies differ and are not repaired."""
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


def differences(step: Step) -> list[Difference]:
    """The tensors of which ranks that should hold copies do not; every rank must call it."""
    tensors = step.tensors()
    axes = [axes_of(spec, step.mesh) for spec, _ in tensors.values()]
    kinds = sorted(set(axes))
    factors = torch.arange(1, 2 * len(axes), 2, device=step.device)  # odd: no bit is lost in a product
    sums = {r: torch.stack([sum_of(local[r]) for _, local in tensors.values()]) for r in step.ranks}
    members = [torch.tensor([of == kind for of in axes], device=step.device) for kind in kinds]
    joint = {r: torch.stack([(factors * sums[r])[of].sum() for of in members]) for r in step.ranks}
    if not any(differing(kinds, step.runtime.all_locals(joint), step.mesh)):
        return []
    names = list(tensors)
    found = differing(axes, step.runtime.all_locals(sums), step.mesh)
    return [judged(names[number], values) for number, values in found]


def differing(axes: list[tuple[str, ...]], by_rank: list[Tensor], mesh: Mesh) -> Iterator[tuple[int, dict[int, int]]]:
    """(column, its value by rank) wherever ranks differ that are in the same place on the axes of a column."""
    rows = [row.tolist() for row in by_rank]
    places = list(mesh)
    for number, of in enumerate(axes):
        copies: dict[tuple[int, ...], dict[int, int]] = {}
        for rank, place in enumerate(places):
            copies.setdefault(tuple(place[axis] for axis in of), {})[rank] = rows[rank][number]
        yield from ((number, values) for values in copies.values() if len(set(values.values())) > 1)


def judged(name: str, values: dict[int, int]) -> Difference:
    """Which of the ranks hold what most of them do."""
    (value, count), *_ = Counter(values.values()).most_common()
    if 2 * count <= len(values):
        return Difference(name, (), tuple(values))
    right = tuple(rank for rank, found in values.items() if found == value)
    return Difference(name, right, tuple(rank for rank in values if rank not in right))


def repair(step: Step, found: list[Difference]) -> None:
    """Give wrong ranks what a right one holds; every rank must call it."""
    tensors = step.tensors()
    for each in found:
        _, local = tensors[each.name]
        step.runtime.send(local, each.right[0], each.wrong)


def axes_of(spec: Spec, mesh: Mesh) -> tuple[str, ...]:
    """The axes of the mesh on which ranks hold something else of a tensor."""
    sharded = {axis for name in spec.sharded for axis in mesh.over(name)}
    return tuple(axis for axis in mesh.axes if axis in sharded or spec.state(axis) != "same")


def sum_of(local: Tensor) -> Tensor:
    """The sum of a tensor's bits in words of 64, modulo 2^64: no single bit can change without it."""
    flat = local.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % WORD_BYTES:
        flat = flat.clone()
    whole = len(flat) // WORD_BYTES * WORD_BYTES
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)


def named(numbers: tuple[int, ...]) -> str:
    """`rank 3`, or `ranks 0, 1`."""
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {listed(numbers)}"


def listed(numbers: tuple[int, ...]) -> str:
    """The first of some ranks."""
    return ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
