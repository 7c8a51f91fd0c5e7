"""Rows sorted by expert: each rank sorts those of its own tokens, with the results of one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from mixture import INNER, TOP, WIDTH, grouped, mixture, sequences
from oracle import NO_DECAY, compile_lockstep, squared_error, trained_alike
from rule_harness import capture, check, sharded
from sweeps import in_turn, quick
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from passes import rules
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.order import ZIGZAG
from passes.ir.spec import Factor, Spec
from passes.ops import reshard, routed
from passes.rules import rule_of
from passes.sharding.propagate import _Sweep

MESHES = ({}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2},
          {"dp_replicate": 2, "dp_shard": 3}, {"tp": 4})
MODELS = ({}, {"biases": True, "counts": "comparing"}, {"back": "argsort"}, {"back": "put"}, {"favoured": 5},
          {"experts": 3})


def passes_of(step, name):
    return next(p["report"] for p in step.report["passes"] if (p["program"], p["name"]) == ("forward", name))


@pytest.mark.parametrize(("mesh", "changes", "sizes"), in_turn(MESHES, MODELS, ((4, 6), (3, 5))))
@pytest.mark.sample(2)
def test_updates_are_those_of_experts_one_after_another(mesh, changes, sizes):
    step = trained_alike(mixture(**changes), squared_error, sequences(*sizes), mesh)
    assert passes_of(step, "experts")["counts"] == {"sorted by expert": 1}
    assert not passes_of(step, "shard")["counts"]["unknown"]


def test_an_expert_without_a_row_has_no_gradient():
    model = mixture(favoured=2)
    with torch.no_grad():
        model.router.bias[4] -= 50.0
    step = trained_alike(model, squared_error, sequences(), {"dp_shard": 2}, {"name": "sgd", "max_norm": None})
    assert torch.equal(step.state_dict()["up"][4], model.up.detach()[4])


@pytest.mark.parametrize("mesh", quick(({"dp_shard": 2, "tp": 2}, {"cp": 2}), 0))
def test_numeric_verification_agrees(mesh):
    trained_alike(mixture(biases=True), squared_error, sequences(3, 5), mesh, passes={"verify": "numeric"})


def test_rows_may_be_computed_again():
    trained_alike(nn.Sequential(mixture()), squared_error, sequences(), {"dp_shard": 2},
                  passes={"remat": {"modules": {"0": "recompute"}}})


def layer(x, gates, weight, table, ids):
    """Return the pass's result for a mixture with two choices a token, of four experts."""
    way = list(routed.Way(groups=4, share=2, owners=1))
    groups = routed.groups(ids, way)
    rows = routed.expert_mm(routed.dispatch(x, ids, 2, way), weight, groups, 1.0) + routed.of_expert(table, groups)
    return routed.combine(rows * routed.dispatch(gates, ids, 1, way)[:, None], ids, way).view(-1, 2, 5).sum(1)


@pytest.mark.parametrize(("axis", "ranks"), (("dp_shard", 2), ("cp", 3), ("tp", 2)))
@pytest.mark.sample(2)
def test_each_dim_of_each_operand_sharded(axis, ranks):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((7, 3), (14,), (4, 3, 5), (4, 5))]
    tensors.append(torch.randint(0, 4, (14,), generator=generator))
    function = replace(capture(layer, tensors, Mesh.of({axis: ranks}), weights=(2, 3)), order=ZIGZAG)
    for i, tensor in enumerate(tensors):
        for dim in range(tensor.dim()):
            check(function, {i: sharded(tensor.shape, dim, axis, fill=None)})
    rows = {0: sharded((7, 3), 0, axis, None), 1: sharded((14,), 0, axis, None), 4: sharded((14,), 0, axis, None)}
    check(function, rows)
    slots = Spec(((Factor(7, (axis,)), Factor(2)),))
    check(function, rows | {1: slots, 4: slots, 2: sharded((4, 3, 5), 0, axis)})


# ---- costs --------------------------------------------------------------------------------------------------


def local_program(mesh, **passes):
    programs = {}
    compile_lockstep(mixture(), squared_error, sequences()[0], mesh, passes=passes,
                     observe=lambda program, record: programs.setdefault(record.name, program))
    return programs


