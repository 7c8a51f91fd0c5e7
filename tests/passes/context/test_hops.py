"""Ring steps that no rank needs for a batch: which these are, what is sent, and that nothing else changes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from attention_cases import grids, shuffled
from oracle import assert_same, compile_lockstep, train_plainly, train_step
from packed_models import batches, loss_of, packed

from passes.check import simulate
from passes.context.balance import hops_of, ranks_that_meet
from passes.ir.mesh import Mesh
from passes.ir.order import PLAIN, ZIGZAG
from passes.lower.host_reads import find_breaks
from passes.ops.shift import hops_at, shift_by

SHORT = torch.arange(21)[None].expand(4, 21) // 4  # documents of four tokens
LAYOUTS = {
    "none": PLAIN,
    "head_tail": ZIGZAG,
    "blocks": shuffled(4, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_meets_whom_is_what_a_mask_says(layout):
    """Compare with masks: bounds of any length, queries that see nothing, a length that nothing divides."""
    order, generator = LAYOUTS[layout], torch.Generator().manual_seed(5)
    size, (i, j) = 37, grids(37)
    owner = torch.zeros(size, dtype=torch.int64)
    for rank in range(4):
        for number in order.chunks_of(rank, 4):
            length = -(-size // (4 * order.chunks))
            owner[number * length : (number + 1) * length] = rank
    for _ in range(20):
        first = torch.randint(0, size, (2, size), generator=generator)
        last = (first + torch.randint(-2, 6, (2, size), generator=generator)).clamp(0, size)
        sees = ((j >= first[:, :, None]) & (j < last[:, :, None])).any(0)
        wanted = torch.zeros(4, 4, dtype=torch.bool)
        wanted[owner[i.expand(size, size)[sees]], owner[j.expand(size, size)[sees]]] = True
        assert torch.equal(ranks_that_meet(first, last, Mesh.of({"cp": 4}), order), wanted)


def test_hops_go_from_one_needed_step_to_the_next_and_home():
    apart = torch.tensor([0, 1, 3])  # steps at which any rank sees something
    meet = torch.zeros(5, 5, dtype=torch.bool)
    meet[2, (2 - apart) % 5] = True
    hops = hops_of(meet)
    assert hops.tolist() == [[1, 2, 0, 2, 0]]
    assert [hops_at(hops, 0, step, False, 5) for step in range(5)] == [1, 2, 0, 0, 0]
    assert [hops_at(hops, 0, step, True, 5) for step in range(5)] == [1, 2, 0, 2, 0]
    alone = hops_of(torch.eye(5, dtype=torch.bool))
    assert [hops_at(alone, 0, step, True, 5) for step in range(5)] == [0, 0, 0, 0, 0]  # home is where it is


def test_groups_of_neighbours_are_one_place_of_a_ring():
    meet = torch.eye(8, dtype=torch.bool)
    meet[7, 4] = meet[4, 3] = True  # within the last four of eight; from there to the first four
    assert hops_of(meet).tolist() == [[1, 2, 0, 5, 0, 0, 0, 0], [1, 3, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]
    assert [hops_at(hops_of(meet), 1, step, True, 4) for step in range(4)] == [1, 3, 0, 0]


@pytest.mark.parametrize(("method", "layout", "needed"), [
    ("ring", "none", {0, 1}), ("ring", "head_tail", {0, 1, 3}), ("hybrid", "none", {0}), ("hybrid", "head_tail", {0, 1}),
])  # fmt: skip
@pytest.mark.sample(2)
def test_what_nobody_needs_is_not_sent_and_nothing_else_changes(method, layout, needed):
    """Run one program on long documents and then short ones; keys travel once less than there are steps.

    Two of the four ranks are one place of a hybrid's ring, so it has two rings of two steps.
    """
    steps, rings = (2, 2) if method == "hybrid" else (4, 1)
    sent = []

    def counted(values, hops, axis, row, step, home):
        sent.append(hops_at(hops, row, step, home, len(values)) > 0)
        return simulate._shift_by(values, hops, axis, row, step, home)

    data = [{**batch, "ids": ids} for batch, ids in zip(batches(), (SHORT, batches()[1]["ids"] * 0, SHORT), strict=True)]
    options = {"context": {"method": method, "load_balance": layout}}
    step = compile_lockstep(packed(), loss_of, data[0], {"cp": 4}, passes=options)
    with mock.patch.dict(simulate.COLLECTIVES, {shift_by: counted}):
        result = train_step(step, data)
    metrics, state = train_plainly(packed(), loss_of, data)
    for ours, theirs in zip(result, metrics, strict=True):
        assert_same(ours, theirs, 1e-10)
    assert_same(step.state_dict(), state, 1e-10)
    per_step = len(sent) // 3
    short, long = (3 * n - 2 if n > 1 else 0 for n in (len(needed), steps))  # keys forward and backward, and home
    assert [sum(sent[i * per_step : (i + 1) * per_step]) for i in range(3)] == [rings * short, rings * long, rings * short]


@pytest.mark.parametrize("skips", [True, False])
def test_a_cuda_graph_cannot_skip_steps(skips):
    """Check the refusal, because a replay would send as far as in the first batch.

    Without skipping every step is sent.
    """
    options = {"context": {"method": "ring", "load_balance": "none", "skip_steps": skips}}
    step = compile_lockstep(packed(), loss_of, batches()[0], {"cp": 2}, passes=options)
    program = step.train["step"].program
    assert [i.name for i in program.inputs if i.kind == "layout"] == ["hops"] * skips
    result = [item for item in find_breaks(program) if "passes.context.skip_steps=false" in item.why]
    assert len(result) == (1 + 1 + 2) * skips
