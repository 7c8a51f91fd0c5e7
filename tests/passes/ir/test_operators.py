"""Facts about single operators."""

from __future__ import annotations

import pytest
import torch
from small_programs import Small, cut

from passes.ir import ir
from passes.ir.operators import is_view

aten = torch.ops.aten
MAYBE_COPIES = {
    "reshape": lambda s, x: s.call(aten.reshape.default, x, [24]),
    "flatten": lambda s, x: s.call(aten.flatten.using_ints, x),
    "ravel": lambda s, x: s.call(aten.ravel.default, x),
    "contiguous": lambda s, x: s.call(aten.contiguous.default, x),
}


@pytest.mark.parametrize("name", MAYBE_COPIES)
@pytest.mark.parametrize("lies_otherwise", [False, True])
def test_what_may_copy_is_a_view_where_it_does_not(name, lies_otherwise):
    small = Small()
    x = small.input("x", cut((2, 3, 4)))
    x = small.call(aten.transpose.int, x, 0, 2) if lies_otherwise else small.call(aten.exp.default, x)
    node = MAYBE_COPIES[name](small, x)
    value = torch.empty(2, 3, 4).transpose(0, 2) if lies_otherwise else torch.empty(2, 3, 4)
    plain = value.contiguous() if name == "contiguous" else getattr(value, name)(*[24] * (name == "reshape"))
    assert ir.example(node).shape == plain.shape
    assert is_view(node) == (plain.data_ptr() == value.data_ptr())
