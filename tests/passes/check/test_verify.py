"""The verifier: every planted defect is detected, and the message points to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from small_programs import Small, cut
from torch import fx

from passes.autograd.joint import Joint
from passes.check.numeric import run, verify_numeric
from passes.check.verify import check_layers, check_roles, neighbours, verify_spec
from passes.ir import ir
from passes.ir.layer import Layer, Role
from passes.ir.record import UNSET, Origin
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.ops import reshard
from passes.sharding.collectives import Collectives
from passes.torch_private import c10d
from passes.update.optimize import Optimize
from passes.update.optimizers import SGD

aten = torch.ops.aten
F64 = torch.float64
VARYING = replace(cut((6, 4)), replicate=("tp",))
SUM = Spec((), (("tp", "sum"),))
Plant = Callable[[ir.Program], ir.Program]


def program() -> tuple[ir.Program, ir.Context]:
    """Return loss = sum(linear(x, w) * b): weight and batch sharded on tp, bias replicate, all placed."""
    small = Small(tp=2)
    w, b = small.input("w", cut((6, 4), tp=0)), small.input("b", cut((6,)))
    x = small.input("x", cut((4, 4), tp=0), "batch")
    full = small.call(reshard.all_gather, w, 0, "tp", 2, 6, F64, None, spec=VARYING)
    varied = small.call(reshard.invariant_to_replicate, b, "tp", None, spec=replace(cut((6,)), replicate=("tp",)))
    y = small.call(aten.linear.default, x, full, spec=cut((4, 6), tp=0))
    ir.update(y, origin=Origin("model.py:31"))
    scaled = small.call(aten.mul.Tensor, y, varied, spec=cut((4, 6), tp=0))
    term = small.call(aten.sum.default, scaled, spec=SUM)
    loss = small.call(reshard.psum, term, "tp", F64, None, spec=Spec(()))
    return small.program([("loss", "loss", loss, Spec(()))]), small.ctx


def node(subject: ir.Program, name: str) -> fx.Node:
    return next(n for n in subject.graph.nodes if n.name == name)


def message(subject: ir.Program, ctx: ir.Context) -> str:
    with pytest.raises(ir.CompileError) as error:
        verify_spec(subject, ctx, pass_name="planted")
    return str(error.value)


def expanded() -> tuple[ir.Program, ir.Context]:
    subject, ctx = program()
    return Collectives()(subject, ctx)[0], ctx


def joint() -> tuple[ir.Program, ir.Context]:
    subject, ctx = program()
    return Joint()(subject, ctx)[0], ctx


@pytest.mark.parametrize("make", [program, joint, expanded])
def test_a_right_program_passes_and_is_left_alone(make):
    subject, ctx = make()
    avals = verify_spec(subject, ctx)
    assert set(avals.values) == {n for n in subject.graph.nodes if n.op != "output"}


def test_a_failure_names_the_pass_the_node_its_line_both_values_and_ten_nodes_around():
    subject, ctx = program()
    y = node(subject, "linear_default")
    ir.set_value(y, ir.example(y).to(torch.bfloat16))
    first, *lines = message(subject, ctx).splitlines()
    assert first == "planted: %linear_default (model.py:31) records bf16[2, 6], computes f64[2, 6]"
    assert len(lines) == 10  # five nodes before it, itself, and the remaining four
    assert [line for line in lines if line.startswith(">")] == [
        "> %linear_default = linear(%x, %all_gather_default) : bf16[2, 6] [4@tp, 6]   # model.py:31 forward"]


@pytest.mark.parametrize("phase", [None, "later"])
def test_an_operator_of_no_phase_is_found(phase):
    """A rewrite without phases would move a node of the backward into the forward."""
    subject, ctx = program()
    ir.update(next(n for n in subject.calls() if n.target is aten.mul.Tensor), phase=phase)
    assert "has no phase; record one of forward, backward, optimizer" in message(subject, ctx)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_operator_that_does_not_say_its_layer_is_found(phase):
    """A rewrite that gives a new node only a phase would leave it outside of layers."""
    subject, ctx = program()
    wrong = next(n for n in subject.calls() if n.target is aten.mul.Tensor)
    ir.update(wrong, phase=phase, layer=UNSET)
    assert "has no recorded layer" in message(subject, ctx)


def within_a_layer(*lost: Layer | None, phase: str = "forward", another: Layer | None = None) -> str:
    """Return the finding for operators of a layer in a row, of which the inner ones have the layers `lost`.

    With `another`, an operator of that layer also reads the last inner one.
    """
    small, layer = Small(), Layer("layers", 3)
    x = small.input("x", cut((2,)))
    for inner_layer in (layer, *lost, layer):
        x = small.call(aten.neg.default, x, spec=cut((2,)), phase=phase)
        ir.update(x, layer=inner_layer)
    if another:
        ir.update(small.call(aten.exp.default, x.args[0], spec=cut((2,))), layer=another)
    subject = small.program([("metric", "m", x, cut((2,)))])
    return next((f"%{node} {text}" for node, text in check_layers(subject)), "")


def test_an_operator_that_lost_its_layer_is_found():
    assert "%neg_default_1 has no layer, but is between operators of layers.3" in within_a_layer(None)
    assert "%neg_default_3 has no layer, but is between operators of layers.3" in within_a_layer(None, None, None)
    assert not within_a_layer(Layer("layers", 3))
    assert not within_a_layer(None, phase="backward")  # sums of gradients of several layers have no layer
    assert not within_a_layer(None, another=Layer("layers", 4))  # its value leaves the layer


def test_neighbours_are_five_before_and_five_after():
    small = Small()
    nodes = [small.input("x", cut((2,)))]
    for _ in range(20):
        nodes.append(small.call(aten.neg.default, nodes[-1]))
    shown = re.findall(r"^[> ] %(\w+) = ", neighbours(nodes[10]), re.M)
    assert shown == [n.name for n in nodes[5:16]]


# ---- planted in the graph or its records ---------------------------------------------------------


def record_shape(subject: ir.Program) -> ir.Program:
    y = node(subject, "linear_default")
    ir.set_value(y, ir.example(y).new_empty(3, 6))
    ir.set_spec(y, None)
    return subject


def forget_value(subject: ir.Program) -> ir.Program:
    ir.set_value(node(subject, "linear_default"), None)
    return subject


def use_before_definition(subject: ir.Program) -> ir.Program:
    node(subject, "sum_default").append(node(subject, "mul_tensor"))
    return subject


def wrong_operand(subject: ir.Program) -> ir.Program:
    node(subject, "linear_default").replace_input_with(node(subject, "all_gather_default"), node(subject, "invariant_to_replicate_default"))
    return subject


def one_input_too_many(subject: ir.Program) -> ir.Program:
    return replace(subject, inputs=(*subject.inputs, subject.inputs[0]))


def one_output_too_few(subject: ir.Program) -> ir.Program:
    return replace(subject, outputs=())


def global_input(subject: ir.Program) -> ir.Program:
    return replace(subject, inputs=(replace(subject.inputs[0], spec=cut((6, 4))), *subject.inputs[1:]))


def input_placed_otherwise(subject: ir.Program) -> ir.Program:
    return replace(subject, inputs=(replace(subject.inputs[0], spec=cut((5, 4), tp=0)), *subject.inputs[1:]))


def constant_output(subject: ir.Program) -> ir.Program:
    subject.graph.output_node().args = ((1.0,),)
    return subject


def place(name: str, spec: Spec) -> Plant:
    def plant(subject: ir.Program) -> ir.Program:
        ir.set_spec(node(subject, name), spec)
        return subject

    return plant


def argument(name: str, index: int, new: str | int) -> Plant:
    def plant(subject: ir.Program) -> ir.Program:
        node(subject, name).update_arg(index, new)
        return subject

    return plant


def drop(name: str) -> Plant:
    """Return a defect that replaces a node by its operand in all users."""

    def plant(subject: ir.Program) -> ir.Program:
        gone = node(subject, name)
        gone.replace_all_uses_with(gone.all_input_nodes[0])
        subject.graph.erase_node(gone)
        return subject

    return plant


def a_sum_made_replicate(subject: ir.Program) -> ir.Program:
    psum = node(subject, "psum_default")
    psum.target, psum.args = reshard.invariant_to_replicate, (psum.args[0], "tp", None)
    return subject


def assert_found(plant: Plant, planted: tuple[ir.Program, ir.Context], name: str | None, text: str) -> None:
    """Check that the defect's message names the node (if it has one) and the problem."""
    subject, ctx = planted
    first = message(plant(subject), ctx).splitlines()[0]
    assert first.startswith(f"planted: %{name} " if name else "planted: ")
    assert text in first


