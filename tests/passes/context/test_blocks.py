"""Sequences in blocks: each rank's blocks, the choice of `auto`, and models that train as on one device."""

from __future__ import annotations

import pytest
import torch
from attention_cases import shuffled
from oracle import NO_DECAY, assert_same, compile_lockstep, train_plainly, train_step, trained_alike
from packed_models import SIZE, batches, loss_of, packed

from passes.context.balance import assign_blocks, imbalance, work_of_blocks
from passes.ir.layout import entries, locate, to_natural_order, to_rank_order
from passes.ir.mesh import BLOCKS, Mesh
from passes.ir.order import Order
from passes.ir.spec import Factor, Spec, shard, unshard


@pytest.mark.parametrize(("ranks", "each"), [(2, 1), (2, 5), (3, 4), (4, 3), (8, 8)])
def test_all_functions_of_a_layout_agree(ranks, each):
    """Compare, for one table, entries, their look-up, the host's cuts, and both orders of a gathered dim."""
    mesh, order, full = Mesh.of({"cp": ranks}), shuffled(ranks, each), torch.arange(SIZE) + 100
    factor, table = Factor(SIZE, ("cp",), order=order), torch.tensor(order.table)
    spec = Spec(((factor,),), fill=0.0)
    locals_ = [shard(full, spec, mesh, place) for place in mesh]
    assert torch.equal(torch.cat(locals_), to_rank_order(full, 0, ranks, table))
    assert torch.equal(to_natural_order(torch.cat(locals_), 0, ranks, SIZE, table), full)
    assert torch.equal(unshard(locals_, spec, mesh), full)
    for place, local in zip(mesh, locals_):
        places = {"cp": torch.tensor(place["cp"]), BLOCKS: table}
        index, valid = entries(factor, mesh, places, full.device)
        assert torch.equal(torch.where(valid, full[index.clamp(max=SIZE - 1)], 0), local)
        at, mine = locate(torch.arange(-2, SIZE + 2), factor, mesh, places)
        assert torch.equal(local[at[mine]], full[torch.arange(-2, SIZE + 2)[mine]])
        assert int(mine.sum()) == int(valid.sum())


@pytest.mark.parametrize("inner", [2, 3, 4, 5])
def test_an_axis_inside_that_pads_reads_no_block_that_is_not_there(inner):
    mesh, order, full = Mesh.of({"cp": 2, "tp": inner}), shuffled(2, 2), torch.arange(10) + 100
    factor = Factor(10, ("cp", "tp"), order=order)
    for place in mesh:
        places = {axis: torch.tensor(at) for axis, at in place.items()} | {BLOCKS: torch.tensor(order.table)}
        index, valid = entries(factor, mesh, places, full.device)
        local = shard(full, Spec(((factor,),), fill=0.0), mesh, place)
        assert torch.equal(torch.where(valid, full[index.clamp(max=9)], 0), local)


def test_blocks_are_exchanged_until_ranks_have_as_much_to_do():
    even, uneven = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), torch.tensor([9, 1, 1, 5, 5, 1, 1, 1])
    assert assign_blocks(even, 2) == ((0, 1, 6, 7), (2, 3, 4, 5))  # head and tail stay as they are
    assert assign_blocks(uneven, 2) == ((0, 1, 6, 7), (2, 3, 4, 5))
    assert assign_blocks(torch.tensor([1, 1, 1, 5, 5, 5, 1, 5]), 4) == ((0, 7), (3, 6), (2, 5), (1, 4))
    assert assign_blocks(torch.tensor([8, 1, 1, 1, 1, 1, 1, 1]), 2) == ((0, 1, 6, 7), (2, 3, 4, 5))  # nothing helps


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_documents_of_any_length_are_dealt_evenly(ranks):
    """Check that each block has one rank, each rank as many blocks, and none does much more than the mean."""
    generator = torch.Generator().manual_seed(ranks)
    for _ in range(20):
        turns = torch.rand(4096, generator=generator) < 0.002 * ranks
        index = torch.arange(4096)
        key_counts = (index - torch.where(turns, index, 0).cummax(0).values + 1)[None]
        table = assign_blocks(work_of_blocks([key_counts], 16 * ranks), ranks)
        assert sorted(block for row in table for block in row) == list(range(16 * ranks))
        assert {len(row) for row in table} == {16} and all(row == tuple(sorted(row)) for row in table)
        assert imbalance([key_counts], Mesh.of({"cp": ranks}), Order(table=table)) < 1.1


