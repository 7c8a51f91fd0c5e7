"""Matmuls next to the steps of a ring: the same values, uneven sizes included, and used only if a step gets shorter."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from joint_programs import Tiny, alike, joint, run_on
from oracle import batches, llama, llama_loss, trained_alike
from torch import fx

from passes.check.copies import check_copies
from passes.check.runner import run_passes
from passes.check.values import Numbers, check_kept
from passes.check.verify import check_waits
from passes.communication import async_tp, ring_matmuls
from passes.communication.async_tp import AsyncTP
from passes.communication.layer_starts import matmuls_of
from passes.communication.node_order import between, in_flight
from passes.communication.overlap import Overlap
from passes.cost.cluster import Cluster, Links
from passes.cost.rates import Curve, Rates
from passes.ir import ir
from passes.ir.operators import kind_of, name_of
from passes.ir.spec import Factor, Spec
from passes.ops import reshard
from passes.ops.shift import SHIFTS
from passes.sharding.collectives import Collectives
from passes.trace.abstract_eval import abstract_eval
from passes.trace.functions import as_meant

aten = torch.ops.aten
F32 = torch.float32
RINGS = {"communication": {"async_tp": "all"}}
ALL = AsyncTP("all")


# ---- whole steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
@pytest.mark.sample(2)
def test_updates_are_those_of_eager_pytorch(tp):
    """Train with 7 tokens a sample and features that nothing divides; of 8 ranks one has no token."""
    step = trained_alike(llama(), llama_loss, batches(), {"tp": tp}, passes=RINGS)
    (report,) = [done["report"] for done in step.report["passes"] if done["name"] == "async_tp"]
    counts = report["counts"]
    assert counts["gathers"] + counts["scatters"] == counts["sites"] >= 6


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "passes", "microbatches"),
    [
        ({"dp_shard": 2, "tp": 2}, {"remat": {"policy": "full"}}, 1),
        ({"dp_replicate": 2, "tp": 3}, {"verify": "numeric"}, 1),
        ({"cp": 2, "tp": 2}, {"remat": {"policy": "selective"}}, 1),
        ({"dp_shard": 2, "tp": 2}, {"accumulate": {"gather": "step", "reduce": "step"}}, 5),
        ({"pp": 2, "tp": 3}, {}, 5),
    ],
    ids=str,
)
def test_rings_work_beside_other_axes_and_passes(mesh, passes, microbatches):
    trained_alike(llama(2), llama_loss, batches(), mesh, microbatches=microbatches, passes=RINGS | passes)


@pytest.mark.full
def test_products_of_two_pipeline_stages_are_no_ring():
    """Check a layer whose stages are cut between the matmuls of one gathered value."""
    trained_alike(llama(1), llama_loss, batches(), {"pp": 2, "tp": 2}, passes=RINGS)


MESH = (("tp", 3),)


def test_every_site_of_a_joint_program_becomes_a_ring_with_products_beside_each_step():
    program, ctx = joint(MESH)
    after, records = run_passes("step", (ALL,), program, ctx)
    counts = records[-1].report.counts
    assert counts["sites"] == counts["gathers"] + counts["scatters"] > 0
    ordered, _ = Overlap()(Collectives()(after, ctx)[0], ctx)
    products = matmuls_of(ordered.graph)
    steps = [pair for pair in in_flight(ordered.graph.nodes) if kind_of(pair[0]) == "shift"]
    assert len(steps) == 2 * counts["sites"]
    assert all(any(node in products for node in between(*pair)) for pair in steps)


# ---- small programs ----------------------------------------------------------------------------------


def split(*shape: int, dim: int | None = None) -> Spec:
    return Spec(tuple((Factor(n, ("tp",) if d == dim else ()),) for d, n in enumerate(shape)))


class Site(Tiny):
    """A program with sites of rings over three ranks, with seven rows in each of two sequences."""

    def __init__(self) -> None:
        super().__init__(tp=3)
        self.axis_index = self.input("tp", Spec((), replicate=("tp",)), "coordinate")
        with self.ctx.fake_mode:
            ir.set_value(self.axis_index, torch.empty((), dtype=torch.int64))

    def gather(self, dim: int = 1) -> fx.Node:
        shard = self.input("x", split(2, 7, 6, dim=dim), "batch")
        return self.call(reshard.all_gather, shard, dim, "tp", 3, (2, 7, 6)[dim], F32, None)

    def products(self, whole: fx.Node, *names: str) -> list[fx.Node]:
        rows = self.call(aten.view.default, whole, [14, 6])
        weights = [self.input(name, split(6, 4 + i)) for i, name in enumerate(names)]
        return [self.call(aten.mm.default, rows, weight) for weight in weights]

    def scatter(self, terms: int, dim: int = 1) -> fx.Node:
        local = self.call(aten.add.Scalar, self.axis_index, 1)
        result = []
        for i in range(terms):
            term = self.call(aten.mul.Tensor, self.input(f"a{i}", split(14, 4 + i), "batch"), local)
            outputs = self.call(aten.mm.default, term, self.input(f"u{i}", split(4 + i, 6)))
            result.append(self.call(aten._unsafe_view.default, outputs, [2, 7, 6]))
        total = result[0]
        for term in result[1:]:
            total = self.call(aten.add.Tensor, total, term)
        return self.call(reshard.reduce_scatter, total, dim, "tp", 3, F32, None)

    def used(self, node: fx.Node) -> fx.Node:
        return self.call(aten.neg.default, node)

    def same(self, program: ir.Program, after: ir.Program) -> bool:
        inputs = zip(program.placeholders(), program.inputs, strict=True)
        torch.manual_seed(0)
        values = {i.name: torch.randn(i.spec.shape) for _, i in inputs if i.kind != "coordinate"}
        return alike(run_on(after, self.ctx, values), run_on(program, self.ctx, values))


@pytest.mark.parametrize(("small_flops", "products"), [(0, 12), (1e18, 6)], ids=["apart", "joined"])
def test_products_of_one_ring_are_apart_or_joined_with_the_same_values(small_flops, products, monkeypatch):
    monkeypatch.setattr(ring_matmuls, "SMALL_FLOPS", small_flops)
    site = Site()
    full = site.gather()
    program = site.program(*site.products(full, "q", "k"), site.used(full), site.scatter(2))
    after, report = ALL(program, site.ctx)
    assert report.counts == {"sites": 2, "gathers": 1, "scatters": 1}
    assert sum(name_of(node) == "mm" for node in Collectives()(after, site.ctx)[0].calls()) == products
    assert site.same(program, after)


def test_nothing_is_a_site_whose_rows_are_not_whole_or_that_more_reads():
    site = Site()
    features = site.products(site.gather(dim=2), "q")  # each rank has some features of each row
    columns = site.scatter(1, dim=2)
    other = site.call(aten.mm.default, site.input("b", split(14, 6), "batch"), site.input("v", split(6, 6)))
    read = site.call(aten._unsafe_view.default, other, [2, 7, 6])
    scattered = site.call(reshard.reduce_scatter, read, 1, "tp", 3, F32, None)
    heads = site.call(aten.mm.default, site.input("c", split(14, 6), "batch"), site.input("o", split(6, 6)))
    by_head = site.call(reshard.reduce_scatter, site.call(aten.view.default, heads, [2, 7, 2, 3]), 1, "tp", 3, F32, None)
    program = site.program(*features, columns, scattered, site.used(other), by_head)
    after, report = ALL(program, site.ctx)
    assert after is program and report.counts == {"sites": 0}


def test_a_matrix_that_is_computed_from_what_is_gathered_stays_behind_it():
    site = Site()
    full = site.gather()
    rows = site.call(aten.view.default, full, [14, 6])
    outputs = site.call(aten.mm.default, rows, site.call(aten.mm.default, site.call(aten.t.default, rows), rows))
    after, report = ALL(program := site.program(outputs), site.ctx)
    assert after is program and report.counts == {"sites": 0}


# ---- where a step gets shorter -----------------------------------------------------------------------


def cluster(bytes_per_s: float) -> Cluster:
    flat = Curve.flat(1e3)
    return Cluster(8, Rates({F32: flat}, flat, flat, flat, Curve.flat(1e9)), Links(bytes_per_s, 1.0))


@pytest.mark.parametrize(("bytes_per_s", "rings"), [(1e3, 2), (1e12, 0)])
def test_auto_takes_rings_where_links_are_slow_enough_to_wait_for(bytes_per_s, rings):
    site = Site()
    program = site.program(*site.products(site.gather(), "q"), site.scatter(1))
    auto = AsyncTP("auto", cluster(bytes_per_s), (Collectives(), Overlap()))
    after, report = auto(program, site.ctx)
    assert report.counts["gathers"] + report.counts["scatters"] == rings and len(report.notes) == 2
    verdict, sign = ("used", "-") if rings else ("not used", r"\+")
    wanted = rf": {verdict}, rings there change the program's predicted time by {sign}\d+\.\d\d %$"
    assert all(re.search(wanted, note) for note in report.notes)
    assert site.same(program, after)


# ---- what the verifier hears --------------------------------------------------------------------------


def heard(program: ir.Program, ctx: ir.Context) -> str:
    expected = as_meant(ALL(program, ctx)[0], ctx)
    return "; ".join(message for _, message in check_kept(*(Numbers(p, abstract_eval(p, ctx)) for p in (program, expected))))


def of_two_matrices() -> tuple[ir.Program, ir.Context]:
    site = Site()
    rows = site.call(aten.view.default, site.gather(), [14, 6])
    outputs = [site.call(aten.mm.default, rows, site.input(name, split(6, 6))) for name in ("q", "k")]
    return site.program(*outputs, site.scatter(2)), site.ctx


def test_rings_mean_what_they_replace():
    assert not heard(*of_two_matrices())


def test_a_ring_of_other_matrices_is_heard(monkeypatch):
    right = async_tp.put_operator

    def swapped(before, work, operands, made, ctx):
        operands[1:-1] = operands[-2:0:-1] if len(made) > 1 else operands[1:-1]
        right(before, work, operands, made, ctx)

    monkeypatch.setattr(async_tp, "put_operator", swapped)
    assert "makes another value of 'gradient'" in heard(*of_two_matrices())


def test_a_ring_that_adds_in_another_dtype_is_heard(monkeypatch):
    right = async_tp.scatter_ring
    monkeypatch.setattr(async_tp, "scatter_ring", lambda site: rounded(right(site)))
    assert "makes another value of 'gradient'" in heard(*of_two_matrices())


def rounded(work: ring_matmuls.ScatterMatmuls) -> ring_matmuls.ScatterMatmuls:
    return replace(work, scatter=(*work.scatter[:-1], torch.bfloat16))


def test_what_comes_of_a_gathered_value_is_the_same_on_every_rank():
    site = Site()
    after, _ = ALL(site.program(*site.products(site.gather(), "q")), site.ctx)
    assert list(check_copies(after)) and not list(check_copies(as_meant(after, site.ctx)))


def test_what_is_on_its_way_and_read_is_heard():
    site = Site()
    after, _ = Collectives()(ALL(site.program(*site.products(site.gather(), "q")), site.ctx)[0], site.ctx)
    assert not list(check_waits(after))
    sent = next(node for node in after.calls() if node.target in SHIFTS)
    wait = next(iter(sent.users))
    wait.replace_all_uses_with(sent)
    assert "before it is waited on" in next(check_waits(after))[1]
