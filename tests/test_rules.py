"""Every rule, by value: each dim of each operand sharded over 2, 3 and 4 lockstep ranks, forward and gradient."""

from __future__ import annotations

import pytest
from rule_cases import CASES
from rule_harness import capture, check, sharded

from passes.mesh import Mesh
from passes.rules import RULES, name_of

# ranks, what padding holds (None: garbage)
RUNS = ((2, 0.0), (3, None), (4, None))


def test_every_rule_has_a_case():
    assert sorted(CASES) == sorted(RULES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_single_dim(name: str):
    for fn, tensors in CASES[name]:
        for ranks, fill in RUNS:
            function = capture(fn, tensors, Mesh.of({"tp": ranks}))
            assert name in function.operators, f"{name} is not among {function.operators}"
            for i, x in enumerate(tensors):
                for dim in range(x.dim()):
                    check(function, {i: sharded(x.shape, dim, fill=fill)})