Y = "linear_default"


@pytest.mark.parametrize(
    ("plant", "name", "text"),
    [
        (record_shape, Y, "(model.py:31) records f64[3, 6], computes f64[2, 6]"),
        (forget_value, Y, "has no recorded value"),
        (use_before_definition, None, "the graph is malformed: Argument 'mul_tensor' of Node 'sum_default' was used"),
        (wrong_operand, Y, "does not take its operands"),
        (one_input_too_many, None, "the graph has 3 placeholders, the program 4 inputs"),
        (one_output_too_few, None, "the graph returns 1 values, the program has 0 outputs"),
        (constant_output, None, "loss 'loss' is 1.0, not a tensor"),
        (global_input, "w", "is f64[3, 4], parameter 'w' placed [6, 4] is of shape [6, 4]"),
        (input_placed_otherwise, "w", "is placed [6@tp, 4], parameter 'w' is placed [5@tp, 4]"),
        (place(Y, cut((4, 6), cp=0)), Y, "spec [4@cp, 6] uses axis 'cp', which the mesh (('tp', 2),) lacks"),
        (place(Y, replace(cut((4, 6), tp=0), replicate=("tp",))), Y, "spec [4@tp, 6] replicate(tp) uses axis 'tp' twice"),
        (place(Y, cut((4, 6), tp=1)), Y, "is f64[2, 6], placed [4, 6@tp] it is of shape [4, 3]"),
        (argument("invariant_to_replicate_default", 1, "cp"), "invariant_to_replicate_default", "runs over axis 'cp', the mesh has {'tp': 2}"),
        (argument("all_gather_default", 3, 4), "all_gather_default", "is for 4 ranks, axis 'tp' has 2"),
        (a_sum_made_replicate, "psum_default", "takes invariant on 'tp', its operand is partial: [] sum(tp)"),
        (place("all_gather_default", cut((6, 4))), "all_gather_default", "gives replicate on 'tp', it is placed [6, 4]"),
        (drop("invariant_to_replicate_default"), "mul_tensor", "uses %b, the same on every rank of 'tp', with %linear_default, placed ["),
    ],
)
def test_defects_of_a_local_program_are_found(plant, name, text):
    assert_found(plant, program(), name, text)


