"""Layers are divided among stages as evenly as possible."""

from __future__ import annotations

import itertools
import random

import pytest

from passes.pipeline.assign import even


def sums_of(costs: list[int], counts: tuple[int, ...]) -> list[int]:
    remainder = iter(costs)
    return [sum(itertools.islice(remainder, count)) for count in counts]


def worth(sums: list[int]) -> tuple[int, int]:
    return max(sums), sum(s * s for s in sums)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cut_is_more_even(seed):
    draw = random.Random(seed)
    costs = [draw.randint(1, 20) for _ in range(draw.randint(1, 9))]
    parts = draw.randint(1, len(costs))
    counts = even(costs, parts)
    assert len(counts) == parts and sum(counts) == len(costs) and min(counts) >= 1
    cuts = itertools.combinations(range(1, len(costs)), parts - 1)
    others = ([b - a for a, b in itertools.pairwise((0, *cut, len(costs)))] for cut in cuts)
    assert worth(sums_of(costs, counts)) == min(worth(sums_of(costs, tuple(other))) for other in others)


def test_early_stages_which_keep_most_microbatches_have_the_fewest():
    assert even([10] * 32, 5) == (6, 6, 6, 7, 7)


def test_a_dear_head_leaves_its_stage_fewer_layers():
    assert even([10] * 31 + [34], 8)[-1] == 2
