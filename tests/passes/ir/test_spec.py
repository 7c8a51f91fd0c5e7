"""Placements: the owner of each entry, against an entry-wise definition."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_programs import cut

from passes.ir import layout
from passes.ir.mesh import Mesh
from passes.ir.order import PLAIN, ZIGZAG
from passes.ir.spec import Factor, Spec, boxes, shard, unshard, validate

AXES = ("dp_shard", "cp", "tp")


@st.composite
def placements(draw, states=("invariant", "replicate", "sum")):
    """Draw a mesh of up to three axes and a spec of up to three dims, some with several factors; sizes need not divide."""
    mesh = Mesh.of({axis: draw(st.integers(1, 3)) for axis in AXES})
    order = ZIGZAG if draw(st.booleans()) else PLAIN
    dims = [[draw(st.integers(1, 5)) for _ in range(draw(st.integers(0, 2)))] for _ in range(draw(st.integers(0, 3)))]
    slots = [(d, f) for d, sizes in enumerate(dims) for f in range(len(sizes))]
    axes = mesh.flatten(mesh.axes) if draw(st.booleans()) else mesh.axes
    slot_of = {a: draw(st.sampled_from([None, *slots])) for a in draw(st.permutations(axes))}
    states_of = {a: draw(st.sampled_from(states)) for name, slot in slot_of.items() if slot is None for a in mesh.over(name)}
    factors = tuple(tuple(Factor(size, tuple(a for a, slot in slot_of.items() if slot == (d, f)))
                          for f, size in enumerate(sizes)) for d, sizes in enumerate(dims))
    partial = tuple((axis, state) for axis, state in states_of.items() if state in ("sum", "max"))
    replicate = tuple(axis for axis, state in states_of.items() if state == "replicate")
    return mesh, Spec(factors, partial, replicate, fill=draw(st.sampled_from([0.0, -1.0]))).ordered(order)


def owner(index: int, factor: Factor, mesh: Mesh) -> tuple[dict[str, int], int]:
    """Return the coordinates that own an entry of a factor, and its position there: `ceil(n / p)` a rank, axis by axis.

    Over `cp`, in a zigzag, rank r owns `ceil(n / 2p)` entries at r and as many at 2p - 1 - r.
    """
    coordinates: dict[str, int] = {}
    size = factor.size
    for axis in factor.axes:
        if axis == "cp" and factor.order.zigzag:
            chunk = math.ceil(size / (2 * mesh[axis]))
            number, index = divmod(index, chunk)
            is_tail = number >= mesh[axis]
            coordinates[axis] = 2 * mesh[axis] - 1 - number if is_tail else number
            index, size = index + is_tail * chunk, 2 * chunk
            continue
        step = math.ceil(size / mesh[axis])
        coordinates[axis], index, size = index // step, index % step, step
    return coordinates, index


def owner_of_entry(entry: tuple[int, ...], spec: Spec, mesh: Mesh) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the coordinates that own an entry of the tensor, and its local index."""
    coordinates: dict[str, int] = {}
    local: list[int] = []
    for i, dim in zip(entry, spec.dims, strict=True):
        at = 0
        indices = [i // math.prod(f.size for f in dim[k + 1:]) % f.size for k, f in enumerate(dim)]
        for index, factor in zip(indices, dim, strict=True):
            owner_coordinates, inner = owner(index, factor, mesh)
            coordinates |= owner_coordinates
            at = at * factor.local(mesh) + inner
        local.append(at)
    return coordinates, tuple(local)


def entries(spec: Spec):
    return itertools.product(*map(range, spec.shape))


def numbered(spec: Spec) -> torch.Tensor:
    """Return a tensor with the entries 1, 2, 3..."""
    return torch.arange(1, math.prod(spec.shape) + 1, dtype=torch.float64).view(spec.shape)


@given(placements())
@settings(max_examples=150, deadline=None)
@pytest.mark.full
def test_every_entry_is_where_the_definition_puts_it_and_the_rest_is_fill(placement):
    mesh, spec = placement
    full = numbered(spec)
    expected = [torch.full(spec.local_shape(mesh), spec.fill, dtype=torch.float64) for _ in mesh]
    for entry in entries(spec):
        owners, local = owner_of_entry(entry, spec, mesh)
        for coordinates, tensor in zip(mesh, expected, strict=True):
            if owners.items() <= coordinates.items():
                tensor[local] = full[entry]
    for coordinates, tensor in zip(mesh, expected, strict=True):
        assert torch.equal(shard(full, spec, mesh, coordinates), tensor)


@given(placements(states=("invariant", "replicate")))
@settings(max_examples=100, deadline=None)
def test_unshard_undoes_shard(placement):
    mesh, spec = placement
    full = numbered(spec)
    assert torch.equal(unshard([shard(full, spec, mesh, coordinates) for coordinates in mesh], spec, mesh), full)


@pytest.mark.parametrize(("how", "reduce"), [("sum", torch.sum), ("max", torch.amax)])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_unshard_reduces_the_terms_of_a_partial_value(data, how, reduce):
    mesh, spec = data.draw(placements(states=("invariant", "replicate", how)))
    terms = {coordinates: torch.randn(spec.shape, dtype=torch.float64)
             for coordinates in itertools.product(*(range(mesh[axis]) for axis in spec.partial_axes))}
    locals_by_rank = [shard(terms[tuple(coordinates[a] for a in spec.partial_axes)], spec, mesh, coordinates) for coordinates in mesh]
    expected = reduce(torch.stack(list(terms.values())), 0)
    torch.testing.assert_close(unshard(locals_by_rank, spec, mesh), expected, rtol=0, atol=1e-12)


@given(placements())
@settings(max_examples=100, deadline=None)
def test_boxes_cover_every_entry_once_over_the_sharding_axes(placement):
    mesh, spec = placement
    counts: Counter[tuple[int, ...]] = Counter()
    for coordinates in mesh:
        for box in boxes(spec, mesh, coordinates):
            assert len(box.size) == len(box.offset) == len(box.local_offset) == len(spec.dims)
            counts.update(itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.size, strict=True))))
    copies = math.prod(mesh[axis] for axis in mesh.axes if spec.state(axis) != "shard")
    assert counts == {entry: copies for entry in entries(spec)}


