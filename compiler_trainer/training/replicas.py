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
            return f"{self.name} differs between ranks {list_ranks(self.wrong)}, and no majority shows which is right"
        return f"{self.name} on {rank_names(self.wrong)} differs from its copy on {rank_names(self.right)}"


class Replicas:
    """The periodic comparison of copies, which stops the run or repairs it as `train.replica_check` says."""

    def __init__(self, cfg: Config, step: Step):
        self.cfg, self.step = cfg, step
        self.is_on = cfg.train.replica_check.interval is not None and step.runtime.mesh.world_size > 1

    def check(self, number: int) -> None:
        """Compare copies after step `number`; raise RunError if they differ and are not repaired."""
        differing = differences(self.step) if self.is_on else []
        if not differing:
            return
        text = "; ".join(map(str, differing[:SHOWN])) + (
            f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        )
        if self.cfg.train.replica_check.action == "repair" and all(d.right for d in differing):
            repair(self.step, differing)
            announce(f"after step {number}: {text}; repaired")
            return
        problem = f"{text} after step {number} (train.replica_check.action={self.cfg.train.replica_check.action})"
        raise RunError(
            f"{problem}; the last checkpoint was saved before, resume with: {how_to_go_on(self.cfg.run.dir)}"
        )


class Copies(NamedTuple):
    """A key of the ranks that hold copies of a tensor.

    They are ranks of some pipeline stages, with equal coordinates on the axes `apart`.
    """

    apart: tuple[str, ...]
    stages: tuple[int, ...]


def differences(step: Step) -> list[Difference]:
    """Return the tensors whose copies differ between ranks; every rank must call this."""
    state = {name: entry for name, entry in step.state.items() if not name.startswith("gradient.")}
    keys = [Copies(axes_of(entry.spec, step.mesh), entry.stages) for entry in state.values()]
    kinds = sorted(set(keys))
    factors = torch.arange(1, 2 * len(keys), 2, device=step.device)  # odd, so that multiplying modulo 2^64 loses no bit
    sums = {r: torch.stack([bit_sum(entry.local.get(r), step.device) for entry in state.values()]) for r in step.ranks}
    members = [torch.tensor([key == kind for key in keys], device=step.device) for kind in kinds]
    joint = {r: torch.stack([(factors * sums[r])[which].sum() for which in members]) for r in step.ranks}
    if not any(compare_copies(kinds, step.runtime.all_locals(joint), step)):
        return []
    names = list(state)
    return [
        judge(names[number], values) for number, values in compare_copies(keys, step.runtime.all_locals(sums), step)
    ]


def compare_copies(keys: list[Copies], by_rank: list[Tensor], step: Step) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield (column, its value by rank) for each group of copies whose values differ."""
    rows = [row.tolist() for row in by_rank]
    places = [step.mesh.coordinates(rank) for rank in range(len(rows))]
    for number, (axes, stages) in enumerate(keys):
        copies: dict[tuple[int, ...], dict[int, int]] = {}
        for rank, place in enumerate(places):
            if step.runtime.stage_of(rank) in stages:
                copies.setdefault(tuple(place[axis] for axis in axes), {})[rank] = rows[rank][number]
        yield from ((number, values) for values in copies.values() if len(set(values.values())) > 1)


def judge(name: str, values: dict[int, int]) -> Difference:
    """Return the difference, with the ranks that hold the most frequent value as `right` if they are a majority."""
    (value, count), *_ = Counter(values.values()).most_common()
    if 2 * count <= len(values):
        return Difference(name, (), tuple(values))
    right = tuple(rank for rank, word in values.items() if word == value)
    return Difference(name, right, tuple(rank for rank in values if rank not in right))


def repair(step: Step, differing: list[Difference]) -> None:
    """Overwrite wrong copies with a right one; every rank must call this."""
    for difference in differing:
        entry = step.state[difference.name]
        step.runtime.send(entry.local, difference.right[0], difference.wrong, entry.like)


def axes_of(spec: Spec, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of the mesh on which ranks hold different parts of a tensor."""
    sharded = {axis for name in spec.sharded for axis in mesh.over(name)}
    return tuple(axis for axis in mesh.axes if axis in sharded or spec.state(axis) != "invariant")


def bit_sum(local: Tensor | None, device: torch.device) -> Tensor:
    """Return the sum of a tensor's bits as 64-bit words, modulo 2^64, or 0 for None.

    Every single flipped bit changes it.
    """
    if local is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    flat = local.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % WORD_BYTES:
        flat = flat.clone()
    end = len(flat) // WORD_BYTES * WORD_BYTES
    return flat[:end].view(torch.int64).sum() + flat[end:].sum(dtype=torch.int64)


def rank_names(numbers: tuple[int, ...]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {list_ranks(numbers)}"


def list_ranks(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
