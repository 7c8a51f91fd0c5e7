"""Microbatches side by side: one computes while the other's values travel."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from small_programs import Small, cut
from torch import fx

from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.schema import (
    CommunicationConfig,
    Config,
    MeshConfig,
    ModelConfig,
    PassesConfig,
    TrainConfig,
)
from compiler_trainer.planning.dry import compile_dry
from passes.check.verify import verify_spec
from passes.communication.take_turns import TakeTurns
from passes.ir import ir
from passes.ir.layer import Layer
from passes.ir.printer import print_program
from passes.ir.stages import Stage
from passes.torch_private import c10d

aten = torch.ops.aten
SIDE = 16


class Two(Small):
    """A program of two microbatches; nodes have labels."""

    def __init__(self):
        super().__init__(tp=2)
        self.labels: dict[str, str] = {}
        self.w = self.input("w", cut((SIDE, SIDE)))
        self.x = [self.input(name, cut((SIDE, SIDE)), "batch") for name in ("x", "x_1")]
        self.inputs[-1] = replace(self.inputs[-1], name="x@1", microbatch=1)

    def do(self, label: str, target, *args, phase: str = "forward", layer: int | None = 0, of: int | None = None):
        node = self.call(target, *args, phase=phase)
        ir.update(node, layer=None if layer is None else Layer("layers", layer))
        if of is not None:
            ir.update(node, microbatch=of)
        self.labels[node.name] = label
        return node

    def mm(self, label: str, x, w=None, **where):
        return self.do(label, aten.mm.default, x, self.w if w is None else w, **where)

    def travels(self, label: str, x, **where):
        """Insert a sum over ranks, and the wait for it."""
        start = self.do(f"start {label}", c10d.all_reduce.default, x, "sum", "tp", **where)
        return self.do(f"wait {label}", c10d.wait_tensor.default, start, **where)

    def order(self, *results: fx.Node) -> list[str]:
        """Return the labels after the pass; check that it only moves nodes."""
        outputs = [("gradient", f"g{i}", node, cut(tuple(ir.example(node).shape))) for i, node in enumerate(results)]
        program = self.program(outputs, Stage.EXPLICIT)
        text = print_program(program)
        reordered, _ = TakeTurns()(program, self.ctx)
        reordered.graph.lint()
        assert print_program(program) == text
        assert Counter(n.name for n in reordered.graph.nodes) == Counter(n.name for n in program.graph.nodes)
        return [self.labels[node.name] for node in reordered.calls()]


def test_one_computes_while_the_other_waits():
    two, ends = Two(), []
    for k, x in enumerate(two.x):
        y = two.travels(f"y{k}", two.mm(f"a{k}", x))
        ends.append(two.mm(f"b{k}", y))
    assert two.order(*ends) == ["a0", "start y0", "a1", "start y1", "wait y0", "b0", "wait y1", "b1"]


def test_layers_that_send_nothing_are_taken_one_after_the_other():
    two, ends = Two(), []
    for k, x in enumerate(two.x):
        for layer in range(3):
            x = two.mm(f"{layer}{k}", x, layer=layer)
        ends.append(x)
    assert two.order(*ends) == ["00", "01", "10", "11", "20", "21"]


def test_a_turn_without_a_product_is_none():
    """Check that the same microbatch continues if nothing is computed between a reduction and a gather."""
    two, ends = Two(), []
    for k, x in enumerate(two.x):
        y = two.travels(f"y{k}", two.mm(f"a{k}", x))
        z = two.travels(f"z{k}", two.do(f"norm{k}", aten.mul.Tensor, y, 2))
        ends.append(two.mm(f"b{k}", z))
    assert two.order(*ends) == ["a0", "start y0", "a1", "start y1", "wait y0", "norm0", "start z0", "wait z0", "b0",
                                "wait y1", "norm1", "start z1", "wait z1", "b1"]  # fmt: skip


def test_what_is_short_beside_the_longest_ends_no_turn_and_starts_before_it_ends():
    two, ends = Two(), []
    for k, x in enumerate(two.x):
        a = two.mm(f"a{k}", x)
        few = two.do(f"few{k}", aten.slice.Tensor, a, 0, 0, 1)
        counts = two.travels(f"counts{k}", few)
        y = two.travels(f"y{k}", two.do(f"rows{k}", aten.mul.Tensor, a, counts))
        more = two.travels(f"more{k}", two.do(f"weights{k}", aten.mul.Tensor, few, 2))
        ends.append(two.mm(f"b{k}", two.do(f"times{k}", aten.mul.Tensor, y, more)))
    first = ["a{0}", "few{0}", "start counts{0}", "wait counts{0}", "rows{0}", "start y{0}", "weights{0}", "start more{0}"]
    second = ["wait y{0}", "wait more{0}", "times{0}", "b{0}"]
    assert two.order(*ends) == [label.format(k) for turn in (first, second) for k in (0, 1) for label in turn]


def test_what_all_read_comes_before_the_first_and_what_all_make_after_the_last():
    two, products = Two(), []
    w = two.do("w2", aten.mul.Tensor, two.w, 2)
    for k, x in enumerate(two.x):
        y = two.travels(f"y{k}", two.mm(f"a{k}", x))
        products.append(two.mm(f"b{k}", y, w))
    total = two.do("sum", aten.add.Tensor, *products)
    end = two.do("reduced", aten.mul.Tensor, total, 2)
    assert two.order(end) == ["a0", "start y0", "a1", "start y1", "wait y0", "w2", "b0", "wait y1", "b1", "sum", "reduced"]


def test_a_gradient_is_of_one_microbatch_though_it_begins_at_the_loss_of_both():
    two = Two()
    y = [two.travels(f"y{k}", two.mm(f"a{k}", x)) for k, x in enumerate(two.x)]
    loss = two.do("loss", aten.add.Tensor, *y)
    one = two.do("one", aten.ones_like.default, loss, phase="backward")
    ends = []
    for k in (1, 0):
        g = two.travels(f"g{k}", two.do(f"times{k}", aten.mul.Tensor, one, y[k], phase="backward"), phase="backward")
        ends.append(two.mm(f"w{k}", g, two.mm(f"again{k}", two.x[k], phase="backward"), phase="backward"))
    order = two.order(*ends)
    assert order[order.index("one") :] == ["one", "times1", "start g1", "wait g1", "again1", "w1",
                                           "times0", "start g0", "wait g0", "again0", "w0"]  # fmt: skip


def test_what_is_written_keeps_its_place_among_its_readers():
    """Check a second microbatch that reads before the first writes, and again after it."""
    two = Two()
    buffer = two.input("seen", cut((SIDE, SIDE)), "buffer")
    y = two.travels("y0", two.mm("a0", two.x[0]))
    first = two.do("first", aten.mul.Tensor, two.x[1], buffer)
    two.do("write", aten.copy_.default, buffer, y)
    second = two.travels("y1", two.mm("a1", two.do("second", aten.mul.Tensor, two.x[1], buffer)))
    order = two.order(first, second)
    assert order.index("first") < order.index("write") < order.index("second")


SIZES = ModelConfig(dim=64, n_layers=9, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=256)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 1, "cp": 2}, {"dp_shard": 2, "cp": 2}])
def test_layers_stay_alike_and_collectives_have_the_other_microbatch_beside_them(mesh):
    train = TrainConfig(seq_len=64, global_batch_size=8, microbatches=2)
    passes = PassesConfig(communication=CommunicationConfig(batch_overlap=2))
    cfg = resolve_auto(Config(model=SIZES, mesh=MeshConfig(**mesh), train=train, passes=passes), on_gpu=False)
    step = compile_dry(cfg, None)
    assert not any("stands for" in note for note in step.report["notes"])
    ((program, ctx),) = step.programs.values()
    verify_spec(program, ctx)
