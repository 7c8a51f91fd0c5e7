"""Finer and coarser factors of a dim hold the same entries on every rank; common refinements refine both."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec, shard
from passes.rules.base import Rule
from passes.sharding.atoms import boundaries, common_sizes, merge_dim, refine, split_dim

MESH = Mesh.of({"dp_shard": 2, "cp": 3, "tp": 2})
AXES = ((), ("tp",), ("cp",), ("dp_shard", "tp"))


def factorizations(n):
    """Yield every way to write n as an ordered product of factors above one."""
    if n == 1:
        yield []
    for first in range(2, n + 1):
        if n % first == 0:
            yield from ([first, *others] for others in factorizations(n // first))


def dims():
    """Yield dims of one and two factors, even and uneven, each axis at most once."""
    for size, axes in itertools.product((1, 4, 5, 6, 12), AXES):
        yield (Factor(size, axes),)
    for (major, first), (minor, second) in itertools.product(itertools.product((2, 3, 4, 6), AXES), repeat=2):
        if not set(first) & set(second):
            yield (Factor(major, first), Factor(minor, second))


DIMS = list(dims())


def shards(dim):
    """Return the entries of a dim that each rank holds, padding as -1."""
    values = torch.arange(math.prod(factor.size for factor in dim))
    spec = Spec((tuple(dim),), fill=-1.0)
    return [shard(values, spec, MESH, MESH.coordinates(rank), torch.int64, torch.device("cpu")).tolist() for rank in range(MESH.world_size)]


def test_common_sizes_refine_both_and_are_the_coarsest_that_do():
    for n in (12, 24, 30):
        ways = list(factorizations(n))
        for a, b in itertools.product(ways, repeat=2):
            common = common_sizes(a, b)
            refining = [c for c in ways if {*boundaries(a), *boundaries(b)} <= set(boundaries(c))]
            assert common == min(refining, key=len, default=None)


@pytest.mark.parametrize("dim", DIMS, ids=lambda dim: " ".join(map(str, dim)))
def test_merged_factors_hold_the_same_entries(dim):
    merged = merge_dim(dim, MESH)
    assert len(merged) <= len(dim) and shards(merged) == shards(dim)


def test_split_factors_hold_the_same_entries_or_there_are_none():
    split = 0
    for dim in (dim for dim in DIMS if all(factor.size > 1 for factor in dim)):
        for parts in itertools.product(*(list(factorizations(factor.size)) for factor in dim)):
            pieces = split_dim(dim, [size for part in parts for size in part], MESH)
            if pieces is not None:
                split += 1
                assert shards(pieces) == shards(dim)
    assert split > 400


def test_a_shard_that_cuts_across_a_factor_is_not_split():
    assert split_dim((Factor(12, ("tp",)),), [3, 4], MESH) is None
    assert split_dim((Factor(12, ("tp",)),), [4, 3], MESH) is not None


def test_operands_of_a_rule_meet_in_common_atoms():
    rule = Rule(((("b",), ("t", "d")), (("t", "d"),)), ((("b",), ("t",), ("d",)),), {"b": 4, "t": 6, "d": 8})
    tp, dp = Mesh.of({"tp": 3}), (Factor(4),)
    atoms = refine(rule, [(dp, (Factor(3, ("tp",)), Factor(16))), ((Factor(48),),)], [0, 1], tp)
    assert atoms.sizes == {"b": 4, "t.#0": 3, "t.#1": 2, "d": 8}
    assert atoms.operands == ((("b",), ("t.#0", "t.#1", "d")), (("t.#0", "t.#1", "d"),))
    assert [str(f) for f in atoms.factors[0][1]] == ["3@tp", "2", "8"] and [str(f) for f in atoms.factors[1][0]] == ["3", "2", "8"]
    assert {atoms.origin(atom) for atom in atoms.sizes} == {"b", "t", "d"}


def test_an_operand_without_common_atoms_has_to_be_gathered():
    rule = Rule(((("t", "d"),),), ((("t",), ("d",)),), {"t": 6, "d": 4})
    atoms = refine(rule, [((Factor(4, ("tp",)), Factor(6)),)], [0], Mesh.of({"tp": 2}))
    assert atoms.sizes == {"t": 6, "d": 4} and atoms.factors == ((None,),)