def no_gradient(subject: ir.Program) -> ir.Program:
    subject.graph.output_node().args = (tuple(subject.results()[:-1]),)
    return replace(subject, outputs=subject.outputs[:-1])


def in_place(subject: ir.Program) -> ir.Program:
    node(subject, "mul").target = aten.mul_.Tensor
    return subject


def two_gradients(subject: ir.Program) -> ir.Program:
    subject.graph.output_node().args = ((*subject.results(), subject.results()[-1]),)
    return replace(subject, outputs=(*subject.outputs, subject.outputs[-1]))


def gradient_laid_out_otherwise(subject: ir.Program) -> ir.Program:
    w = subject.results()[1]
    ir.set_spec(w, None)
    return replace(subject, outputs=(subject.outputs[0], replace(subject.outputs[1], spec=cut((3, 4))), subject.outputs[2]))


@pytest.mark.parametrize(
    ("plant", "name", "text"),
    [
        (no_gradient, "b", "parameter 'b' has 0 gradients among the outputs"),
        (in_place, "mul", "writes in place, which only updates may"),
        (two_gradients, "b", "parameter 'b' has 2 gradients among the outputs"),
        (lambda subject: replace(subject, stage=Stage.STEP), "w", "parameter 'w' has 1 gradients"),
        (gradient_laid_out_otherwise, "reduce_scatter", "gradient of 'w' is placed [3, 4], the parameter [6@tp, 4]"),
    ],
)
def test_defects_of_a_joint_program_are_found(plant, name, text):
    assert_found(plant, joint(), name, text)


def wait_of(subject: ir.Program, target) -> fx.Node:
    collective = next(n for n in subject.calls() if n.target is target)
    return next(iter(collective.users))