def test_rows_stay_where_their_tokens_are():
    """Over data axes nothing of the size of rows is sent; over tp each token is sent once, not once a choice."""
    program = local_program({"dp_shard": 2, "tp": 2})["shard"]
    (sort,) = [n for n in program.calls() if n.target is routed.order]
    assert ir.example(sort).shape == (1, 4 * 6 * TOP // 2)
    gathers = [n for n in program.calls() if n.target in (reshard.all_gather, reshard.all_gather_invariant)]
    sent = {(str(n.args[2]), tuple(ir.example(n).shape)) for n in gathers}
    assert not {shape for _, shape in sent if WIDTH in shape and 4 * 6 * TOP in shape}
    products = [n for n in program.calls() if n.target is routed.grouped_mm]
    assert [ir.example(n).shape[1] for n in products] == [2 * -(-INNER // 2), WIDTH]  # columns, then rows, over tp


def test_gradients_are_reduced_over_tp_by_token():
    program = local_program({"dp_shard": 2, "tp": 2})["joint"]
    sums = [n for n in program.calls() if n.target is reshard.psum and "tp" in n.args]
    rows = [shape for shape in (tuple(ir.example(n).shape) for n in sums) if shape[:1] == (4 * 6 * TOP // 2,)]
    assert all(shape[1:] in ((), (1,)) for shape in rows)  # weights of choices are sent, rows are not


def test_experts_that_are_whole_over_tp_send_nothing_over_it():
    program = local_program({"tp": 2}, shard={"plan": {}})["joint"]
    assert not [n for n in program.calls() if n.target in reshard.RESHARD_OPS and "tp" in n.args]


def test_each_weight_of_experts_is_gathered_once_a_use_and_reduced_once():
    program = local_program({"dp_shard": 2, "tp": 2})["joint"]
    reduced = [n for n in program.calls() if n.target is reshard.reduce_scatter and ir.example(n).dim() >= 3
               and str(n.args[2]) == "dp_shard"]
    assert len(reduced) == 2
    assert not [n for n in program.calls() if n.target is reshard.psum and ir.example(n).dim() >= 3]


def test_products_of_experts_run_in_one_dtype():
    step_dtypes = []
    compile_lockstep(mixture().float(), squared_error, {k: v.float() for k, v in sequences()[0].items()},
                     {"dp_shard": 2, "tp": 2}, passes={"cast": {"param_dtype": "bfloat16"}},
                     observe=lambda program, record: step_dtypes.extend(
                         {ir.example(a).dtype for a in n.args[:2]} for n in program.calls()
                         if n.target in (routed.grouped_mm, routed.grouped_outer)))
    assert step_dtypes and all(dtypes == {torch.bfloat16} for dtypes in step_dtypes)


# ---- unsupported models -------------------------------------------------------------------------------------


class Running(nn.Module):
    """Depends on the order of rows: adds each row to those before it."""

    def forward(self, rows):
        return rows.cumsum(0)


class Centred(nn.Module):
    """Depends on the other rows."""

    def forward(self, rows):
        return rows - rows.mean(0)


@pytest.mark.parametrize("between", (Running(), Centred()), ids=lambda m: type(m).__name__)
def test_rows_that_mind_their_order_are_gathered_and_the_report_says_why(between):
    step = trained_alike(mixture(between=between), squared_error, sequences(), {"dp_shard": 2})
    report = passes_of(step, "experts")
    assert report["counts"] == {"sorted by expert": 0}
    (note,) = report["notes"]
    assert re.fullmatch(r"%sort\w* \(mixture\.py:\d+\): rows sorted by expert are gathered: %\w+ .*", note)


def with_bias(bias_of: Callable[[Tensor, Tensor, Tensor], Tensor], experts: int = 6, after: bool = False):
    """Return a mixture whose rows, or its slots `after` all, get `bias_of(table, sorted ids, ids)`."""
    model = mixture()
    model.bias = nn.Parameter(torch.randn(experts, WIDTH, dtype=torch.float64))

    def layer(self, x):
        ids = self.router(x).topk(TOP)[1].reshape(-1)
        in_order, perm = ids.sort(stable=True)
        rows = grouped(x[perm // TOP], self.up.transpose(1, 2), self.counts(ids, 6).cumsum(0, dtype=torch.int32))
        bias, rows = bias_of(self.bias, in_order, ids), rows[:, :WIDTH]
        slots = self.back(rows, perm) + bias if after else self.back(rows + bias, perm)
        return slots.view(-1, TOP, WIDTH).sum(1)

    model.experts = layer.__get__(model)
    return model


@pytest.mark.parametrize(("bias_of", "after", "count"), (
    (lambda table, in_order, ids: table[in_order], False, 1),
    (lambda table, in_order, ids: table[ids], False, 0),
    (lambda table, in_order, ids: table[ids.int()], False, 0),
    (lambda table, in_order, ids: table[ids], True, 1),
), ids=("sorted", "unsorted", "cast", "after"))
def test_a_table_looked_up_by_unsorted_ids_is_not_among_the_sorted_rows(bias_of, after, count):
    step = trained_alike(with_bias(bias_of, after=after), squared_error, sequences(), {"dp_shard": 2}, NO_DECAY)
    assert passes_of(step, "experts")["counts"] == {"sorted by expert": count}


@pytest.mark.parametrize("mesh", ({"dp_shard": 2}, {"dp_shard": 2, "ep": 2}))
def test_a_table_of_more_than_the_experts_is_not_spread_with_them(mesh):
    model = with_bias(lambda table, in_order, ids: table[in_order], experts=9)
    if "ep" in mesh:
        with pytest.raises(UserError, match="mesh.ep: these experts cannot be spread.*looks up one of 9 rows, not of 6 experts"):
            compile_lockstep(model, squared_error, sequences()[0], mesh)
    else:
        step = trained_alike(model, squared_error, sequences(), mesh, NO_DECAY)
        assert passes_of(step, "experts")["counts"] == {"sorted by expert": 0}


def test_bins_that_are_no_experts_are_left_as_they_are():
    step = trained_alike(mixture(counts="pairs"), squared_error, sequences(), {"dp_shard": 2})
    assert passes_of(step, "experts")["counts"] == {"sorted by expert": 0}


class Halves(nn.Module):
    """A matmul of rows in given groups: half of them each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 2))
        self.register_buffer("ends", torch.tensor([12, 24], dtype=torch.int32))

    def forward(self, x):
        return grouped(x.flatten(0, 1), self.weight, self.ends).view(4, 6, 2)


def test_rows_with_ends_of_their_own_are_whole():
    torch.manual_seed(0)
    trained_alike(Halves().double(), squared_error, sequences(), {"dp_shard": 2})


# ---- faults that a verifier finds ----------------------------------------------------------------------------


def test_counts_of_all_ranks_are_refused_where_each_rank_has_its_own_rows(monkeypatch):
    original = rule_of

    def complete(node):
        rule = original(node)
        return replace(rule, place=lambda placements, mesh: {"t": ()}) if node.target is routed.groups else rule

    monkeypatch.setattr("passes.sharding.propagate.rule_of", complete)
    with pytest.raises(ir.CompileError, match="rows in a rank's own order are resharded"):
        compile_lockstep(mixture(), squared_error, sequences()[0], {"dp_shard": 2})


def test_an_order_that_is_cut_into_shards_is_refused(monkeypatch):
    """Ranks that all have the ids sort all of them; a shard of that order does not match a rank's tokens."""
    placed = rules.routed._place  # places tokens where their ids are
    monkeypatch.setattr(rules.routed, "_place", lambda node, way, placements, mesh: placed(node, way, placements[:1], mesh))
    model = mixture()
    model.experts = routed_alike.__get__(model)
    with pytest.raises(ir.CompileError, match="rows in a rank's own order are resharded"):
        compile_lockstep(model, squared_error, sequences()[0], {"dp_shard": 2})
    monkeypatch.undo()
    trained_alike(model, squared_error, sequences(), {"dp_shard": 2}, NO_DECAY)


def routed_alike(self, x):
    """Send tokens to experts in turn, regardless of their values."""
    ids, perm = (torch.arange(x.shape[0] * TOP) % 3).sort()
    ends = self.counts(ids, 6).cumsum(0, dtype=torch.int32)
    gate, up = grouped(x[perm // TOP], self.up.transpose(1, 2), ends).chunk(2, -1)
    rows = grouped(gate * up, self.down, ends)
    return self.back(rows, perm).view(-1, TOP, WIDTH).sum(1)


def reordered(tokens: bool):
    """Return a mixture whose tokens, or else whose ids, are sorted by their place in a sequence, then by sequence."""
    model = mixture()

    def reorder(x):
        return x.view(3, 7, -1).transpose(0, 1).reshape(x.shape)

    def layer(self, x):
        ids = self.router(x).topk(TOP)[1]
        x, ids = (reorder(x), ids.reshape(-1)) if tokens else (x, reorder(ids).reshape(-1))
        perm = ids.sort(stable=True)[1]
        rows = grouped(x[perm // TOP], self.up.transpose(1, 2), self.counts(ids, 6).cumsum(0, dtype=torch.int32))
        return self.back(rows[:, :WIDTH], perm).view(-1, TOP, WIDTH).sum(1)

    model.experts = layer.__get__(model)
    return model


@pytest.mark.parametrize("tokens", (True, False))
@pytest.mark.parametrize("mesh", ({"dp_shard": 2}, {"cp": 2}, {"dp_shard": 2, "ep": 2}))
def test_tokens_and_ids_in_different_orders(mesh, tokens):
    """Their dims have factors 3 x 7 and 7 x 3, so that shards of the one are none of the other."""
    step = trained_alike(reordered(tokens), squared_error, sequences(3, 7), mesh, NO_DECAY)
    assert passes_of(step, "experts")["counts"] == {"sorted by expert": 1}


@pytest.mark.parametrize("tokens", (True, False))
def test_sorted_tokens_that_are_cut_into_shards_are_refused(monkeypatch, tokens):
    """Tokens that are placed by their own factors are whole, their groups are not."""
    rightly = _Sweep.priority
    monkeypatch.setattr(_Sweep, "priority", lambda sweep, operands, rule: rightly(sweep, operands, replace(rule, place=None)))
    with pytest.raises(ir.CompileError, match="rows in a rank's own order are resharded"):
        compile_lockstep(reordered(tokens), squared_error, sequences(3, 7)[0], {"dp_shard": 2})
