"""Best-fit-decreasing bin packing, fast enough for all pieces of a corpus."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from compiler_trainer.data.corpus import Ids


class Space:
    """Sequences with room left, in stacks of equal room."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # the keys of `stacks`, ascending
        self.stacks: dict[int, list[Ids]] = {}

    def add(self, size: int, rows: Ids) -> None:
        """Add sequences with room for `size` tokens each."""
        if size and len(rows):
            if size not in self.stacks:
                insort(self.sizes, size)
            self.stacks.setdefault(size, []).append(rows)

    def take(self, size: int) -> tuple[int, Ids] | None:
        """Remove a stack with the least room of at least `size`; return (room, sequences), or None if there is none."""
        at = bisect_left(self.sizes, size)
        if at == len(self.sizes):
            return None
        room = self.sizes[at]
        rows = self.stacks[room].pop()
        if not self.stacks[room]:
            del self.stacks[room], self.sizes[at]
        return room, rows


def best_fit(sizes: Ids, room: int) -> Ids:
    """Return, for each piece of `sizes` tokens (at most `room`), the piece that opened its sequence.

    From the longest on, each piece goes into the sequence with the least sufficient room, or opens one
    (arXiv:2404.10830). Pieces of one size are placed together: a piece leaves less room than all other sequences have,
    so the next pieces of this size fill the same sequence until it is too small. That takes O(n log n) for n pieces, of
    which in Python O(m log room) for m sizes.
    """
    openers, space = np.empty_like(sizes), Space()
    for size, pieces in group_by_size(sizes):
        while len(pieces):
            room_left, rows = space.take(size) or (room, pieces[:: room // size])
            per_row = room_left // size
            placed = pieces[: per_row * len(rows)]
            full_rows, last_count = divmod(len(placed), per_row)
            openers[placed] = np.repeat(rows[: full_rows + 1], per_row)[: len(placed)]
            space.add(room_left - per_row * size, rows[:full_rows])
            space.add(room_left - last_count * size, rows[full_rows : full_rows + 1])  # partly filled
            space.add(room_left, rows[full_rows + 1 :])
            pieces = pieces[len(placed) :]
    return openers


def group_by_size(sizes: Ids) -> Iterator[tuple[int, Ids]]:
    """Yield each size, from the largest on, with the pieces of that size."""
    order = np.argsort(-sizes, kind="stable")
    for pieces in filter(len, np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1)):
        yield int(sizes[pieces[0]]), pieces