def use_before_wait(subject: ir.Program) -> ir.Program:
    wait = wait_of(subject, c10d.all_gather_into_tensor.default)
    next(iter(wait.users)).replace_input_with(wait, wait.all_input_nodes[0])
    return subject


def never_wait(subject: ir.Program) -> ir.Program:
    gathered = next(n for n in subject.calls() if n.target is c10d.all_gather_into_tensor.default)
    with subject.graph.inserting_after(gathered):
        again = subject.graph.node_copy(gathered)
    ir.set_record(again, ir.record(gathered))
    return subject


def return_before_wait(subject: ir.Program) -> ir.Program:
    wait = wait_of(subject, c10d.all_reduce.default)
    subject.graph.output_node().args = ((wait.all_input_nodes[0],),)
    return subject


@pytest.mark.parametrize(
    ("plant", "name", "text"),
    [
        (use_before_wait, "narrow", "uses %all_gather_into_tensor before it is waited on"),
        (never_wait, "all_gather_into_tensor_1", "is never waited on"),
        (return_before_wait, "output", "uses %all_reduce before it is waited on"),
        (argument("all_gather_into_tensor", 1, 4), "all_gather_into_tensor", "records f64[6, 4], computes f64[12, 4]"),
        (argument("all_reduce", 2, "dp_shard"), "all_reduce", "runs over axis 'dp_shard', the mesh has {'tp': 2}"),
    ],
)
def test_defects_of_expanded_collectives_are_found(plant, name, text):
    assert_found(plant, expanded(), name, text)


def test_a_layer_that_is_lost_when_a_program_becomes_local_is_found():
    small, layer = Small(), Layer("layers", 3)
    x = small.call(aten.neg.default, small.input("x", cut((2,))), spec=cut((2,)))
    ir.update(x, layer=layer)
    global_program = small.program([("metric", "m", x, cut((2,)))], Stage.PLACED)
    local = replace(global_program.copy(), stage=Stage.LOCAL)
    (y,) = local.calls()
    ir.update(y, stands_for=x.name)
    ir.update(local.placeholders()[0], stands_for="x")
    verify_spec(local, small.ctx, before=global_program)
    ir.update(y, layer=None)
    with pytest.raises(ir.CompileError, match="all other nodes that stand for operators of layers.3 are outside of it"):
        verify_spec(local, small.ctx, before=global_program)


def of_role(role: Role | None, target=aten.mul.Tensor, phase: str = "forward") -> str:
    """Return the finding if an operator of a parameter and the batch has the role."""
    small = Small()
    w, x = small.input("w", cut((2, 2))), small.input("x", cut((2, 2)), "batch")
    y = small.call(target, w, x, spec=cut((2, 2)), phase=phase)
    if role:
        ir.update(y, role=role)
    subject = small.program([("metric", "m", y, cut((2, 2)))], Stage.ORDERED)
    return next((text for _, text in check_roles(subject)), "")


@pytest.mark.parametrize(("kind", "target", "phase", "text"), [
    ("prefetch", aten.mul.Tensor, "forward", "is computed of more than parameters, its role is prefetch"),
    ("prefetch", aten.mm.default, "forward", "is a matmul or attention of more than parameters, its role is prefetch"),
    ("late", aten.mul.Tensor, "forward", "is in the forward, its role is late"),
    ("late", aten.mm.default, "backward", "is a matmul or attention, its role is late"),
    ("update", aten.mm.default, "backward", "is a matmul or attention of the backward, its role is update"),
    ("update", aten.mm.default, "optimizer", ""),
    ("own", aten.mm.default, "backward", ""),
])
def test_roles_that_operators_plainly_do_not_have_are_found(kind, target, phase, text):
    assert of_role(Role(kind, phase, Layer("layers", 0)), target, phase) == text


def test_an_operator_without_a_role_is_found():
    assert of_role(None) == "has no role; record one of own, prefetch, late, update"


def test_a_boundary_operator_left_after_expansion_is_found():
    assert_found(lambda subject: replace(subject, stage=Stage.EXPLICIT), program(), "all_gather_default",
          "is a reshard operator, which `collectives` should have expanded")


