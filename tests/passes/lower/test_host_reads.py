"""Nodes that read the host are found in the finished program, in any part of a step, and split the recording."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from oracle import NO_DECAY, perceptron, points, squared_error
from small_programs import Small, cut, ordered
from sweeps import quick
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiler_trainer import compile_step
from compiler_trainer.config.compose import compose
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config, LowerConfig
from compiler_trainer.planning.dry import compile_dry, predict_step
from compiler_trainer.step import captured as programs
from compiler_trainer.step.captured import Captured, check_recordable, recorded
from passes.communication.layer_starts import matmuls_of
from passes.communication.node_order import in_flight
from passes.ir import ir
from passes.ir.bodies import body_of_call, calls_of, flatten
from passes.ir.layer import Layer
from passes.ir.operators import name_of
from passes.ir.record import BodyNode, Origin
from passes.ir.stages import Stage
from passes.lower.calls import steps_of
from passes.lower.host_reads import find_breaks
from passes.lower.runs import describe_recordings, names_in, runs_of
from passes.lower.segment import Segment
from passes.ops.attend import attend
from passes.ops.host import offload
from passes.torch_private import FakeTensor

aten = torch.ops.aten
F32 = torch.float32


def fake(small, device="cuda", shape=(4, 4), dtype=F32):
    """Return a value on a device that need not exist."""
    return FakeTensor(small.ctx.fake_mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device(device))


def planted(target, *others, of=fake):
    """Return a layer, a planted operator, and another layer, all on CUDA and cut into bodies.

    `of` computes the operator's result; of `others`, passed after the layer's result, "mask" and "rows" are indices and
    "host" is a number in host memory.
    """
    small = Small()
    x, w, mask, rows, host = (small.input(name, cut((4, 4)), dtype=F32) for name in ("x", "w", "mask", "rows", "host"))
    first = small.call(aten.mm.default, x, w)
    inputs = {"mask": mask, "rows": rows, "host": host}
    operands = [[inputs[o[0]]] if isinstance(o, list) else inputs.get(o, o) for o in others]
    result = small.builder.graph.call_function(target, (first, *operands))
    second = small.call(aten.mm.default, first, w)
    for node in (x, w, first, result, second):
        ir.set_value(node, fake(small))
    ir.set_value(mask, fake(small, dtype=torch.bool))
    ir.set_value(rows, fake(small, shape=(4,), dtype=torch.int64))
    ir.set_value(host, fake(small, "cpu", ()))
    for node, line, layer in ((first, 1, 0), (result, 41, 0), (second, 3, 1)):
        ir.update(node, origin=Origin(f"model.py:{line}", (f"layers.{layer}",)), layer=Layer("layers", layer), phase="forward")
    outputs = [("loss", "l", second, cut((4, 4))), ("metric", "m", result, cut((4, 4)))]
    inputs = ordered(small.program(outputs, Stage.EXPLICIT), small.ctx)
    result = next(node for node in inputs.calls() if node.name == result.name)
    program, _ = Segment()(inputs, small.ctx)
    for call in filter(body_of_call, program.calls()):  # only now, because passes need known shapes
        nodes = ir.record(call).body_nodes
        changed = {result.name: BodyNode(result.name, replace(ir.record(result), value=of(small)))}
        ir.update(call, body_nodes=tuple(changed.get(node.name, node) for node in nodes))
    assert any(node.target is target for body in calls_of(program) for node in body.graph.nodes)
    return program


def unknown_size(small):
    """Return a tensor whose length depends on data."""
    return fake(small, shape=(ShapeEnv().create_unbacked_symint(),))


BREAKS = {
    "a number read": (planted(aten._local_scalar_dense.default), "reads a value on the host"),
    "a shape of data": (planted(aten.nonzero.default, of=unknown_size), "depends on data"),
    "an unbacked size": (planted(aten.neg.default, of=unknown_size), "depends on data"),
    "an unbacked number": (planted(aten.neg.default, of=lambda _: ShapeEnv().create_unbacked_symint()), "depends on data"),
    "a mask": (planted(aten.index_put.default, ["mask"], "rows"), "counts the entries of a mask on the host"),
    "an assertion": (planted(aten._assert_async.default, of=lambda _: None), "tests a value"),
    "a number given": (planted(aten.mul.Tensor, "host"), "uses cpu and cuda"),
    "a copy": (planted(aten._to_copy.default, of=lambda small: fake(small, "cpu")), "uses cpu and cuda"),
    "offloading": (planted(offload, of=lambda small: fake(small, "cpu")), "use another passes.remat.policy"),
    "a check in secret": (planted(aten._linalg_check_errors.default, "f", of=lambda _: None), "reads a value on the host"),
}


@pytest.mark.parametrize(("program", "reason"), BREAKS.values(), ids=BREAKS)
def test_what_breaks_a_recording_is_named_with_its_line(program, reason):
    (result,) = find_breaks(program)
    assert "(model.py:41), forward: " in str(result) and reason in result.why
    with pytest.raises(UserError, match=r"lower.cudagraphs: .*step: %\w+ \(model.py:41\)"):
        check_recordable({"step": Captured(program, None)})


def test_attention_by_interval_is_recorded_only_compiled():
    """Check that the eager backend's kernel, which reads its bounds, is not recorded."""
    small = Small()
    q, bounds = small.input("q", cut((1, 2, 4, 8)), dtype=F32), small.input("bounds", cut((1, 4)), dtype=torch.int64)
    out = small.call(operator.getitem, small.call(attend, q, q, q, bounds, bounds, None, [], 1.0, ""), 0)
    program = small.program([("loss", "l", out, cut((1, 2, 4, 8)))])
    assert find_breaks(program) == []
    (result,) = find_breaks(program, compiled=False)
    assert "use lower.backend=inductor" in result.why


