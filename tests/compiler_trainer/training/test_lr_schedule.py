"""The learning rate rises to its base, then falls towards its minimum, which would come after the last step."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler_trainer.config.schema import LrScheduleConfig
from compiler_trainer.training.lr_schedule import learning_rate

NAMES = ("constant", "cosine", "linear", "wsd")


def rates(name, steps, warmup_steps=0, min_ratio=0.0, base_lr=1.0):
    cfg = LrScheduleConfig(name, warmup_steps, min_ratio)
    return [learning_rate(cfg, base_lr, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", [0.5, 1.0, *(0.5 + 0.5 * math.cos(math.pi * k / 5) for k in (1, 2, 3, 4))]),
        ("linear", [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("wsd", [0.5, 1.0, *(1 - math.sqrt(k / 5) for k in (1, 2, 3, 4))]),
    ],
)
def test_six_steps_of_which_two_warm_up(name, expected):
    assert rates(name, steps=6, warmup_steps=2) == pytest.approx(expected)


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(NAMES), st.integers(1, 60), st.floats(0, 1), st.floats(0, 1), st.floats(1e-9, 10))
def test_rises_to_the_base_then_never_again(name, steps, warmup_part, min_ratio, base_lr):
    warmup_steps = int(warmup_part * steps)
    result = rates(name, steps, warmup_steps, min_ratio, base_lr)
    peak = max(warmup_steps - 1, 0)
    rise, fall = result[: peak + 1], result[peak:]
    assert rise == sorted(rise)
    assert all(after <= before + 1e-12 * base_lr for before, after in pairwise(fall))
    assert all(0 < rate <= base_lr * (1 + 1e-12) for rate in result)
    assert min(fall) >= min_ratio * base_lr * (1 - 1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup_steps", [0, 1, 3, 10])
def test_ends(name, warmup_steps):
    result = rates(name, steps=10, warmup_steps=warmup_steps, min_ratio=0.1, base_lr=2.0)
    top = max(1, warmup_steps)
    assert result[0] == pytest.approx(2.0 / top)
    assert result[top - 1] == pytest.approx(2.0)
    longer = rates(name, steps=10**5, warmup_steps=warmup_steps, min_ratio=0.1, base_lr=2.0)
    assert longer[-1] == pytest.approx(2.0 if name == "constant" else 0.2, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_step_uses_the_base(name):
    assert rates(name, steps=1) == [1.0]


def test_stable_until_the_decay():
    cfg = LrScheduleConfig("linear", warmup_steps=2, min_ratio=0.1, decay_steps=4)
    assert [learning_rate(cfg, 1.0, step, 10) for step in range(1, 11)] == pytest.approx([0.5, *[1.0] * 5, 0.82, 0.64, 0.46, 0.28])


def test_a_decay_of_no_step_leaves_the_base():
    cfg = LrScheduleConfig("wsd", warmup_steps=2, decay_steps=0)
    assert [learning_rate(cfg, 1.0, step, 4) for step in range(1, 5)] == [0.5, 1.0, 1.0, 1.0]
