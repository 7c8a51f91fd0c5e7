"""The order in which the ranks of `cp` hold a sequence, stored on the sequence factor (`Factor.order`).

plain                    entries 0 1 2 3 4 5 6 7   ->   rank 0 holds 0 1 2 3, rank 1 holds 4 5 6 7
zigzag                   entries 0 1 2 3 4 5 6 7   ->   rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5
a table, 0 2 | 1 3       entries 0 1 2 3 4 5 6 7   ->   rank 0 holds 0 1 4 5, rank 1 holds 2 3 6 7
"""

from __future__ import annotations

from dataclasses import dataclass

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Order:
    """The chunks of a factor that each rank of an axis holds, equally many on each.

    With `zigzag`, rank r of P holds chunks r and 2P-1-r of 2P, head and tail: under a causal mask all ranks have equal
    work. With a `table`, a row for each rank, rank r holds the blocks of row r, in that order: every batch comes with a
    table of its own, of this one's shape, which programs read as an input; this table is the host's.
    """

    zigzag: bool = False
    table: Table = ()

    @property
    def is_plain(self) -> bool:
        """Return True if the ranks' chunks, joined in order, are the full factor in its natural order."""
        return not self.zigzag and not self.table

    @property
    def chunks(self) -> int:
        """The number of chunks of each rank."""
        return len(self.table[0]) if self.table else 1 + self.zigzag

    def chunks_of(self, axis_index: int, ranks: int) -> tuple[int, ...]:
        """Return the numbers of the chunks that a rank holds, in its order."""
        if self.table:
            return self.table[axis_index]
        return (axis_index, 2 * ranks - 1 - axis_index) if self.zigzag else (axis_index,)

    def __str__(self) -> str:
        return f"{self.chunks} blocks" if self.table else "head and tail" if self.zigzag else ""


PLAIN, ZIGZAG = Order(), Order(zigzag=True)
