"""Every rule, by value: each dim of each operand sharded over 2, 3 and 4 lockstep ranks, forward and gradient."""

from __future__ import annotations

import pytest
from rule_cases import CASES
from rule_harness import capture, check, sharded

from passes.mesh import Mesh
from passes.rules import RULES

# ranks, what padding holds (None: garbage)
RUNS = ((2, 0.0), (3, None), (4, None))


def test_every_rule_has_a_case():
    assert sorted(CASES) == sorted(RULES)


def placements(tensors) -> list[tuple[int, int]]:
    """(operand, dim) of everything that can be sharded."""
    return [(i, dim) for i, x in enumerate(tensors) for dim, n in enumerate(x.shape) if n > 1]


def check_single_dims(name: str, every_run: bool) -> None:
    """Each dim of each operand in turn, on every number of ranks or, in turn, on one of them."""
    for fn, tensors in CASES[name]:
        functions = [capture(fn, tensors, Mesh.of({"tp": ranks})) for ranks, _ in RUNS]
        assert name in functions[0].operators, f"{name} is not among {functions[0].operators}"
        for k, (i, dim) in enumerate(placements(tensors)):
            for (ranks, fill), function in list(zip(RUNS, functions))[:: 1] if every_run else [(RUNS[k % 3], functions[k % 3])]:
                try:
                    check(function, {i: sharded(tensors[i].shape, dim, fill=fill)})
                except Exception as error:
                    shapes = [tuple(x.shape) for x in tensors]
                    raise AssertionError(f"{name} of {shapes}, operand {i} dim {dim} on {ranks} ranks: {error}") from error


@pytest.mark.parametrize("name", sorted(CASES))
def test_single_dim(name: str):
    check_single_dims(name, every_run=False)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CASES))
def test_single_dim_on_2_3_and_4_ranks(name: str):
    check_single_dims(name, every_run=True)