def test_all_that_breaks_is_named():
    result = [Captured(program, None) for program, _ in BREAKS.values()]
    with pytest.raises(UserError) as caught:
        check_recordable({f"step{i}": item for i, item in enumerate(result)})
    assert all(f"step{i}: %" in str(caught.value) for i in range(len(result)))


@pytest.mark.parametrize("operator", [(aten.neg.default,), (aten.index.Tensor, ["rows"])])
def test_what_can_be_recorded_is_not_named(operator):
    assert find_breaks(planted(*operator)) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("passes", quick([{}, {"cast": {"param_dtype": "bfloat16", "float8": "rowwise"}}], 0), ids=["fp32", "float8"])
def test_a_dry_run_checks_too(passes, monkeypatch):
    options = {"mesh": {"dp_shard": 2, "tp": 2}, "model": {"n_layers": 1}, "lower": {"cudagraphs": True}, "passes": passes}
    cfg = resolve_auto(build(Config, options), on_gpu=False)
    compile_dry(cfg, None)
    monkeypatch.setattr(programs, "find_breaks", lambda *_: ["%item (model.py:41) reads a value on the host"])
    with pytest.raises(UserError, match=r"lower.cudagraphs: cannot record step: %item \(model.py:41\)"):
        compile_dry(cfg, None)


@pytest.mark.parametrize(("ranks", "says"), [("processes", "runs on cpu"), ("lockstep", "runs on cpu")])
def test_there_are_no_cuda_graphs_on_the_cpu(ranks, says):
    with pytest.raises(UserError, match=f"lower.cudagraphs: is true, but the step {says}"):
        compile_step(perceptron(), squared_error, points()[0], optim=NO_DECAY, ranks=ranks, lower={"cudagraphs": True})


def test_auto_says_why_it_records_nothing():
    lower, program = build(LowerConfig, {"cudagraphs": "auto"}), {"step": Captured(BREAKS["a mask"][0], None)}
    (on_cpu,) = recorded(program, lower, torch.device("cpu"))
    assert on_cpu == "nothing is recorded: the step runs on cpu"
    (on_cuda,) = recorded(program, lower, torch.device("cuda"))
    assert on_cuda.startswith("1 of 2 calls of step are recorded: %index_put") and "use torch.where" in on_cuda
    with pytest.raises(UserError, match="lower.cudagraphs=auto records the parts around it"):
        recorded(program, build(LowerConfig, {"cudagraphs": True}), torch.device("cuda"))


def test_programs_that_are_recorded_whole_are_one_line():
    full = Captured(planted(aten.neg.default), None)
    programs = {"F0": full, "B0": Captured(BREAKS["a mask"][0], None), "U0": full}
    part, remainder = recorded(programs, build(LowerConfig, {"cudagraphs": "auto"}), torch.device("cuda"))
    assert part.startswith("1 of 2 calls of B0 are recorded: %index_put") and remainder == "F0, U0 are recorded"


# ---- whole jobs -------------------------------------------------------------------------------------

