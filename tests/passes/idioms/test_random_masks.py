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

from passes.idioms.intervals import Intervals
from passes.ir.mesh import Mesh

SIZE = 12
POSITIONS = torch.stack([torch.cat([torch.arange(5), torch.arange(3), torch.arange(4)]), torch.arange(-1, 11).clamp(0)])
IDS = torch.stack([torch.tensor([0] * 5 + [1] * 3 + [2] * 4), torch.tensor([3] + [1] * 11)])
Mask = Callable[[Mapping[str, Tensor]], Tensor]
SIDES: dict[str, Mask] = {
    "place": lambda tensors: torch.arange(SIZE)[None],
    "place from 2 on": lambda tensors: torch.arange(2, SIZE + 2)[None],
    "position": lambda tensors: tensors["positions"],
    "id": lambda tensors: tensors["ids"],
    "wraps": lambda tensors: (tensors["positions"] * 40).to(torch.uint8),
    "no whole number": lambda tensors: torch.arange(0.5, SIZE)[None],
}
RUNS: dict[str, Mask] = {
    "ids": lambda tensors: tensors["ids"],
    "turns": lambda tensors: (tensors["positions"].diff(prepend=tensors["positions"][:, :1] - 1) != 1).cumsum(-1),
    "turns, one early": lambda tensors: (tensors["positions"].diff(append=tensors["positions"][:, -1:] + 1) != 1).cumsum(-1),
    "starts": lambda tensors: (tensors["positions"] == 0).to(torch.int64).cumsum(-1),
    "id by two": lambda tensors: tensors["ids"] % 2,
}
COMPARE = (operator.ge, operator.gt, operator.le, operator.lt, operator.eq)
TRIANGLES = (torch.tril, torch.triu)


def mask(draw: random.Random, depth: int = 0) -> Mask:
    """Return a mask [b or 1, 1, queries, keys]."""
    kind = draw.random()
    if depth < 3 and kind < 0.45:
        a, b = mask(draw, depth + 1), mask(draw, depth + 1)
        join = draw.choice((operator.and_, operator.and_, operator.or_, None))
        return (lambda tensors: join(a(tensors), b(tensors))) if join else (lambda tensors: ~a(tensors))
    if kind < 0.6:
        ids = RUNS[draw.choice(list(RUNS))]
        return lambda tensors: ids(tensors)[:, None, :, None] == ids(tensors)[:, None, None, :]
    if kind < 0.66:
        cut, diagonal, inner = draw.choice(TRIANGLES), draw.choice((-1, 0, 1, 2)), mask(draw, depth + 1)
        return lambda tensors: cut(inner(tensors).expand(2, 1, SIZE, SIZE), diagonal)
    if kind < 0.7:
        return lambda tensors: (tensors["ids"] % 3 > 0)[:, None, :, None]
    return comparison(draw)


def comparison(draw: random.Random) -> Mask:
    """Return a comparison of a value of the query with a value of the key, on either side."""
    at_query, at_key = (side(draw) for _ in range(2))
    compare, turned = draw.choice(COMPARE), draw.random() < 0.5

    def compared(tensors: Mapping[str, Tensor]) -> Tensor:
        left, right = at_query(tensors)[:, None, :, None], at_key(tensors)[:, None, None, :]
        return compare(right, left) if turned else compare(left, right)

    return compared


def side(draw: random.Random) -> Mask:
    """Return a number for each place, shifted a little."""
    name = "place" if draw.random() < 0.6 else draw.choice(list(SIDES))
    base, more, sign = SIDES[name], draw.choice((0, 0, 0, 1, 2, -1, -3)), draw.choice((1, 1, 1, -1))
    shifted: Mask = (lambda tensors: base(tensors) + more) if more else base
    return shifted if sign == 1 else lambda tensors: -shifted(tensors)


def packed(draw: random.Random) -> Mask:
    """Return a run, and a comparison of positions that count within it."""
    ids, (more, less), compare = RUNS[draw.choice(list(RUNS))], draw.choices((0, 0, 1, 2), k=2), draw.choice(COMPARE[:4])

    def both(tensors: Mapping[str, Tensor]) -> Tensor:
        runs, at = ids(tensors), tensors["positions"]
        ordered = compare(at[:, None, :, None] + more, at[:, None, None, :] + less)
        return (runs[:, None, :, None] == runs[:, None, None, :]) & ordered

    return both


def outcome(made: Mask) -> str:
    """Return how attention under a mask was treated: left, right or wrong."""

    def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        visible = made({"positions": positions, "ids": ids}).expand(2, 1, SIZE, SIZE)
        return F.scaled_dot_product_attention(q, k, v, visible, scale=0.3)

    x = numbers(2, 2, SIZE, 4)
    function = capture(attention, [x, x + 1, x + 2, POSITIONS, IDS], Mesh())
    program, report = Intervals()(function.program, function.ctx)
    if not report.counts["attention_by_interval"]:
        return "left"
    actual, wanted = (fx.Interpreter(p.module).run(*function.values)[0] for p in (program, function.program))
    return "right" if torch.allclose(actual, wanted.nan_to_num(), atol=1e-12) else "wrong"


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 40))])
@pytest.mark.sample(2)
def test_masks_that_are_read_are_the_masks(seed):
    draw = random.Random(seed)
    result = Counter(outcome(packed(draw) if draw.random() < 0.2 else mask(draw)) for _ in range(25))
    assert not result["wrong"] and result["right"] > 2, result
