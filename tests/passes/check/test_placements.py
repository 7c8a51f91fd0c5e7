"""Recomputed placements: records that contradict a rule or a reshard operator are detected."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from oracle import NO_DECAY, squared_error, trained_alike
from torch import fx, nn

from compiler_trainer.capture.capture import capture
from passes.check.placements import check_placements
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec
from passes.ops import reshard
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place
from passes.sharding.shard import Shard

MESH = {"dp_shard": 2, "tp": 2}


class Net(nn.Module):
    """A table, a gated matmul and a head of uneven sizes; one operator has two results."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(5, 6)
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        gate, up = self.up(self.norm(x)).unflatten(-1, (5, 2)).unbind(-1)
        return self.head(x + self.down(torch.tanh(gate) * up))


@functools.cache
def whole(**mesh: int) -> tuple[ir.Program, ir.Context]:
    torch.manual_seed(0)
    batch = {"x": torch.randint(0, 11, (3, 4)), "y": torch.randint(0, 7, (12,))}
    cross = lambda m, b: nn.functional.cross_entropy(m(b["x"]).flatten(0, 1), b["y"])  # noqa: E731
    program, ctx = capture(Net(), cross, batch, torch.device("cpu"))
    program = replace(program, mesh=Mesh.of(mesh))
    plan = {"up.weight": {"tp": 0}, "down.weight": {"tp": 1}, "embed.weight": {"tp": 0}, "head.weight": {"tp": 0}}
    for step in (Normalize(), Place(plan)):
        program, _ = step(program, ctx)
    return program, ctx


def local(**mesh: int) -> tuple[ir.Program, ir.Program]:
    """Return the programs before and after `shard`; tests damage the latter."""
    before, ctx = whole(**mesh)
    return before, Shard()(before, ctx)[0]


@pytest.mark.parametrize("mesh", [MESH, {"tp": 3}, {"dp_shard": 4}, {"dp_replicate": 2, "tp": 4}], ids=str)
@pytest.mark.sample(2)
def test_a_partitioned_program_is_what_it_says(mesh):
    assert not list(check_placements(*local(**mesh)))


def claims(spec: Spec, mesh: Mesh):
    """Yield every placement that differs from `spec` in one step and claims something else about the value."""
    for axis, how in spec.partial:
        others = tuple(p for p in spec.partial if p[0] != axis)
        yield replace(spec, partial=others)
        yield replace(spec, partial=(*others, (axis, "max" if how == "sum" else "sum")))
    for axis in mesh.axes:
        if spec.state(axis) in ("invariant", "replicate"):
            yield replace(spec, partial=(*spec.partial, (axis, "sum")), replicate=tuple(a for a in spec.replicate if a != axis))
    for d, dim in enumerate(spec.dims):
        for k, factor in enumerate(dim):
            if factor.axes:
                bare = (*dim[:k], replace(factor, axes=factor.axes[:-1]), *dim[k + 1 :])
                yield replace(spec, dims=(*spec.dims[:d], bare, *spec.dims[d + 1 :]))


def test_every_other_claim_about_any_node_is_refused():
    assert refused_claims(*local(**MESH)) > 60


def refused_claims(before: ir.Program, after: ir.Program) -> int:
    """Assert that each other claim about each node is refused; return how many there are."""
    tried = 0
    for node in after.calls():
        right = ir.spec(node)
        if right is None or not ir.stands_for(node):
            continue
        for wrong in claims(right, after.mesh):
            ir.set_spec(node, wrong)
            assert list(check_placements(before, after)), f"%{node.name} {right} called {wrong}"
            tried += 1
        ir.set_spec(node, right)
    return tried


def remove(target) -> Callable[[ir.Program], bool]:
    """Replace a reshard operator by its operand in all users; their records stay."""

    def damage(program: ir.Program) -> bool:
        for node in program.calls():
            if node.target is target:
                (first, *_) = node.args
                if ir.example(first).shape == ir.example(node).shape:
                    before, after = ir.spec(first), ir.spec(node)
                    node.replace_all_uses_with(first)
                    if before is None and after is not None:
                        ir.set_spec(first, after)
                        ir.update(first, stands_for=ir.stands_for(node))
                    return True
        return False

    return damage


@pytest.mark.parametrize("target", [reshard.psum, reshard.pmax], ids=str)
def test_a_reduction_that_is_left_out_is_found(target):
    before, after = local(**MESH)
    assert remove(target)(after)
    assert list(check_placements(before, after))