LAYER = {"model": {"n_layers": 1}}
EXPERTS = {"model": compose(["model=moe_debug"])["model"], "mesh": {"dp_shard": 2, "ep": 2}}
JOBS = {
    "default": LAYER | {"mesh": {"dp_shard": 1}},
    "experts, ep 2": EXPERTS,
    "cp 2": LAYER | {"mesh": {"dp_shard": 1, "cp": 2}},
    "cp 4": LAYER | {"mesh": {"dp_shard": 1, "cp": 4}},
    "pp 2": {"model": {"n_layers": 2}, "mesh": {"dp_shard": 1, "pp": 2}, "train": {"microbatches": 2}},
}


def programs_of(options, on_gpu=True):
    """Return the programs of a job, with the dtypes of a GPU."""
    return {name: item.program for name, item in compile_dry(resolve_auto(build(Config, options), on_gpu), None).programs.items()}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.sample(2)
def test_no_node_of_a_job_reads_the_host(job):
    result = {name: list(map(str, find_breaks(program))) for name, program in programs_of(JOBS[job]).items()}
    assert result and not any(result.values())


@pytest.mark.full
@pytest.mark.parametrize(("options", "on_gpu", "why"), [
    (LAYER | {"mesh": {"dp_shard": 1, "cp": 2}, "model": {"n_layers": 1, "attention": "documents"},
              "passes": {"context": {"method": "ring"}}}, True, "set passes.context.skip_steps=false"),
    (EXPERTS, False, "only bfloat16 has a kernel"),
])
def test_what_does_is_said_with_the_option(options, on_gpu, why):
    result = [item for program in programs_of(options, on_gpu).values() for item in find_breaks(program)]
    assert result and all(why in item.why for item in result)


def test_launches_of_recorded_stages_cost_nothing():
    slow = {"cluster": compose(["cluster=h100", "cluster.launch_us=500"])["cluster"]}
    jobs = (resolve_auto(build(Config, JOBS["pp 2"] | slow | {"lower": {"cudagraphs": on_cpu}}), True) for on_cpu in (False, True))
    started, replayed = (predict_step(cfg, compile_dry(cfg, None))["predicted"]["step_ms"] for cfg in jobs)
    assert replayed < 0.1 * started


def in_phase(program, phase):
    """Return the operators of a phase that yield a tensor."""
    return [node for node in program.calls() if ir.phase(node) == phase and ir.is_tensor(node)]


def product_in(program, phase):
    """Return the second matmul of a phase."""
    return [node for node in in_phase(program, phase) if node in matmuls_of(program.graph)][1]


def root_in(program, of_parameter):
    """Return the first square root of the optimizer: of the norm, or of a parameter's moment."""
    roots = (node for node in in_phase(program, "optimizer") if name_of(node) == "sqrt")
    return next(node for node in roots if bool(ir.parameter(node)) == of_parameter)


PLACES = {
    "forward": lambda program: product_in(program, "forward"),
    "loss": lambda program: in_phase(program, "forward")[-1],
    "backward": lambda program: product_in(program, "backward"),
    "clip": lambda program: root_in(program, False),
    "optimizer": lambda program: root_in(program, True),
}


@pytest.fixture(scope="module")
def sharded():
    """Return the step of a job whose gathers and reductions overlap with computation, in order."""
    options = LAYER | {"mesh": {"dp_shard": 2, "tp": 2}, "model": {"n_layers": 2}}
    return compile_dry(resolve_auto(build(Config, options), True), None).programs["step"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", PLACES)
def test_one_that_is_planted_is_named_and_splits_the_recording_in_each_phase(phase, sharded):
    program, ctx = sharded.program.copy(), sharded.ctx
    place = PLACES[phase](program)
    with program.graph.inserting_after(place):
        item = program.graph.call_function(aten._local_scalar_dense.default, (place,))
    ir.set_value(item, 1.0)
    ir.copy_origin(item, place)
    ir.update(item, role=ir.role(place))
    cut_up, _ = Segment()(program, ctx)
    (result,) = find_breaks(cut_up)
    assert result.node.name == item.name and "reads a value on the host" in result.why
    assert f"{ir.source(place) or ir.parameter(place) or 'no source line'}), {ir.phase(place)}: " in str(result)
    run_of = {name: i for i, run in enumerate(runs_of(cut_up)) for step in steps_of(cut_up)[run.first : run.last]
              for name in names_in(step)}
    assert not runs_of(cut_up)[run_of[item.name]].recorded
    travelling = list(in_flight(flatten(cut_up).graph.nodes))
    assert travelling and all(run_of[start.name] == run_of[wait.name] for start, wait in travelling)
    kinds = [run.recorded for run in runs_of(cut_up)]
    assert all(a != b for a, b in zip(kinds, kinds[1:])) and kinds.count(False) == 1
    assert describe_recordings({"step": cut_up}, True)[0].endswith(str(result))
