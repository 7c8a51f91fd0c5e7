"""A finished program as calls of bodies: the cuts, equal pieces, and that the calls equal the program."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from joint_programs import equal, joint, run
from oracle import ADAMW, assert_same, batches, compile_lockstep, llama, llama_loss, train_step
from small_programs import Small, cut, ordered
from sweeps import in_turn, quick

from passes.check.composed import verify_composed
from passes.communication.bucket import Bucket
from passes.communication.layer_starts import matmuls_of
from passes.communication.node_order import in_flight
from passes.communication.overlap import Overlap
from passes.ir import ir
from passes.ir.bodies import body_of_call, calls_of, flatten
from passes.ir.layer import Layer
from passes.ir.operators import is_view, kind_of
from passes.ir.printer import print_program
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.lower.segment import Segment
from passes.memory.remat import Remat
from passes.ops.shift import arrive, shift
from passes.sharding.collectives import Collectives
from passes.torch_private import c10d
from passes.update.optimize import Optimize
from passes.update.optimizers import AdamW

aten = torch.ops.aten
MESHES = {"one": (), "fsdp": (("dp_shard", 2),), "fsdp x tp": (("dp_shard", 2), ("tp", 3))}


REPLICATED = ((("dp_replicate", 2),), (("dp_replicate", 2), ("dp_shard", 2)))


@functools.cache
def finished(mesh=(), n_blocks=4, policy="none"):
    """Return a full step before it is cut."""
    program, ctx = joint(mesh, n_blocks)
    for step in (Remat(policy), Optimize(AdamW(), 1.0), Bucket(), Collectives(), Overlap()):
        program, _ = step(program, ctx)
    return program, ctx


@functools.cache
def segmented(mesh=(), n_blocks=4, policy="none"):
    program, ctx = finished(mesh, n_blocks, policy)
    after, report = Segment()(program, ctx)
    return replace(after, stage=Stage.SEGMENTED), report


# ---- the calls are the program ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.sample(2)
def test_calls_put_in_line_are_the_program_that_was_cut(mesh, policy):
    program, ctx = finished(mesh, policy=policy)
    text = print_program(program)
    after, _ = segmented(mesh, policy=policy)
    assert print_program(program) == text
    verify_composed("segment", program, after)
    flatten(after).graph.lint()
    assert equal(run(after, ctx, n_blocks=4), run(program, ctx, n_blocks=4))


@pytest.mark.parametrize("mesh", quick([(mesh,) for mesh in MESHES.values()], 1), ids=MESHES)
@pytest.mark.full
def test_segments_do_not_change_what_is_trained(mesh):
    data = batches(rows=6)
    actual = []
    for enabled in (True, False):
        step = compile_lockstep(
            llama(3), llama_loss, data[0], dict(mesh), ADAMW, evaluate=True,
            passes={"segment": {} if enabled else {"max_nodes": None}},
        )  # fmt: skip
        actual.append((train_step(step, data), step.evaluate(data[0]), step.state_dict()))
    (metrics, evaluation, state), (wanted, wanted_evaluation, wanted_state) = actual
    assert metrics == wanted and evaluation == wanted_evaluation
    assert_same(state, wanted_state, 0.0)


def swap_operands(program, call):
    call.args = (call.args[1], call.args[0], *call.args[2:])


def drop_a_call(program, call):
    later = next(c for c in reversed(calls_of(program)[call.target]) if c is not call)
    later.replace_all_uses_with(call)
    program.graph.erase_node(later)


def change_a_constant(program, call):
    node = next(n for n in call.target.graph.nodes if n.target is aten.view.default)
    node.args = (node.args[0], [*node.args[1][:-1], node.args[1][-1] + 1])


def forget_a_role(program, call):
    *others, last = ir.record(call).body_nodes
    ir.update(call, body_nodes=(*others, last._replace(record=replace(last.record, role=None))))


@pytest.mark.parametrize("fault", [swap_operands, drop_a_call, change_a_constant, forget_a_role])
def test_calls_that_give_another_program_are_refused(fault):
    program, ctx = finished()
    after, _ = Segment()(program, ctx)
    call = next(calls[0] for calls in calls_of(after).values() if len(calls) == 4)
    fault(after, call)
    with pytest.raises(ir.CompileError, match="segment.*do not give the program that was cut|is made again otherwise"):
        verify_composed("segment", program, after)


# ---- what is alike ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "policy"), in_turn(MESHES.values(), ["full", "none"]))
@pytest.mark.sample(1)
def test_a_deeper_model_has_the_same_bodies(mesh, policy):
    six, seven = ({body.key for body in calls_of(segmented(mesh, n, policy)[0])} for n in (6, 7))
    assert seven == six


def test_layers_of_one_device_are_one_body_a_phase():
    program, report = segmented()
    calls = {body.name: len(calls) for body, calls in calls_of(program).items()}
    assert report.counts == {"calls": sum(calls.values()), "bodies": len(calls)}
    assert sorted(n for name, n in calls.items() if not name.startswith("optimizer") and n > 1) == [4, 4]


def has_product(body):
    return bool(matmuls_of(body.graph))


@pytest.mark.parametrize(("mesh", "policy"), in_turn([MESHES["fsdp"], *REPLICATED], ["selective", "full", "none"]))
@pytest.mark.sample(2)
def test_layers_are_one_body_a_phase_whatever_travels_beside_them(mesh, policy):
    """Check that starts and arrivals for other layers are separate, so that first, last and other layers are equal."""
    program, _ = segmented(mesh, policy=policy)
    bodies = {body: calls for body, calls in calls_of(program).items() if "blocks" in str(ir.layer(calls[0]))}
    products = [sorted(str(ir.layer(call)) for call in calls) for body, calls in bodies.items() if has_product(body)]
    assert products == [[f"blocks.{i}" for i in range(4)]] * 2
    apart = {kind_of(node) for body in bodies if not has_product(body) for node in body.graph.nodes}
    assert apart > {"all_gather", "reduce_scatter"} if ("dp_shard", 2) in mesh else "all_reduce" in apart


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", quick([({"dp_shard": 2, "tp": 2},), ({"tp": 2},)], 0))
def test_layers_of_a_model_are_one_body_a_phase(mesh):
    model = llama(5, dim=64, n_kv_heads=2, ffn_dim=64, vocab_size=64)
    batch = {key: value[:, :4] for key, value in batches(1, rows=4)[0].items()}
    programs = []
    compile_lockstep(model, llama_loss, batch, mesh, passes={"remat": {"policy": "selective"}},
                     observe=lambda program, record: programs.append(program) if record.program == "step" else None)
    result = [[ir.layer(c) for c in calls] for body, calls in calls_of(programs[-1]).items() if has_product(body)]
    of_layers = [sorted(layers) for layers in result if any(layers)]
    assert of_layers == [[Layer("layers", i) for i in range(5)]] * 2


def test_names_of_layers_and_values_are_not_in_a_bodys_text():
    program, _ = segmented()
    assert not any(
        "blocks" in body.key or body_of_call(node) is None
        for body, calls in calls_of(program).items()
        for node in calls
    )


def test_a_body_that_returns_more_than_a_call_needs_serves_it():
    small = Small()
    x = small.input("x", cut((4, 4)), "batch")
    for layer in range(3):
        product = small.call(aten.mm.default, x, x)
        x = small.call(aten.sin.default, product)
        for node in (product, x):
            ir.update(node, layer=Layer("layers", layer))
    program = small.program([("loss", "a", x, cut((4, 4)))], Stage.EXPLICIT)
    returned = program.results()[0]
    earlier = next(n for n in program.calls() if n.target is aten.mm.default)
    program.graph.output_node().args = ((returned, earlier),)
    program = replace(program, outputs=(*program.outputs, ir.Output("b", "metric", cut((4, 4)))))
    program = ordered(program, small.ctx)
    after, report = Segment()(program, small.ctx)
    assert report.counts == {"calls": 3, "bodies": 1}
    verify_composed("segment", program, after)


def test_updates_of_any_shape_are_one_body():
    program, _ = segmented()
    flat = [calls for body, calls in calls_of(program).items() if body.flat]
    shapes = [{tuple(v.shape) for call in calls for n in call.args if (v := ir.example(n)).dim()} for calls in flat]
    parameters = [i for i in program.inputs if i.kind == "parameter"]
    assert sorted(map(len, flat)) == [1, len(parameters) - 1, len(parameters)]  # squares, sums of them, updates
    assert all(len(s) > 3 for s, calls in zip(shapes, flat) if len(calls) > 1)


@pytest.mark.parametrize(
    ("make", "flat"),
    [
        (lambda s, x, y: s.call(aten.mul.Tensor, x, y), True),
        (lambda s, x, y: s.call(aten.sum.default, s.call(aten.mul.Tensor, x, y)), True),
        (lambda s, x, y: s.call(aten.mul.Tensor, x, s.input("n", Spec(()))), True),
        (lambda s, x, y: s.call(aten.mul.Tensor, x, s.call(aten.t.default, y)), False),
        (lambda s, x, y: s.call(aten.sum.dim_IntList, x, [0]), False),
        (lambda s, x, y: s.call(aten.mul.Tensor, x, s.input("row", cut((4,)))), False),
        (
            lambda s, x, y: s.call(aten.mul.Tensor, s.call(aten.expand.default, s.input("row", cut((4,))), [4, 4]), y),
            False,
        ),
        (lambda s, x, y: s.call(aten.cumsum.default, x, 0), False),
        (lambda s, x, y: s.call(aten.mul.Tensor, s.call(aten.movedim.int, s.call(aten.exp.default, x), 0, 0), y), False),
    ],
    ids=["product", "sum", "number", "transposed", "rows", "broadcast", "expanded", "cumulative", "of its own"],
)
def test_what_is_flat(make, flat):
    small = Small()
    x, y = small.input("x", cut((4, 4))), small.input("y", cut((4, 4)))
    result = make(small, x, y)
    spec = cut(tuple(ir.example(result).shape))
    program = small.program([("loss", "l", result, spec)], Stage.EXPLICIT)
    after, _ = Segment()(ordered(program, small.ctx), small.ctx)
    assert [body.flat for body in calls_of(after)] == [flat]


# ---- borders ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_no_two_values_given_to_a_body_share_memory(mesh):
    program, _ = segmented(mesh)
    for body, calls in calls_of(program).items():
        assert not any(is_view(n) for call in calls for n in call.args) or body.flat
        assert all(len(set(call.args)) == len(call.args) for call in calls)


def test_what_a_collective_sends_is_alive_until_it_is_waited_for():
    small = Small(tp=2)
    x = small.input("x", cut((4, 4)), "batch")
    sent = small.call(aten.mm.default, x, x)
    start = small.call(c10d.all_reduce.default, sent, "sum", "tp")
    between = small.call(aten.mm.default, x, sent)
    wait = small.call(c10d.wait_tensor.default, start)
    last = small.call(aten.mm.default, between, wait)
    for node, layer in ((sent, 0), (start, 0), (between, 1), (wait, 2), (last, 2)):
        ir.update(node, layer=Layer("layers", layer))
    program = small.program([("loss", "l", last, cut((4, 4)))], Stage.EXPLICIT)
    program = ordered(program, small.ctx)
    after, _ = Segment()(program, small.ctx)
    calls = list(filter(body_of_call, after.calls()))
    assert len(calls) == 3
    assert len(list(in_flight(program.graph.nodes))) == 1
    waiting = next(c for c in calls if any(n.target is c10d.wait_tensor.default for n in c.target.graph.nodes))
    assert waiting is calls[2] or waiting is calls[1]
    assert {sent.name, start.name} <= {n.name for n in waiting.args}
    verify_composed("segment", program, after)


def test_what_arrives_from_a_neighbour_is_no_view():
    small = Small(cp=2)
    x = small.input("x", cut((4, 4)), "batch")
    sent = small.call(aten.mm.default, x, x)
    start = small.call(shift, sent, "cp", 1)
    received = small.call(arrive, start, sent)
    last = small.call(aten.mm.default, received, x)
    for node, layer in ((sent, 0), (start, 0), (received, 1), (last, 1)):
        ir.update(node, layer=Layer("layers", layer))
    program = small.program([("loss", "l", last, cut((4, 4)))], Stage.EXPLICIT)
    program = ordered(program, small.ctx)
    after, report = Segment()(program, small.ctx)
    assert report.counts["calls"] == 2
    assert sum(n.target is arrive for body in calls_of(after) for n in body.graph.nodes) == 1
    verify_composed("segment", program, after)


def test_what_does_not_repeat_is_cut_by_size():
    small = Small()
    x = small.input("x", cut((4, 4)), "batch")
    for _ in range(12):
        x = small.call(aten.sin.default, small.call(aten.mm.default, x, x))
    program = small.program([("loss", "l", x, cut((4, 4)))], Stage.EXPLICIT)
    _, full = Segment()(ordered(program, small.ctx), small.ctx)
    _, pieces = Segment(max_nodes=6)(ordered(program, small.ctx), small.ctx)
    _, one = Segment(max_nodes=None)(program, small.ctx)
    assert full.counts["calls"] == one.counts["calls"] == 1
    assert pieces.counts == {"calls": 4, "bodies": 1}


def test_a_constant_that_has_no_text_of_its_own_is_refused():
    small = Small()
    node = small.call(aten.sin.default, small.input("x", cut((4, 4)), "batch"))
    program = small.program([("loss", "l", node, cut((4, 4)))], Stage.EXPLICIT)
    node.kwargs = {"out": object()}
    with pytest.raises(ir.CompileError, match="constant of type object"):
        Segment()(ordered(program, small.ctx), small.ctx)


# ---- dropout ------------------------------------------------------------------------------------------


class Dropping(torch.nn.Module):
    """A model of linear layers with dropout."""

    def __init__(self, n):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4).double() for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.dropout(layer(x), 0.5)
        return x


def dropping(enabled, n=5):
    """Return the losses of three steps, and the bodies that were called."""
    torch.manual_seed(0)
    programs, rows = [], [{"x": torch.full((4, 4), float(i)).double()} for i in (1, 1, 2)]
    step = compile_lockstep(
        Dropping(n), lambda model, batch: model(batch["x"]).square().mean(), rows[0], {"dp_shard": 2},
        passes={"segment": {} if enabled else {"max_nodes": None}},
        observe=lambda program, record: programs.append(program) if record.program == "step" else None,
    )
    return [step(row) for row in rows], calls_of(programs[-1])


@pytest.mark.full
def test_layers_that_drop_out_are_one_body():
    (losses, bodies), (wanted, _) = dropping(True), dropping(False)
    assert losses == wanted
    deeper = dropping(True, 7)[1]
    assert [b.key for b in deeper] == [b.key for b in bodies]
    assert max(len(calls) for body, calls in deeper.items() if has_product(body)) == 5
