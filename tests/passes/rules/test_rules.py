"""Every rule, by value: each dim of each operand sharded over 2, 3 and 4 lockstep ranks, forward and gradient."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from rule_cases import CASES, real
from rule_harness import capture, check, on, sharded
from sweeps import in_turn

from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.order import ZIGZAG
from passes.ir.spec import Factor, Spec
from passes.rules import RULES, rule_of

# ranks, padding value (None: garbage)
RUNS = ((2, 0.0), (3, None), (4, None))


def test_every_rule_has_a_case():
    ours = [{name for name in names if "::" not in name} for names in (CASES, RULES)]  # the others are added by other modules
    assert ours[0] - ours[1] == set(), "no rule in passes/rules/ for these cases"
    assert ours[1] - ours[0] == set(), "no case in tests/support/rule_cases.py for these rules"


def placements(tensors) -> list[tuple[int, int]]:
    """Return (operand, dim) of each dim that can be sharded."""
    return [(i, dim) for i, x in enumerate(tensors) for dim, n in enumerate(x.shape) if n > 1]


def check_single_dims(name: str, every_run: bool) -> None:
    """Shard each dim of each operand in turn, on every number of ranks or, in turn, on one of them."""
    assert name in RULES  # without a rule, operands are gathered, and values are right
    for fn, tensors in CASES[name]:
        function = capture(fn, tensors, Mesh.of({"tp": 2}))
        functions = [on(Mesh.of({"tp": ranks}), function) for ranks, _ in RUNS]
        assert name in function.operators, f"{name} is not among {function.operators}"
        for k, (i, dim) in enumerate(placements(tensors)):
            chosen = range(len(RUNS)) if every_run else [k % len(RUNS)]
            for r in chosen:
                ranks, fill = RUNS[r]
                try:
                    check(functions[r], {i: sharded(tensors[i].shape, dim, fill=fill)})
                except Exception as error:
                    shapes = [tuple(x.shape) for x in tensors]
                    raise AssertionError(f"{name} of {shapes}, operand {i} dim {dim} on {ranks} ranks: {error}") from error


def test_padding_of_what_nobody_wrote_is_not_known():
    """The operator itself would give uninitialized memory: mostly zero."""
    like = capture(torch.empty_like, (real(5),), Mesh.of({"tp": 2}))
    (node,) = [n for n in like.program.calls() if n.target is torch.ops.aten.empty_like.default]
    assert rule_of(node).pad_out([0.0]) is None


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.sample(64)
def test_single_dim(name: str):
    check_single_dims(name, every_run=False)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CASES))
def test_single_dim_on_2_3_and_4_ranks(name: str):
    check_single_dims(name, every_run=True)


def check_in_a_zigzag(name: str) -> None:
    """Shard each dim of each operand in turn, on ranks that hold its head and tail chunks."""
    fn, tensors = CASES[name][0]
    for ranks, fill in ((2, None), (3, 0.0)):
        function = replace(capture(fn, tensors, Mesh.of({"cp": ranks})), order=ZIGZAG)
        for i, dim in placements(tensors):
            check(function, {i: sharded(tensors[i].shape, dim, "cp", fill)})


@pytest.mark.parametrize("name", ("cat", "cumsum", "gather", "layer_norm", "linear", "scaled_dot_product_attention", "slice", "view"))
@pytest.mark.sample(2)
def test_in_a_zigzag(name: str):
    check_in_a_zigzag(name)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_rule_in_a_zigzag(name: str):
    check_in_a_zigzag(name)


PAIRS = ("add", "addcmul", "bmm", "cat", "embedding", "gather", "linear", "matmul", "mm", "mul", "scaled_dot_product_attention",
         "where")


@pytest.mark.parametrize(("name", "axis"), in_turn(PAIRS, ("dp_shard", "tp")))
@pytest.mark.sample(2)
def test_operands_sharded_differently(name: str, axis: str):
    """Shard the first two operands each on a dim of its own: as activations, then the second as a weight."""
    fn, tensors = CASES[name][0]
    ranks = 3 if axis == "tp" else 2
    pairs = [(a, b) for a in range(tensors[0].dim()) for b in range(tensors[1].dim())
             if tensors[0].shape[a] > 1 and tensors[1].shape[b] > 1]
    for weights in ((), (1,)):
        function = capture(fn, tensors, Mesh.of({axis: ranks}), weights)
        for a, b in pairs:
            check(function, {0: sharded(tensors[0].shape, a, axis, None), 1: sharded(tensors[1].shape, b, axis)})


def check_over_two_axes(name: str, every: int) -> None:
    """Store the second operand over `fsdp`, and shard the first on `dp_shard` and `cp`: as activation, as weight.

    Of all these placements, in order, run each `every`-th.
    """
    fn, tensors = CASES[name][0]
    mesh = Mesh.of({"dp_shard": 2, "cp": 2})
    first = Spec.whole(tuple(tensors[0].shape))
    stored = [b for b, n in enumerate(tensors[1].shape) if n > 1]
    cuts = [{}, *({axis: d} for axis in ("fsdp", "dp_shard", "cp") for d in range(len(first.dims))),
            *({"dp_shard": a, "cp": b} for a, b in itertools.product(range(len(first.dims)), repeat=2))]
    for weights in ((1,), (0, 1)):
        function = replace(capture(fn, tensors, mesh, weights), order=ZIGZAG)
        for cut, b in list(itertools.product(cuts, stored))[::every]:
            dims = tuple((replace(f, axes=tuple(a for a in cut if cut[a] == d)),) for d, (f,) in enumerate(first.dims))
            check(function, {0: replace(first, dims=dims, fill=None), 1: sharded(tensors[1].shape, b, "fsdp")})


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.sample(2)
def test_a_weight_over_two_axes_as_one_meets_what_either_shards(name: str):
    check_over_two_axes(name, every=7)  # no number of dims is a multiple, so all axes and dims come in turn


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
def test_a_weight_over_two_axes_as_one_meets_whatever_either_shards(name: str):
    check_over_two_axes(name, every=1)


@pytest.mark.parametrize("name", ("add", "embedding", "linear", "matmul", "mm", "mul", "sub", "view", "transpose", "cat", "div",
                                  "exp", "clone", "where", "bmm", "index_select", "gather", "sum",
                                  "index_put", "slice_scatter"))
@pytest.mark.sample(4)
def test_terms_of_a_sum_and_replicate(name: str):
    """Give each floating operand as terms of a sum, then replicate: linear operators carry sums, others reduce."""
    fn, tensors = CASES[name][0]
    for ranks in (2, 3):
        function = capture(fn, tensors, Mesh.of({"tp": ranks}))
        for i, x in enumerate(tensors):
            if x.is_floating_point():
                whole = Spec.whole(tuple(x.shape))
                check(function, {i: replace(whole, partial=(("tp", "sum"),))})
                check(function, {i: replace(whole, replicate=("tp",))})


def floating(tensors) -> list[int]:
    """Return the numbers of the operands with floating-point values."""
    return [i for i, x in enumerate(tensors) if x.is_floating_point()]


@pytest.mark.parametrize("name", sorted(name for name in CASES if floating(CASES[name][0][1])))
def test_terms_of_a_sum_go_into_any_rule(name: str):
    """Operators that are not linear get the complete sum."""
    for fn, tensors in (case for case in CASES[name] if floating(case[1])):
        first = floating(tensors)[0]
        terms = replace(Spec.whole(tuple(tensors[first].shape)), partial=(("tp", "sum"),))
        check(capture(fn, tensors, Mesh.of({"tp": 2})), {first: terms})


@pytest.mark.parametrize("name", ("add", "bmm", "cat", "div", "linear", "matmul", "mm", "mul", "slice_scatter", "sub", "where"))
def test_two_operands_that_are_terms_of_sums_at_once(name: str):
    """A product of sums is not the sum of products."""
    fn, tensors = CASES[name][0]
    function = capture(fn, tensors, Mesh.of({"tp": 2}))
    terms = {i: replace(Spec.whole(tuple(tensors[i].shape)), partial=(("tp", "sum"),)) for i in floating(tensors)[:2]}
    check(function, terms)


@pytest.mark.parametrize("name", ("add", "bmm", "linear", "matmul", "mm", "mul"))
def test_terms_of_a_sum_meet_shards(name: str):
    """The second operand is sharded on the axis over which the first is a sum."""
    fn, tensors = CASES[name][0]
    function = capture(fn, tensors, Mesh.of({"tp": 2}))
    terms = replace(Spec.whole(tuple(tensors[0].shape)), partial=(("tp", "sum"),))
    for dim, n in enumerate(tensors[1].shape):
        if n > 1:
            check(function, {0: terms, 1: sharded(tensors[1].shape, dim)})


@pytest.mark.parametrize("name", ("add", "amax", "cos", "layer_norm", "mul", "rms_norm", "sum", "where"))
@pytest.mark.sample(2)
def test_padding_of_zeros(name: str):
    """The result's padding has the value that the rule gives."""
    for fn, tensors in CASES[name]:
        function = capture(fn, tensors, Mesh.of({"tp": 3}))
        for dim in range(tensors[0].dim()):
            check(function, {0: sharded(tensors[0].shape, dim, fill=0.0)}, gradients=False)