@pytest.mark.parametrize(("mesh", "passes", "options"), [
    ({"cp": 2}, {"context": {"method": "ring"}}, {}),
    ({"cp": 4}, {"context": {"method": "all_gather"}}, {}),
    ({"cp": 4}, {"context": {"method": "hybrid"}}, {"microbatches": 2}),
    ({"cp": 2, "tp": 2}, {"verify": "numeric"}, {"microbatches": 4}),
    ({"cp": 2, "dp_shard": 2}, {"context": {"method": "ring"}}, {}),
    ({"cp": 3, "dp_replicate": 2}, {"context": {"method": "ring"}}, {"microbatches": 2}),
    ({"cp": 2, "dp_replicate": 2}, {}, {"microbatches": 4}),  # of one row each, which all replicas have
], ids=str)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.sample(2)
def test_a_model_trains_as_on_one_device(mesh, passes, options, causal):
    """Train on 21 tokens in blocks of 3, which change each step.

    The model has sums along the sequence, and a table shared by samples.
    """
    asked = {} if causal else passes.get("context", {})  # in blocks, causal attention takes one method alone
    passes = {**passes, "context": {**asked, "load_balance": "blocks", "block": 3}}
    step = compile_lockstep(packed(causal), loss_of, batches()[0], mesh, passes=passes, **options)
    metrics, state = train_plainly(packed(causal), loss_of, batches(), microbatches=options.get("microbatches", 1))
    for actual, wanted in zip(train_step(step, batches()), metrics, strict=True):
        assert_same(actual, wanted, 1e-10)
    assert_same(step.state_dict(), state, 1e-10)
    balance = step.balance()
    assert balance == {} if causal else balance["cp_imbalance"] <= balance["cp_imbalance_head_tail"]
    assert step.train[next(iter(step.train))].program.order.chunks == 2 * -(-SIZE // (6 * mesh["cp"]))


@pytest.mark.parametrize("learned", [False, True])
def test_rows_have_tables_of_their_own_unless_ranks_exchange_among_rows(learned):
    """Check tables with learned positions, whose gradients are added over samples while the sequence is sharded."""
    mesh, passes = {"dp_shard": 2, "cp": 2}, {"context": {"load_balance": "blocks", "block": 2}}
    model = packed(learned=learned)
    step = trained_alike(model, loss_of, batches(), mesh, NO_DECAY, passes=passes)
    (table,) = (i for i in step.train["step"].program.inputs if i.name == BLOCKS)
    assert table.spec.replicate == (() if learned else ("dp_shard",))
    tables = [step.layouts[0].order(rank).table for rank in range(4)]
    assert tables[0] == tables[1] and tables[2] == tables[3]
    assert (tables[0] == tables[2]) == learned


TAKEN = {  # what auto takes, by what the model is and how long its blocks may be
    "documents": ({"block": 2}, False, "blocks, documents decide what attention sees"),
    "short": ({"block": 8}, False, "head_tail, the sequence is too short for blocks"),
    "causal": ({"block": 2}, True, "head_tail, attention sees the same keys in all batches"),
    "asked": ({"load_balance": "none"}, False, "none, as configured"),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.sample(2)
def test_auto_takes_blocks_where_documents_decide(name):
    options, causal, layout = TAKEN[name]
    step = compile_lockstep(packed(causal), loss_of, batches()[0], {"cp": 2}, passes={"context": options})
    (effect,) = (effect for effect in step.report["effects"] if effect["option"] == "passes.context.load_balance")
    assert layout in effect["detail"]