@given(placements())
@settings(max_examples=100, deadline=None)
def test_a_factor_is_padded_if_and_only_if_its_shards_hold_more_than_it(placement):
    mesh, spec = placement
    for factor in (f for dim in spec.dims for f in dim):
        entries = factor.local(mesh) * math.prod(mesh[axis] for axis in factor.axes)
        assert entries >= factor.size
        assert factor.padded(mesh) == (entries > factor.size)


@pytest.mark.parametrize(("size", "locals_expected"), [
    (8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    (7, [[0, 1, 6, -1], [2, 3, 4, 5]]),
    (5, [[0, 1, -1, -1], [2, 3, 4, -1]]),
    (1, [[0, -1], [-1, -1]]),
])
def test_a_zigzag_gives_each_rank_head_and_tail(size, locals_expected):
    mesh, factor = Mesh.of({"cp": 2}), Factor(size, ("cp",), order=ZIGZAG)
    spec = Spec(((factor,),), fill=-1)
    full = torch.arange(size)
    locals_by_rank = [shard(full, spec, mesh, coordinates) for coordinates in mesh]
    assert [x.tolist() for x in locals_by_rank] == locals_expected
    assert torch.equal(unshard(locals_by_rank, spec, mesh), full)
    for coordinates, local in zip(mesh, locals_by_rank):
        at = {axis: torch.tensor(p) for axis, p in coordinates.items()}
        index, valid = layout.entries(factor, mesh, at, full.device)
        assert torch.equal(torch.where(valid, index, -1), local)
        local_index, is_local = layout.locate(full, factor, mesh, at)
        assert torch.equal(local[local_index][is_local], full[is_local]) and int(is_local.sum()) == int((local >= 0).sum())
    ranks = layout.to_rank_order(full + 1, 0, 2) - 1
    assert torch.equal(ranks, torch.cat(locals_by_rank))
    assert torch.equal(layout.to_natural_order(ranks, 0, 2, size), full)


def test_ranks_may_own_nothing():
    mesh, spec = Mesh.of({"dp_shard": 3, "tp": 2}), Spec(((Factor(2, ("dp_shard", "tp")),),), fill=7.0)
    full = torch.tensor([1.0, 2.0])
    owned = [shard(full, spec, mesh, coordinates).tolist() for coordinates in mesh]
    assert owned == [[1.0], [7.0], [2.0], [7.0], [7.0], [7.0]]
    assert [len(boxes(spec, mesh, coordinates)) for coordinates in mesh] == [1, 0, 1, 0, 0, 0]


def test_a_flattened_dim_with_its_minor_factor_sharded_is_cut_in_runs():
    mesh, spec = Mesh.of({"tp": 2}), Spec(((Factor(2), Factor(3, ("tp",))),))
    full = torch.arange(6.0)
    assert [shard(full, spec, mesh, coordinates).tolist() for coordinates in mesh] == [[0, 1, 3, 4], [2, 0, 5, 0]]


def test_the_gradient_swaps_sums_and_replicate_and_keeps_shards():
    spec = Spec(((Factor(4, ("tp",)),),), partial=(("cp", "sum"),), replicate=("dp_shard",))
    dual = spec.gradient()
    assert (dual.state("tp"), dual.state("cp"), dual.state("dp_shard")) == ("shard", "replicate", "partial")
    assert dual.gradient() == spec


def test_a_tensor_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"tensor is \(3,\), its spec \[4@tp\] is of shape \(4,\)"):
        shard(torch.zeros(3), cut((4,), tp=0), Mesh.of({"tp": 2}), {"tp": 0})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (cut((4, 4), tp=0), None),
        (cut((4, 4), cp=0), "uses axis 'cp', which the mesh (('tp', 2),) lacks"),
        (replace(cut((4, 4), tp=0), replicate=("tp",)), "uses axis 'tp' twice"),
        (replace(cut((4, 4), tp=0), partial=(("tp", "sum"),)), "uses axis 'tp' twice"),
        (Spec(((Factor(4, ("tp", "tp")),),)), "uses axis 'tp' twice"),
    ],
)
def test_validate(spec, message):
    if message is None:
        return validate(spec, Mesh.of({"tp": 2}))
    with pytest.raises(ValueError) as error:
        validate(spec, Mesh.of({"tp": 2}))
    assert message in str(error.value)