def placed(fn, x, dims: dict[int, tuple[Factor, ...]], ranks: int) -> ir.Report:
    """Run one operand with the given factors in some dims, checked by value; return the shard report."""
    spec = Spec.whole(tuple(x.shape))
    spec = replace(spec, dims=tuple(dims.get(d, dim) for d, dim in enumerate(spec.dims)))
    return check(capture(fn, (x,), Mesh.of({"tp": ranks})), {0: spec})


# (view, sharded dim, its factors): none of these needs to move an entry
LOCAL_VIEWS = {
    "flatten, major sharded": (lambda x: x.flatten(0, 1), real(7, 4, 3), 0, (Factor(7, ("tp",)),)),
    "flatten, minor sharded": (lambda x: x.flatten(0, 1), real(4, 7, 3), 1, (Factor(7, ("tp",)),)),
    "flatten and back": (lambda x: x.flatten(0, 1).exp().unflatten(0, (4, 7)), real(4, 7, 3), 1, (Factor(7, ("tp",)),)),
    "split heads": (lambda x: x.unflatten(1, (5, 4)), real(3, 20), 1, (Factor(5, ("tp",)), Factor(4))),
    "split and merge heads": (lambda x: x.unflatten(1, (5, 4)).transpose(0, 1).transpose(0, 1).flatten(1), real(3, 20), 1,
                              (Factor(5, ("tp",)), Factor(4))),
    "merge inner": (lambda x: x.flatten(1, 2), real(3, 5, 4), 2, (Factor(4, ("tp",)),)),
    "behind dims that share no factor": (lambda x: x.reshape(6, 4, 7), real(4, 6, 7), 2, (Factor(7, ("tp",)),)),
    "transpose": (lambda x: x.transpose(0, 2), real(3, 5, 7), 2, (Factor(7, ("tp",)),)),
    "permute, unsqueeze": (lambda x: x.permute(2, 0, 1).unsqueeze(1), real(3, 5, 7), 1, (Factor(5, ("tp",)),)),
}


@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize("name", sorted(LOCAL_VIEWS))
def test_views_stay_local(name: str, ranks: int):
    fn, x, dim, factors = LOCAL_VIEWS[name]
    report = placed(fn, x, {dim: factors}, ranks)
    moved = [n for n in report.notes if "@tp" in n.partition(" -> ")[0] and "output" not in n]
    assert not moved, "shards moved, other than for the outputs that the test looks at"