def test_operands_exchanged_for_others_are_found():
    before, after = local(**MESH)
    node = next(n for n in after.calls() if ir.stands_for(n).startswith("mul") and len(n.all_input_nodes) == 2)
    node.args = (node.args[0], node.args[0])
    (faulty, message), *_ = check_placements(before, after)
    assert faulty is node and "has no operand that stands for" in message


def test_a_maximum_is_not_completed_by_adding():
    before, after = local(**MESH)
    node = next(n for n in after.calls() if n.target is reshard.pmax)
    node.target, node.args = reshard.psum, (*node.args, torch.float32, None)
    assert any("completes a sum over" in message for _, message in check_placements(before, after))


# ---- operators that read one value twice --------------------------------------------------------------------

TWICE = {
    "matmul": lambda x, w: x @ x,
    "outer": lambda x, w: x * torch.outer(mean := x.mean((1, 2)), mean).sum(1)[:, None, None],
    "distances": lambda x, w: torch.cdist(x, x),
    "weight": lambda x, w: x @ (w @ w),
}


class Twice(nn.Module):
    """An operator that reads one value twice, as two operands whose dims differ in their factors."""

    def __init__(self, form: str):
        super().__init__()
        self.up, self.down, self.form = nn.Linear(6, 6), nn.Linear(6, 2), form
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x):
        return self.down(TWICE[self.form](torch.tanh(self.up(x)), self.weight))


def twice(form: str, mesh: dict[str, int]) -> tuple[ir.Program, ir.Program]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6, 6), "y": torch.randn(4, 6, 2)}
    program, ctx = capture(Twice(form), squared_error, batch, torch.device("cpu"))
    for step in (Normalize(), Place({"weight": {"tp": 0}} if "tp" in mesh else {})):
        program, _ = step(replace(program, mesh=Mesh.of(mesh)), ctx)
    return program, Shard()(program, ctx)[0]


CASES = [("matmul", {"cp": 2}), ("outer", {"dp_shard": 2}), ("distances", {"cp": 2, "dp_shard": 2}),
         ("weight", {"dp_shard": 2}), ("weight", {"tp": 2})]


@pytest.mark.parametrize(("form", "mesh"), CASES, ids=str)
def test_an_operator_may_read_a_value_in_two_placements(form, mesh):
    torch.manual_seed(0)
    data = [{"x": torch.randn(3, 6, 6).double(), "y": torch.randn(3, 6, 2).double()} for _ in range(3)]
    trained_alike(Twice(form).double(), squared_error, data, mesh, NO_DECAY)


@pytest.mark.parametrize(("form", "mesh"), CASES, ids=str)
@pytest.mark.sample(2)
def test_each_operand_has_its_own_placement(form, mesh):
    before, after = twice(form, mesh)
    assert not list(check_placements(before, after))
    (node,) = (n for n in after.calls() if len({ir.stands_for(i) for i in n.all_input_nodes} - {""}) == 1 < len(n.all_input_nodes)
               and ir.stands_for(n) and n.target not in reshard.RESHARD_OPS)
    first, second, *others = node.args
    for operands in ((second, first), (first, first), (second, second)):
        node.args = (*operands, *others)
        assert list(check_placements(before, after)), operands
    node.args = (first, second, *others)
    assert refused_claims(before, after)


# ---- whole dims of any factors ------------------------------------------------------------------------------


