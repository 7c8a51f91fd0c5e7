"""Experts spread over ranks (`mesh.ep`): each way to send rows gives the results of one device."""

from __future__ import annotations

import math

import pytest
import torch
from mixture import TOP, WIDTH, Dropping, grouped, mixture, sequences
from oracle import (
    ADAMW,
    EXACT,
    LRS,
    assert_same,
    compile_lockstep,
    squared_error,
    train_plainly,
    train_step,
    trained_alike,
)
from stored_state import saved
from sweeps import in_turn, quick
from torch import nn

import compiler_trainer as ct
from compiler_trainer import checkpoint, request
from compiler_trainer.config.errors import UserError
from passes.communication.node_order import between, in_flight
from passes.cost.cluster import Cluster, Links
from passes.cost.predict import Prices
from passes.cost.rates import Curve, Rates
from passes.ir import ir
from passes.ir.machine import Balance
from passes.ir.mesh import Mesh
from passes.ops import reshard, routed
from passes.torch_private import c10d
from passes.trace.abstract_eval import recorded

MESHES = (
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 4, "ep": 4},
    {"dp_shard": 4, "ep": 2},
    {"dp_shard": 2, "ep": 2, "tp": 2},
    {"dp_shard": 2, "tp": 2, "ep": 4},
    {"cp": 2, "ep": 2},
    {"dp_shard": 2, "cp": 2, "ep": 2},
    {"dp_shard": 2, "cp": 2, "ep": 4},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"tp": 2, "ep": 2},
)
MODELS = ({}, {"biases": True, "counts": "comparing"}, {"favoured": 5}, {"experts": 3}, {"back": "put"})


