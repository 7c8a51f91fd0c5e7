"""Several microbatches in one program: the same updates, whatever is shared and in whatever order they come."""

from __future__ import annotations

import pytest
import torch
from oracle import (
    ADAMW,
    NO_DECAY,
    assert_same,
    batches,
    compile_lockstep,
    llama,
    llama_loss,
    perceptron,
    points,
    squared_error,
    train_step,
    trained_alike,
)
from small_programs import Small, cut
from torch import Tensor, nn

from compiler_trainer import compile_step
from compiler_trainer.bisect.find import bisect
from compiler_trainer.config.errors import UserError
from passes.communication.batch_overlap import BatchOverlap
from passes.ir.printer import print_program
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from tests.nightly.parity.case import Case

aten = torch.ops.aten
AT_ONCE = {"communication": {"batch_overlap": 2}}


# ---- the program ------------------------------------------------------------------------------------


def summing() -> tuple[Small, list]:
    """Return a loss, a metric and a count of rows, and a buffer that adds up its inputs and is read by the loss."""
    small = Small()
    x, w = small.input("x", cut((3, 4)), "batch"), small.input("w", cut((4, 4)))
    total_seen = small.input("seen", Spec(()), "buffer")
    double = small.call(aten.mm.default, x, small.call(aten.mul.Tensor, w, 2))
    total = small.call(aten.sum.default, double)
    loss = small.call(aten.add.Tensor, total, total_seen)
    new = small.call(aten.add.Tensor, total_seen, 1)
    return small, [("loss", "loss", loss), ("metric", "mean", total), ("count", "rows", total), ("buffer", "seen", new)]


def test_what_is_of_parameters_is_shared_and_a_buffer_goes_from_one_to_the_next():
    small, ends = summing()
    program = small.program([(*end, Spec(())) for end in ends], Stage.NORMALIZED)
    text = print_program(program)
    after, report = BatchOverlap(2)(program, small.ctx)
    assert print_program(program) == text and report.counts == {"microbatches": 2, "shared_operators": 1}
    assert [(i.name, i.kind) for i in after.inputs] == [
        ("x", "batch"), ("w", "parameter"), ("seen", "buffer"), ("x@1", "batch")]  # fmt: skip
    x, w, other = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4), (4, 4), (3, 4)))
    buffer = torch.tensor(5.0, dtype=torch.float64)
    loss, metric, count, left = after.module(x, w, buffer, other)
    own_sums = [(item @ (2 * w)).sum() for item in (x, other)]
    assert_same({"loss": loss, "metric": metric, "count": count, "seen": left},
                {"loss": own_sums[0] + 5 + own_sums[1] + 6, "metric": sum(own_sums) / 2, "count": sum(own_sums), "seen": buffer + 2}, 1e-12)  # fmt: skip


def test_a_buffer_that_is_read_before_it_is_changed_waits_for_the_microbatch_before():
    """Check a buffer whose new value is made last, and which is read first."""
    small = Small()
    x, buffer = small.input("x", cut((2,)), "batch"), small.input("seen", cut((2,)), "buffer")
    y = small.call(aten.mul.Tensor, x, buffer)
    new = small.call(aten.add.Tensor, y, 1)
    loss = small.call(aten.sum.default, y)
    after, _ = BatchOverlap(3)(small.program(
        [("loss", "loss", loss, Spec(())), ("buffer", "seen", new, cut((2,)))], Stage.NORMALIZED), small.ctx)  # fmt: skip
    after.graph.lint()
    parts, old = [torch.tensor(part, dtype=torch.float64) for part in ([1, 2], [3, 4], [5, 6])], torch.ones(2).double()
    total = 0.0
    loss, left = after.module(parts[0], old, *parts[1:])
    for part in parts:
        total, old = total + (part * old).sum(), part * old + 1
    assert_same({"loss": loss, "seen": left}, {"loss": total, "seen": old}, 1e-12)


# ---- what it computes -------------------------------------------------------------------------------


@pytest.mark.sweep(8)
@pytest.mark.full
@pytest.mark.parametrize("passes", [{}, {"remat": {"policy": "full"}}, {"verify": "numeric"}, {"fold_layers": False}])
@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"dp_shard": 3, "tp": 2}, {"cp": 2}, {"dp_replicate": 2, "cp": 2}])
def test_updates_are_those_of_microbatches_in_turn(mesh, passes):
    trained_alike(llama(3), llama_loss, batches(rows=8), mesh, microbatches=4, passes=passes | AT_ONCE)


@pytest.mark.full
@pytest.mark.parametrize("line", [
    "experts rows=8 length=7 seed=1 mesh.dp_shard=2 mesh.ep=2 passes.moe.dispatch=dropless train.microbatches=4",
    "experts rows=4 length=9 seed=2 mesh.tp=2 balance_loss=0.1 train.microbatches=2",
    "decoder rows=8 length=9 seed=3 heads=4 kv_heads=2 documents=true mesh.cp=2 train.microbatches=2",
    "functions rows=8 length=3 seed=4 function=clipped mesh.tp=2 train.microbatches=4",
    "functions rows=8 length=3 seed=5 function=squared place=embedding mesh.dp_replicate=2 train.microbatches=2",
])  # fmt: skip
def test_of_any_model(line):
    outcome = Case.parse(f"{line} passes.communication.batch_overlap=2").run()
    assert outcome.verdict == "right", outcome


