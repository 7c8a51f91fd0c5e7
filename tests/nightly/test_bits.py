"""The promised pairs have the same bits, and the comparison detects a setting that changes numbers."""

from __future__ import annotations

import pytest
import torch

from tests.nightly import bits
from tests.nightly.bits import Gate, Setting


@pytest.mark.full
def test_a_run_has_the_same_bits_twice_and_other_bits_on_another_mesh():
    once, again, alone = (
        bits.train("decoder", "bf16", {"dp_shard": 2}, setting, 1, 1)
        for setting in (Setting(), Setting(), Setting(mesh={}))
    )
    assert bits.relative_difference(once, again) == 0.0 < bits.relative_difference(once, alone) < 1e-1


def test_the_smallest_difference_counts():
    one = torch.tensor([1.0, 0.0])
    assert bits.relative_difference([{"x": one}], [{"x": one.clone()}]) == 0.0
    assert bits.relative_difference([{"x": one}], [{"x": torch.nextafter(one, one + 2)}]) > 0.0


def test_a_table_has_a_row_for_each_comparison(monkeypatch):
    first = Gate("two runs", Setting(), Setting())
    monkeypatch.setattr(bits, "GATES", (first,))
    assert bits.table([(first, "decoder, fp32", "", 0.0), (first, "decoder, fp32", "cp 2", 2e-7)]).splitlines()[2:] == [
        "| two runs | yes | 2 | 1 | 2e-07 |"
    ]