class Layers(nn.Module):
    """Two layers whose tokens all go to the first of four experts."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2, 4, 3, 3))
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        rows = x.flatten(0, 1)
        for i in range(2):
            ids, perm = torch.zeros_like(rows[:, 0], dtype=torch.int64).sort()
            ends = torch.histc(ids.double(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
            rows = rows + grouped(rows[perm], self.weights[i], ends)[perm.argsort()]
        return self.last(rows.view_as(x))


def spread(mesh, dispatch="auto", model=None, sizes=(4, 6), **passes):
    programs = {}
    compile_lockstep(model or mixture(), squared_error, sequences(*sizes)[0], mesh,
                     passes={"moe": {"dispatch": dispatch}} | passes,
                     observe=lambda program, record: programs.setdefault(record.name, program))
    return programs


@pytest.mark.parametrize(("mesh", "dispatch", "changes", "sizes"),
                         in_turn(MESHES, ("all_gather", "dropless"), MODELS, ((3, 5), (4, 6))))
@pytest.mark.sample(2)
def test_updates_are_those_of_experts_one_after_another(mesh, dispatch, changes, sizes):
    trained_alike(mixture(**changes), squared_error, sequences(*sizes), mesh, passes={"moe": {"dispatch": dispatch}})


@pytest.mark.parametrize(("mesh", "dispatch"), quick([(m, d) for m in (MESHES[2], MESHES[4], MESHES[6])
                                                      for d in ("all_gather", "dropless")], 1))
@pytest.mark.full
def test_numeric_verification_agrees(mesh, dispatch):
    trained_alike(mixture(biases=True), squared_error, sequences(3, 5), mesh,
                  passes={"moe": {"dispatch": dispatch}, "verify": "numeric"})


class AllExperts(nn.Module):
    """Sends all tokens through all of six experts and sums the results, like Llama 4 in `transformers`."""

    def __init__(self):
        super().__init__()
        self.router, self.last = nn.Linear(3, 6), nn.Linear(3, 2)
        self.up, self.down = (nn.Parameter(torch.randn(6, *shape)) for shape in ((3, 4), (4, 3)))

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights = self.router(rows).softmax(-1).t().unsqueeze(-1)
        out = torch.bmm(torch.bmm(rows.expand(6, -1, -1) * weights, self.up).relu(), self.down).sum(0)
        return self.last((rows + out).view_as(x))


@pytest.mark.parametrize("mesh", quick((*MESHES[:5], MESHES[6]), 1, 3))
def test_experts_that_take_all_tokens_are_spread(mesh):
    torch.manual_seed(0)
    model = AllExperts().double()
    trained_alike(model, squared_error, sequences(3, 5), mesh)
    places = {input_.name: input_.spec for input_ in spread(mesh, model=model)["place"].inputs}
    assert {places[name].dims[0][0].axes[0] for name in ("up", "down")} == {Mesh.of(mesh).experts_over}


class Offset(nn.Module):
    """Its experts map zeros to other numbers: cos(0) is one."""

    def __init__(self):
        super().__init__()
        self.router, self.weights = nn.Linear(3, 6), nn.Parameter(torch.randn(6, 3, 2))

    def forward(self, x):
        rows = x.flatten(0, 1)
        ids, perm = self.router(rows).argmax(-1).sort()
        ends = torch.histc(ids.double(), bins=6, min=0, max=5).cumsum(0, dtype=torch.int32)
        return torch.cos(grouped(rows[perm], self.weights, ends))[perm.argsort()].unflatten(0, x.shape[:2])


@pytest.mark.parametrize("dispatch", ("all_gather", "dropless"))
def test_rows_of_others_and_empty_places_add_nothing(dispatch):
    torch.manual_seed(0)
    trained_alike(Offset().double(), squared_error, sequences(3, 5), MESHES[2], {"name": "sgd", "max_norm": None},
                  passes={"moe": {"dispatch": dispatch}})


def test_heads_that_are_multiplied_one_by_one_are_no_experts():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.last = nn.Parameter(torch.randn(4, 3, 3)), nn.Linear(12, 2)

        def forward(self, x):
            rows = torch.bmm(x.flatten(0, 1).expand(4, -1, -1), self.heads)
            return self.last(rows.transpose(0, 1).flatten(1)).unflatten(0, x.shape[:2])

    with pytest.raises(ct.UserError, match="there are no experts to spread"):
        compile_lockstep(Heads().double(), squared_error, sequences()[0], MESHES[0])


@pytest.mark.full
def test_state_moves_between_meshes(tmp_path):
    """6 experts on 4 ranks, then on 2, on 4 with tp, on one: training continues equally, moments included."""
    model, data, losses_by_mesh = mixture(), sequences(), []
    first = compile_lockstep(model, squared_error, data[0], MESHES[1])
    first(data[0])
    path = saved(first, tmp_path)
    for mesh in (MESHES[1], MESHES[0], MESHES[4], {}):
        step = compile_lockstep(mixture(), squared_error, data[0], mesh)
        checkpoint.load(step, checkpoint.opened(path))
        losses_by_mesh.append([step(batch)["loss"] for batch in data[1:]])
    assert all(abs(a - b) < EXACT for losses in losses_by_mesh for a, b in zip(losses, losses_by_mesh[0], strict=True))


def test_an_expert_without_a_row_has_no_gradient():
    model = mixture(favoured=2)
    with torch.no_grad():
        model.router.bias[4] -= 50.0
    for dispatch in ("all_gather", "dropless"):
        step = trained_alike(model, squared_error, sequences(), MESHES[0], {"name": "sgd", "max_norm": None},
                             passes={"moe": {"dispatch": dispatch}})
        assert torch.equal(step.state_dict()["up"][4], model.up.detach()[4])


def test_rows_of_microbatches_that_are_computed_again():
    trained_alike(nn.Sequential(mixture()), squared_error, sequences(), MESHES[0], microbatches=2,
                  passes={"moe": {"dispatch": "dropless"}, "remat": {"modules": {"0": "recompute"}}})


# ---- rows beyond capacity -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "factor"), quick([(m, f) for m in (MESHES[0], MESHES[1], MESHES[2], MESHES[8])
                                                    for f in (0.5, 1.25)], 0, 5))
def test_rows_beyond_the_capacity_are_dropped_and_counted(mesh, factor):
    sources, owners = Mesh.of(mesh).world_size, mesh["ep"]
    capacity = math.ceil(factor * 8 * 6 // sources * TOP / owners)
    torch.manual_seed(0)
    reference = Dropping(sources, owners, capacity, favoured=2).double()
    metrics, state = train_plainly(reference, squared_error, sequences(8, 6), ADAMW)
    step = compile_lockstep(mixture(favoured=2), squared_error, sequences(8, 6)[0], mesh,
                            passes={"moe": {"dispatch": "bounded", "capacity_factor": factor}})
    for batch, lr, wanted in zip(sequences(8, 6), LRS, metrics):
        with torch.no_grad():
            reference.load_state_dict(step.state_dict())
            reference(batch["x"])
        assert_same(step(batch, lr), wanted | {"dropped_rows": float(reference.dropped)}, EXACT)
        assert reference.dropped > 0
    assert_same(step.state_dict(), state, EXACT)


@pytest.mark.parametrize("mesh", (MESHES[2], MESHES[4], MESHES[7]))
@pytest.mark.sample(2)
def test_nothing_is_dropped_where_there_is_room(mesh):
    data = sequences(3, 5)
    step = compile_lockstep(mixture(), squared_error, data[0], mesh, microbatches=1,
                            passes={"moe": {"dispatch": "bounded", "capacity_factor": 8}})
    metrics, _ = train_plainly(mixture(), squared_error, data)
    for values, wanted in zip(train_step(step, data), metrics, strict=True):
        assert_same(values, wanted | {"dropped_rows": 0.0}, EXACT)


def test_rows_dropped_in_all_layers_and_microbatches_are_counted():
    model = nn.Sequential(nn.Linear(3, 3), Layers()).double()
    step = compile_lockstep(model, squared_error, sequences(8, 6)[0], MESHES[0], microbatches=2,
                            passes={"moe": {"dispatch": "bounded", "capacity_factor": 0.5}})
    # a layer has 48 rows, all for one owner; 2 ranks in 2 microbatches have room for 0.5 * 12 / 2 each
    assert step(sequences(8, 6)[0])["dropped_rows"] == 2 * (48 - 4 * 3)


def test_rows_of_padding_take_no_room():
    model = nn.Sequential(nn.Linear(3, 3), Layers()).double()
    data = sequences(2, 5)[0]  # three tokens of a sequence on each rank; the second rank's last one is padding
    is_kept = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 0]])[..., None]  # an owner has room for 3 of each rank's 6 and 4

    def plainly(x):
        rows = model[0](x)
        for weight in model[1].weights:
            rows = rows + is_kept * (rows @ weight[0])
        return model[1].last(rows)

    step = compile_lockstep(model, squared_error, data, MESHES[5], passes={"moe": {"dispatch": "bounded", "capacity_factor": 1.0}})
    metrics = step(data)
    assert metrics["dropped_rows"] == 2 * (6 - 3 + 4 - 3)
    assert metrics["loss"] == pytest.approx(squared_error(plainly, data).item(), abs=1e-12)


@pytest.mark.parametrize(("mesh", "chunks", "changes", "sizes"),
                         in_turn(MESHES[:8:2], (2, 3), ({}, {"biases": True}, {"favoured": 5}), ((3, 5), (4, 6))))
@pytest.mark.sample(2)
def test_rows_that_travel_in_chunks(mesh, chunks, changes, sizes):
    trained_alike(mixture(**changes), squared_error, sequences(*sizes), mesh,
                  passes={"moe": {"dispatch": "dropless", "chunks": chunks}})


@pytest.mark.full
def test_chunks_drop_the_rows_that_one_buffer_would():
    def trained(chunks):
        step = compile_lockstep(mixture(), squared_error, sequences(8, 6)[0], MESHES[2],
                                passes={"moe": {"dispatch": "bounded", "capacity_factor": 0.7, "chunks": chunks}})
        return train_step(step, sequences(8, 6)), step.state_dict()

    (wanted, state), (metrics, other_state) = trained(1), trained(2)
    assert wanted[0]["dropped_rows"] > 0
    for metric, expected in zip(metrics, wanted, strict=True):
        assert_same(metric, expected, EXACT)
    assert_same(other_state, state, EXACT)


@pytest.mark.parametrize(("chunks", "forward", "backward"), (
    (1, [False, False], [False, True]),
    (2, [False, True, True, False], [False, True, True, True]),
))
def test_a_chunk_travels_beside_the_products_of_another(monkeypatch, chunks, forward, backward):
    """All exchanges of rows but the first and the last run during matmuls of experts."""
    monkeypatch.setattr(request, "balance_of", lambda *_: Balance(8, 1e-3))  # makes matmuls short compared with the transfer of small rows
    program = spread(MESHES[2], "dropless", moe={"dispatch": "dropless", "chunks": chunks})["overlap"]
    overlaps = {"forward": [], "backward": []}
    for start, wait in in_flight(program.graph.nodes):
        if start.target is c10d.all_to_all_single.default and ir.example(start).numel() > 24:  # rows, not their weights
            beside = {routed.grouped_mm, routed.grouped_outer} & {n.target for n in between(start, wait)}
            overlaps[ir.phase(start)].append(bool(beside))
    assert overlaps == {"forward": forward, "backward": backward}


@pytest.mark.parametrize(("load", "times"), ((1.0, 1.0), (1.5, 1.5), (9.0, 2.0)))
@pytest.mark.sample(2)
def test_all_wait_for_the_rank_that_gets_most_rows(load, times):
    """It gets twice the mean; buffers of the worst case have room for that here."""
    program = spread(MESHES[2], "dropless", sizes=(8, 6))["joint"]
    flat = Curve.flat(1.0)
    cluster = Cluster(2, Rates({torch.float64: flat}, flat, flat, flat, flat), Links(1.0, 1.0), expert_load=load)
    costs = Prices(program, recorded(), cluster)
    products = [n for n in program.calls() if n.target in (routed.grouped_mm, routed.grouped_outer)]
    rows = 8 * 6 * TOP // 4  # mean per rank
    matrices = {n: ir.example(n if n.target is routed.grouped_outer else n.args[1]).shape[1:] for n in products}
    wanted = {n: times * 2 * rows * math.prod(shape) for n, shape in matrices.items()}
    assert {n: costs.flops(n) for n in products} == wanted


# ---- placements and bytes sent ------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "count"), ((MESHES[0], 3), (MESHES[1], 2), (MESHES[2], 3), (MESHES[4], 2), (MESHES[7], 2)))
@pytest.mark.sample(2)
def test_a_rank_holds_its_own_experts(mesh, count):
    """With 6 experts on 4 ranks, three hold two and the last none; the remaining `dp_shard` splits another dim."""
    program = spread(mesh)["place"]
    places = {input_.name: input_.spec for input_ in program.inputs}
    for name in ("up", "down"):
        shape = places[name].local_shape(program.mesh)
        assert shape[0] == count
        assert math.prod(shape) <= 2 * math.prod(places[name].shape) // program.mesh.world_size
    assert program.mesh.stored_over in places["last.weight"].sharded


def sent(program, mesh, kinds, width):
    """Return the rows of so many numbers that a rank sends to each other rank, as (axis, rows)."""
    sizes = []
    for node in program.calls():
        if node.target in kinds and ir.example(node).shape[-1:] == (width,):
            parts = Mesh.of(mesh)[axis := next(str(a) for a in node.args if isinstance(a, str))]
            largest = max(ir.example(node).numel(), ir.example(node.args[0]).numel())
            sizes.append((axis, largest // width // parts))
    return sizes


@pytest.mark.parametrize("mesh", quick((MESHES[0], MESHES[1], MESHES[2], MESHES[4]), 1, 3))
@pytest.mark.sample(1)
def test_bytes_are_those_of_the_formula(mesh):
    """Rows go there and back, in forward and backward: four times; weights of choices travel separately."""
    tokens, owners = 8 * 6 // Mesh.of(mesh).world_size, mesh["ep"]
    per_owner = -(-6 // owners)
    rows = {"dropless": tokens * min(TOP, per_owner), "bounded": math.ceil(1.25 * tokens * TOP / owners)}
    for dispatch, capacity in rows.items():
        program = spread(mesh, dispatch, sizes=(8, 6))["joint"]
        assert sent(program, mesh, (reshard.all_to_all,), WIDTH).count((Mesh.of(mesh).experts_over, capacity)) == 4
    if "tp" not in mesh:
        program = spread(mesh, "all_gather", sizes=(8, 6))["joint"]
        kinds = (reshard.all_gather, reshard.reduce_scatter, reshard.all_gather_invariant)
        moved = [rows for axis, rows in sent(program, mesh, kinds, WIDTH) if axis == Mesh.of(mesh).experts_over]
        assert [rows for rows in moved if rows == tokens] == [tokens] * 4


@pytest.mark.parametrize("mesh", quick((MESHES[0], MESHES[2], MESHES[6], MESHES[8]), 1, 2))
def test_a_gradient_is_reduced_once_and_not_over_the_owners(mesh):
    program = spread(mesh, "dropless")["optimize"]
    reductions = [n for n in program.calls() if n.target in (reshard.reduce_scatter, reshard.psum)
                  and ir.example(n).dim() == 3]
    expert_axes = set(program.mesh.experts)
    assert all(expert_axes.isdisjoint(program.mesh.over(str(a))) for n in reductions for a in n.args if isinstance(a, str))
    other_axes = [axis for axis in program.mesh.axes if axis not in expert_axes]
    assert len(reductions) == 2 * len(other_axes)


# ---- refusals and findings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "message"), (
    ({"dp_shard": 4, "ep": 3}, "mesh.ep: size is 3.*dp_shard=4 it may be 2 or 4"),
    ({"cp": 4, "ep": 2}, "mesh.ep: size is 2.*cp=4 it may be 4"),
    ({"ep": 2}, "mesh.ep: size is 2.*there is one rank"),
))
def test_a_size_that_does_not_divide_is_refused(mesh, message):
    with pytest.raises(UserError, match=message):
        compile_lockstep(mixture(), squared_error, sequences()[0], mesh)


@pytest.mark.parametrize("dim", (0, 1))
def test_a_plan_that_splits_experts_where_they_are_spread_is_refused(dim):
    with pytest.raises(ct.UserError, match="up is sharded on tp, but mesh.ep spreads experts over it already"):
        spread(MESHES[4], shard={"plan": {"up": {"tp": dim}}})


@pytest.mark.parametrize("plan", quick(({"up": {"tp": 0}, "down": {"tp": 0}}, {"up": {"tp": 2}}), 0))
def test_a_plan_may_split_experts_in_any_dim(plan):
    trained_alike(mixture(biases=True), squared_error, sequences(3, 5), MESHES[3],
                  passes={"moe": {"dispatch": "dropless"}, "shard": {"plan": plan}})


def test_a_model_without_experts_is_refused():
    with pytest.raises(ct.UserError, match="mesh.ep: there are no experts to spread"):
        compile_lockstep(nn.Linear(3, 2).double(), squared_error, sequences()[0], {"dp_shard": 2, "ep": 2})


class Running(nn.Module):
    """Depends on the order of rows."""

    def forward(self, rows):
        return rows.cumsum(0)


def test_experts_that_mind_the_order_of_rows_are_refused():
    with pytest.raises(ct.UserError, match="mesh.ep: these experts cannot be spread.*cumsum of them"):
        compile_lockstep(mixture(between=Running()), squared_error, sequences()[0], MESHES[0])


def test_tokens_that_are_not_those_of_the_batch_are_gathered_or_refused():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mixture()

        def forward(self, x):
            return self.inner(x.repeat_interleave(2, 1))[:, ::2]

    trained_alike(Half(), squared_error, sequences(), MESHES[0])
    with pytest.raises(ct.UserError, match="passes.moe.dispatch: dropless: these tokens are not those of a batch"):
        spread(MESHES[0], "dropless", Half())


@pytest.mark.parametrize(("mesh", "dispatch"), (({"dp_shard": 2}, "dropless"), (MESHES[0], "auto")))
def test_chunks_of_what_does_not_travel_are_refused(mesh, dispatch):
    with pytest.raises(UserError, match="passes.moe.chunks: 2 has no effect: no rows travel; set mesh.ep"):
        spread(mesh, moe={"dispatch": dispatch, "chunks": 2})


def test_a_run_whose_rows_travel_in_chunks_is_evaluated_on_one_rank():
    batch = sequences()[0]
    passes = {"moe": {"dispatch": "dropless", "chunks": 2}}
    step = ct.compile_step(mixture(), squared_error, batch, passes=passes, train=False)
    assert step.evaluate(batch) == pytest.approx(squared_error(mixture(), batch).item(), rel=1e-12)


def test_buffers_that_may_not_hold_all_are_refused():
    ids = torch.empty(24, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="may send an owner 12 rows, there is room for 11"):
        routed.sends(ids, [6, 2, 2, 2, 11, False, 0, 1])
    assert routed.sends(ids, [6, 2, 2, 2, 11, True, 0, 1]).shape == (2, 2, 11)


def test_the_report_says_which_way_rows_travel_and_why():
    step = compile_lockstep(mixture(), squared_error, sequences()[0], MESHES[0])
    notes = next(p["report"]["notes"] for p in step.report["passes"] if p["name"] == "experts")
    assert "all_gather 12, dropless 24, bounded 15; all_gather sends the fewest without dropping any" in notes[0]
