"""Random masks from known operators: if a mask is read as intervals, it equals them for every query."""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from attention_cases import random as numbers
from rule_harness import capture
from torch import Tensor, fx

from passes.context.intervals import Intervals
from passes.program.mesh import Mesh

SIZE = 12
POSITIONS = torch.stack([torch.cat([torch.arange(5), torch.arange(3), torch.arange(4)]), torch.arange(-1, 11).clamp(0)])
IDS = torch.stack([torch.tensor([0] * 5 + [1] * 3 + [2] * 4), torch.tensor([3] + [1] * 11)])
Mask = Callable[[Mapping[str, Tensor]], Tensor]
SIDES: dict[str, Mask] = {
    "place": lambda given: torch.arange(SIZE)[None],
    "place from 2 on": lambda given: torch.arange(2, SIZE + 2)[None],
    "position": lambda given: given["positions"],
    "id": lambda given: given["ids"],
    "wraps": lambda given: (given["positions"] * 40).to(torch.uint8),
    "no whole number": lambda given: torch.arange(0.5, SIZE)[None],
}
RUNS: dict[str, Mask] = {
    "ids": lambda given: given["ids"],
    "turns": lambda given: (given["positions"].diff(prepend=given["positions"][:, :1] - 1) != 1).cumsum(-1),
    "turns, one early": lambda given: (given["positions"].diff(append=given["positions"][:, -1:] + 1) != 1).cumsum(-1),
    "starts": lambda given: (given["positions"] == 0).to(torch.int64).cumsum(-1),
    "id by two": lambda given: given["ids"] % 2,
}
COMPARE = (operator.ge, operator.gt, operator.le, operator.lt, operator.eq)
TRIANGLES = (torch.tril, torch.triu)


def mask(draw: random.Random, depth: int = 0) -> Mask:
    """Return a mask [b or 1, 1, queries, keys]."""
    kind = draw.random()
    if depth < 3 and kind < 0.45:
        a, b = mask(draw, depth + 1), mask(draw, depth + 1)
        join = draw.choice((operator.and_, operator.and_, operator.or_, None))
        return (lambda given: join(a(given), b(given))) if join else (lambda given: ~a(given))
    if kind < 0.6:
        ids = RUNS[draw.choice(list(RUNS))]
        return lambda given: ids(given)[:, None, :, None] == ids(given)[:, None, None, :]
    if kind < 0.66:
        cut, diagonal, inner = draw.choice(TRIANGLES), draw.choice((-1, 0, 1, 2)), mask(draw, depth + 1)
        return lambda given: cut(inner(given).expand(2, 1, SIZE, SIZE), diagonal)
    if kind < 0.7:
        return lambda given: (given["ids"] % 3 > 0)[:, None, :, None]
    return comparison(draw)


def comparison(draw: random.Random) -> Mask:
    """Return a comparison of a value of the query with a value of the key, on either side."""
    at_query, at_key = (side(draw) for _ in range(2))
    compare, turned = draw.choice(COMPARE), draw.random() < 0.5

    def compared(given: Mapping[str, Tensor]) -> Tensor:
        left, right = at_query(given)[:, None, :, None], at_key(given)[:, None, None, :]
        return compare(right, left) if turned else compare(left, right)

    return compared


def side(draw: random.Random) -> Mask:
    """Return a number for each place, shifted a little."""
    name = "place" if draw.random() < 0.6 else draw.choice(list(SIDES))
    base, more, sign = SIDES[name], draw.choice((0, 0, 0, 1, 2, -1, -3)), draw.choice((1, 1, 1, -1))
    moved: Mask = (lambda given: base(given) + more) if more else base
    return moved if sign == 1 else lambda given: -moved(given)


def packed(draw: random.Random) -> Mask:
    """Return a run, and a comparison of positions that count within it."""
    ids, (more, less), compare = RUNS[draw.choice(list(RUNS))], draw.choices((0, 0, 1, 2), k=2), draw.choice(COMPARE[:4])

    def both(given: Mapping[str, Tensor]) -> Tensor:
        runs, at = ids(given), given["positions"]
        ordered = compare(at[:, None, :, None] + more, at[:, None, None, :] + less)
        return (runs[:, None, :, None] == runs[:, None, None, :]) & ordered

    return both


def outcome(made: Mask) -> str:
    """Return how attention under a mask was treated: left, right or wrong."""

    def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        seen = made({"positions": positions, "ids": ids}).expand(2, 1, SIZE, SIZE)
        return F.scaled_dot_product_attention(q, k, v, seen, scale=0.3)

    x = numbers(2, 2, SIZE, 4)
    function = capture(attention, [x, x + 1, x + 2, POSITIONS, IDS], Mesh())
    program, report = Intervals()(function.program, function.ctx)
    if not report.counts["attention_by_interval"]:
        return "left"
    found, wanted = (fx.Interpreter(p.module).run(*function.values)[0] for p in (program, function.program))
    return "right" if torch.allclose(found, wanted.nan_to_num(), atol=1e-12) else "wrong"


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 40))])
@pytest.mark.sample(2)
def test_masks_that_are_read_are_the_masks(seed):
    draw = random.Random(seed)
    found = Counter(outcome(packed(draw) if draw.random() < 0.2 else mask(draw)) for _ in range(25))
    assert not found["wrong"] and found["right"] > 2, found
