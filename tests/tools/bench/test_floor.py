"""The floor of a step: its kernels, their values, and their number of runs."""

from __future__ import annotations

import time

import pytest
import torch
from oracle import ADAMW, batches, compile_lockstep, llama, llama_loss

from passes.cost.accounting import formula_of
from passes.ir import ir
from passes.trace.abstract_eval import Layout
from tools.bench import floor


@pytest.fixture(scope="module")
def step():
    mesh = {"dp_shard": 2, "tp": 2}
    return compile_lockstep(llama(n_layers=1), llama_loss, batches(rows=4)[0], mesh, ADAMW, microbatches=2)


def test_every_product_and_attention_runs_on_its_layouts(step):
    program, pool = step.train["accumulate"].program, {}
    wanted = [n for n in program.calls() if isinstance(n.target, torch._ops.OpOverload) and formula_of(n.target)]
    kernels = floor.kernels_of(program, pool)
    names = {node.target.overloadpacket.__name__ for node in wanted}
    assert len(kernels) == len(wanted) and len({n for n in names if "attention" in n}) == 2 and "mm" in names
    for kernel, node in zip(kernels, wanted, strict=True):
        assert [Layout.of(v) for v in kernel.args if isinstance(v, torch.Tensor)] == [
            Layout.of(ir.example(n)) for n in node.args if isinstance(n, torch.fx.Node)
        ]
        kernel()


def test_an_expanded_operand_and_whole_numbers_have_values():
    graph, values = torch.fx.Graph(), (torch.zeros(1, 3).expand(4, 3), torch.zeros(2, dtype=torch.int64))
    nodes = [graph.placeholder(name) for name in "ab"]
    for node, value in zip(nodes, values):
        ir.set_value(node, value)
    pool = {}
    first, second = (floor.operand(pool, node) for node in nodes)
    assert first.stride() == (0, 1) and first.count_nonzero() == 12 and second.tolist() == [1, 1]
    assert floor.operand(pool, nodes[0]) is first


def test_each_microbatch_counts(step, monkeypatch):
    ran = []
    monkeypatch.setattr(floor, "kernels_of", lambda program, pool: [lambda: ran.append(time.sleep(0.01))])
    seconds = floor.floor_s(step)
    assert list(step.train) == ["accumulate", "apply"] and len(ran) == 3 * floor.ROUNDS
    assert 0.03 <= seconds < 1
