"""Transfers of a ring: a wait for one gets its tensor or an error."""

from __future__ import annotations

import pytest
import torch

from passes.ops.shift import arrive, shift


@pytest.mark.parametrize("x", [torch.arange(6.0), torch.empty(0, 3)], ids=["some", "nothing"])
def test_what_goes_nowhere_arrives(x):
    assert torch.equal(arrive(shift(x, "cp", 0), x), x)


def test_a_copy_of_what_is_on_its_way_is_refused():
    """A wait for it would end at once, with the previous contents of its memory."""
    x = torch.arange(6.0)
    y = shift(x, "cp", 0)
    with pytest.raises(RuntimeError, match="no transfer to this tensor is running"):
        arrive(y.clone(), x)
    arrive(y, x)
    with pytest.raises(RuntimeError, match="no transfer to this tensor is running"):
        arrive(y, x)