class Regrouped(nn.Module):
    """Views 5 x 7 rows as 7 x 5: shards of these dims would be cut, but features are sharded."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        rows = torch.tanh(self.up(x)).flatten(0, 1).view(7, 5, 6) * torch.arange(5.0).to(x.dtype)[:, None]
        return self.down(rows.view(5, 7, 6))


REGROUPED_PLAN = {"up.weight": {"tp": 0}, "up.bias": {"tp": 0}, "down.weight": {"tp": 1}}


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 3}, MESH], ids=str)
@pytest.mark.sample(2)
def test_a_whole_dim_may_have_any_factors(mesh):
    torch.manual_seed(0)
    data = [{"x": torch.randn(5, 7, 6).double(), "y": torch.randn(5, 7, 2).double()} for _ in range(3)]
    trained_alike(Regrouped().double(), squared_error, data, mesh, NO_DECAY)


def regrouped() -> tuple[ir.Program, ir.Program, fx.Node]:
    """Return the programs before and after `shard`, and the second view of the latter."""
    batch = {"x": torch.randn(5, 7, 6), "y": torch.randn(5, 7, 2)}
    program, ctx = capture(Regrouped(), squared_error, batch, torch.device("cpu"))
    for step in (Normalize(), Place(REGROUPED_PLAN)):
        program, _ = step(replace(program, mesh=Mesh.of({"tp": 2})), ctx)
    after = Shard()(program, ctx)[0]
    return program, after, next(n for n in after.calls() if ir.example(n).shape == (7, 5, 3))


def test_claims_about_dims_of_other_factors_are_refused():
    before, after, _ = regrouped()
    assert not list(check_placements(before, after))
    assert refused_claims(before, after)


def test_a_shard_that_has_no_common_factors_with_a_view_is_found():
    before, after, view = regrouped()
    (rows,) = view.all_input_nodes
    ir.set_spec(rows, replace(ir.spec(rows), dims=((Factor(5, ("tp",)), Factor(7)), (Factor(6),))))
    assert any(n is view and "cut the factors" in message for n, message in check_placements(before, after))


# ---- means: a sum and a count that are each reduced once ----------------------------------------------------


def masked(model, batch):
    """Return a mean over labels, and one over odd labels as a metric."""
    logits, labels = model(batch["x"]).flatten(0, 1), batch["y"]
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    odd = labels % 2
    return (losses * (labels > 0)).sum() / (labels > 0).sum(), {"odd": (losses * odd).sum() / odd.sum()}


def means(**mesh: int) -> tuple[ir.Program, ir.Program, list]:
    """Return the programs before and after `shard`, and the quotients of the latter."""
    torch.manual_seed(0)
    batch = {"x": torch.randint(0, 11, (3, 4)), "y": torch.randint(0, 7, (12,))}
    program, ctx = capture(Net(), masked, batch, torch.device("cpu"))
    program = replace(program, mesh=Mesh.of(mesh))
    for step in (Normalize(), Place({})):
        program, _ = step(program, ctx)
    after = Shard()(program, ctx)[0]
    return program, after, [n for n in after.calls() if n.target is torch.ops.aten.div.Tensor and not ir.example(n).dim()]


def reduction_under(node):
    """Return the sum over ranks from which casts and other operators of one operand make a value."""
    while node.target is not reshard.psum:
        (node,) = node.all_input_nodes
    return node


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_shard": 2, "cp": 2}], ids=str)
def test_a_mean_is_a_sum_and_a_count_that_are_each_reduced(mesh):
    before, after, quotients = means(**mesh)
    assert len(quotients) == 2 and all(reduction_under(n) for quotient in quotients for n in quotient.all_input_nodes)
    assert not list(check_placements(before, after))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("parts", [[0], [1], [0, 1]], ids=["sum", "count", "mean of means"])
def test_a_sum_or_count_of_one_rank_is_no_part_of_a_mean(parts, number):
    """The records after the fault are right; it is the division that cannot have such an operand."""
    before, after, quotients = means(dp_shard=2)
    operands = [reduction_under(quotients[number].all_input_nodes[part]) for part in parts]
    for node in operands:
        (term, *_) = node.args
        ir.set_spec(term, replace(ir.spec(node), partial=(("dp_shard", "sum"),)))
        ir.update(term, stands_for=ir.stands_for(node))
        node.replace_all_uses_with(term)
        after.graph.erase_node(node)
    findings = [message for _, message in check_placements(before, after)]
    assert findings and ("not linear" in findings[0] or parts == [0])


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("part", [0, 1], ids=["sum", "count"])
def test_a_sum_or_count_that_is_reduced_twice_is_found(part, number):
    before, after, quotients = means(dp_shard=2)
    node = reduction_under(quotients[number].all_input_nodes[part])
    with after.graph.inserting_before(node):
        first = ir.copy_node(after.graph, node, {n: n for n in node.all_input_nodes})
    node.args = (first, *node.args[1:])
    assert any("takes partial on 'dp_shard', it gets invariant" in message for _, message in check_placements(before, after))


def test_a_value_that_lost_its_placement_is_not_resharded():
    before, after, quotients = means(dp_shard=2)
    node = reduction_under(quotients[0].all_input_nodes[1])
    ir.set_spec(node.args[0], None)
    assert any("stands for the same value but has no placement" in message for _, message in check_placements(before, after))