def test_float8_that_travels_as_such_is_found():
    small = Small(tp=2)
    x = small.input("x", cut((4,)), "batch")
    small8 = small.call(aten._to_copy.default, x, spec=cut((4,)), dtype=torch.float8_e4m3fn)
    sent = small.call(c10d.all_gather_into_tensor.default, small8, 2, "tp")
    received = small.call(c10d.wait_tensor.default, sent)
    subject = small.program([("metric", "out", received, cut((8,)))])
    subject = replace(subject, stage=Stage.EXPLICIT)
    assert_found(lambda subject: subject, (subject, small.ctx), "all_gather_into_tensor_default", "send its bytes as uint8")


def test_all_to_all_has_a_piece_for_every_rank():
    small = Small(tp=2)
    x = small.input("x", cut((3,)), "batch")
    sent = small.call(c10d.all_to_all_single.default, x, [1, 1, 1], [1, 1, 1], "tp")
    received = small.call(c10d.wait_tensor.default, sent)
    subject = small.program([("metric", "out", received, cut((3,)))])
    assert_found(lambda subject: subject, (subject, small.ctx), "all_to_all_single_default", "is for 3 ranks, axis 'tp' has 2")


# ---- in numbers ------------------------------------------------------------------------------------


VALUES = {name: torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(0))
          for name, shape in {"w": (6, 4), "b": (6,), "x": (4, 4)}.items()}


def test_a_local_program_is_run_as_what_it_means():
    subject, ctx = program()
    w, b = (VALUES[name].clone().requires_grad_() for name in ("w", "b"))
    loss = (torch.nn.functional.linear(VALUES["x"], w) * b).sum()
    gradients = dict(zip("wb", torch.autograd.grad(loss, [w, b]), strict=True))
    expected = {("loss", "loss"): loss, **{("gradient", name): g for name, g in gradients.items()}}
    for make in (program, joint, expanded):
        subject, ctx = make()
        results = run(subject, ctx, VALUES)
        assert results.keys() == expected.keys()
        for key, result in results.items():
            torch.testing.assert_close(result.value.detach(), expected[key], rtol=0, atol=1e-12)


def off(plant: Plant, make: Callable[[], tuple[ir.Program, ir.Context]]) -> str:
    """Return the message of comparing a correct program with the planted one."""
    before, ctx = make()
    with pytest.raises(ir.CompileError) as error:
        verify_numeric(before, plant(before.copy()), ctx, VALUES, pass_name="planted")
    return str(error.value)


def test_a_dropped_reduction_of_the_loss_is_found():
    text = off(drop("psum_default"), program)
    assert text.startswith("planted: %sum_default loss 'loss' is off by ")
    loss = (torch.nn.functional.linear(VALUES["x"], VALUES["w"]) * VALUES["b"]).sum().item()
    assert f"was {loss:.6g}, is " in text
    assert "> %sum_default = sum(" in text


def test_a_dropped_reduction_of_a_gradient_is_found():
    assert off(drop("psum_1"), joint).startswith("planted: %view gradient 'b' is off by ")


def test_a_gradient_that_the_pass_derives_wrong_is_found():
    """`before` has no gradients: they come from differentiating its run, not from the operators' own gradients."""
    subject, ctx = program()
    wrong = drop("psum_1")(Joint()(subject, ctx)[0])
    with pytest.raises(ir.CompileError, match="planted: .* gradient 'b' is off by"):
        verify_numeric(subject, wrong, ctx, VALUES, pass_name="planted")


def test_nan_is_found():
    small = Small()
    x = small.input("x", cut((1,)), "batch")
    good = small.program([("metric", "m", small.call(aten.abs.default, x), cut((1,)))])
    other = Small()
    x = other.input("x", cut((1,)), "batch")
    bad = other.program([("metric", "m", other.call(aten.sqrt.default, x), cut((1,)))])
    with pytest.raises(ir.CompileError, match="metric 'm' is off by inf .*entry 0 was 1, is nan"):
        verify_numeric(good, bad, small.ctx, {"x": -torch.ones(1, dtype=F64)})