def test_running_statistics_are_those_of_microbatches_in_turn():
    step = trained_alike(perceptron(nn.BatchNorm1d(7)), squared_error, points(rows=8), {"dp_shard": 2}, NO_DECAY,
                         microbatches=2, passes=AT_ONCE)  # fmt: skip
    assert step.state_dict()["between.num_batches_tracked"] == 6


def test_what_is_drawn_is_what_microbatches_in_turn_draw():
    data, result = points(rows=8), []
    for passes in ({}, AT_ONCE):
        step = compile_lockstep(perceptron(nn.Dropout(0.5)), squared_error, data[0], {"dp_shard": 2, "tp": 2}, NO_DECAY,
                                microbatches=4, passes=passes)  # fmt: skip
        result.append(train_step(step, data)[-1] | step.state_dict())
    assert_same(*result, 1e-12)


@pytest.mark.full
def test_evaluation_and_rows_are_those_of_all_microbatches():
    data = batches(rows=8)
    plain, ours = (compile_lockstep(llama(), llama_loss, data[0], {"tp": 2}, evaluate=True, microbatches=4,
                                    passes=passes) for passes in ({}, AT_ONCE))  # fmt: skip
    assert ours.evaluate(data[1]) == pytest.approx(plain.evaluate(data[1]), abs=1e-12)


def by_row(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    errors = (model(batch["x"]) - batch["y"]).square().mean(1)
    return errors.mean(), {"each": errors}


def test_what_a_loss_tells_of_rows_is_in_their_order():
    data = points(rows=8)
    plain, ours = (compile_step(perceptron(), by_row, data[0], mesh={"dp_shard": 2}, ranks="lockstep", train=False,
                                microbatches=4, passes=passes) for passes in ({}, AT_ONCE))  # fmt: skip
    assert_same(ours.rows(data[0]), plain.rows(data[0]), 1e-12)


# ---- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(("microbatches", "mesh", "message"), [
    (3, {}, "is 2, of 3 microbatches; make train.microbatches a multiple of it"),
    (1, {}, "is 2, of 1 microbatches"),
    (2, {"pp": 2}, "is 2 with mesh.pp=2, whose stages take microbatches one by one; set it to 1"),
])  # fmt: skip
def test_microbatches_that_cannot_be_taken_at_once(microbatches, mesh, message):
    with pytest.raises(UserError, match=f"passes.communication.batch_overlap: {message}"):
        compile_lockstep(llama(2), llama_loss, batches(rows=6)[0], mesh, microbatches=microbatches, passes=AT_ONCE)


def test_entries_may_have_any_names_but_those_of_copies():
    batch = {"x@2": torch.randn(4, 5).double(), "y@of": torch.randn(4, 3).double()}
    options = {"mesh": {}, "microbatches": 2, "evaluate": True}
    wanted = compile_lockstep(perceptron(), squared_error, {"x": batch["x@2"], "y": batch["y@of"]}, **options)
    wanted = wanted({"x": batch["x@2"], "y": batch["y@of"]})
    renamed = lambda m, b: squared_error(m, {"x": b["x@2"], "y": b["y@of"]})  # noqa: E731
    assert compile_lockstep(perceptron(), renamed, batch, **options)(batch) == wanted
    together = compile_lockstep(perceptron(), renamed, batch, **options, passes=AT_ONCE)(batch)
    assert together == pytest.approx(wanted, rel=1e-12)
    clash = {"x": batch["x@2"], "x@1": batch["y@of"]}
    error = lambda m, b: squared_error(m, {"x": b["x"], "y": b["x@1"]})  # noqa: E731
    with pytest.raises(UserError, match=r"batch\['x@1'\]: with 2 microbatches this is the name of a copy of 'x'; rename"):
        compile_lockstep(perceptron(), error, clash, **options, passes=AT_ONCE)


def test_bisect_follows_one_microbatch():
    with pytest.raises(UserError, match="passes.communication.batch_overlap: bisect follows one microbatch"):
        bisect(llama(), llama_loss, batches(rows=4)[0], microbatches=2, passes=AT_ONCE, optim=ADAMW)


def test_a_batch_is_checked_by_the_names_that_its_user_knows():
    data = batches(rows=4)
    step = compile_lockstep(llama(), llama_loss, data[0], {}, microbatches=2, passes=AT_ONCE)
    with pytest.raises(UserError, match=r"batch\['tokens'\]: is missing; the step was compiled for tokens, positions"):
        step({name: value for name, value in data[0].items() if name != "tokens"})