@pytest.mark.parametrize(("factor", "dtype", "accepted"), [
    (1 + 2**-7, torch.bfloat16, True), (1.25, torch.bfloat16, False), (1 + 2**-7, torch.float32, False),
    (1 + 1e-6, torch.float32, True), (1 + 1e-6, F64, False), (1 + 1e-6, None, False)])
def test_tolerance_is_that_of_the_coarsest_dtype(factor, dtype, accepted):
    """Without a dtype, the values are multiplied by a constant in fp32, which does not round them."""
    def scaled(by: float) -> tuple[ir.Program, ir.Context]:
        small = Small()
        x = small.input("x", cut((4,)), "batch")
        if dtype is None:
            x = small.call(aten.mul.Tensor, x, small.call(aten.ones.default, [4], dtype=torch.float32))
        else:
            x = small.call(aten._to_copy.default, x, dtype=dtype)
        out = small.call(aten.mul.Tensor, small.call(aten._to_copy.default, x, dtype=F64), by)
        return small.program([("metric", "m", out, cut((4,)))]), small.ctx

    (before, ctx), (after, _) = scaled(1.0), scaled(factor)
    values = {"x": torch.arange(1.0, 5.0, dtype=F64)}
    if accepted:
        assert 0 < verify_numeric(before, after, ctx, values)["metric m"] < 0.1
        return
    with pytest.raises(ir.CompileError, match="metric 'm' is off by"):
        verify_numeric(before, after, ctx, values)


def test_what_is_written_in_place_is_compared():
    def stepped(by: float) -> tuple[ir.Program, ir.Context]:
        small = Small(dp_shard=2)
        w, moment = small.input("w", cut((5,), dp_shard=0)), small.input("momentum.w", cut((5,), dp_shard=0), "moment")
        new = small.call(aten.add.Tensor, moment, by)
        small.call(aten.copy_.default, moment, new)
        small.call(aten.copy_.default, w, small.call(aten.sub.Tensor, w, new))
        return small.program([("metric", "m", new, cut((5,), dp_shard=0))], Stage.STEP), small.ctx

    (before, ctx), (after, _) = stepped(0.5), stepped(0.25)
    inputs = {"w": torch.ones(5, dtype=F64)}
    results = run(before, ctx, inputs)
    assert {key: r.value.tolist() for key, r in results.items()} == {
        ("metric", "m"): [0.5] * 5, ("moment", "momentum.w"): [0.5] * 5, ("parameter", "w"): [0.5] * 5}
    assert inputs["w"].tolist() == [1.0] * 5
    assert verify_numeric(before, before, ctx, inputs) == {"metric m": 0, "moment momentum.w": 0, "parameter w": 0}
    with pytest.raises(ir.CompileError, match="was 0.5, is 0.25"):
        verify_numeric(before, after, ctx, inputs)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"w": VALUES["w"], "x": VALUES["x"]}, "parameter 'b' has no value"),
        ({**VALUES, "b": torch.ones(7)}, "'b' is given as torch.float32 [7], the program takes torch.float64 [6]"),
        ({**VALUES, "x": torch.ones(4, 4, dtype=torch.int64)}, "batch 'x' is given as torch.int64 [4, 4]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(values, text):
    subject, ctx = program()
    with pytest.raises(ir.CompileError) as error:
        run(subject, ctx, values)
    assert text in str(error.value)


def test_a_result_that_is_neither_returned_nor_stored_is_refused():
    before, ctx = joint()
    step, _ = Optimize(SGD())(before, ctx)
    verify_spec(step, ctx, before=before)
    lost = step.copy()
    write = next(n for n in lost.calls() if n.target is aten.copy_.default and ir.parameter(n) == "b")
    lost.graph.erase_node(write)
    with pytest.raises(ir.CompileError, match="gradient 'b', which %.* was, is neither returned nor stored"):
        verify_spec(lost, ctx, before=before)
    with pytest.raises(ir.CompileError, match="loss 'loss', which %.* was, is neither returned nor stored"):
        verify_spec(replace(before, outputs=before.outputs[1:]).with_graph(without_first_result(before)), ctx, before=before)


def without_first_result(program: ir.Program) -> fx.Graph:
    """Remove the first result of the program's graph."""
    graph = program.copy().graph
    end = graph.output_node()
    end.args = (tuple(end.args[0][1:]),)  # type: ignore[index]
    return graph
