"""What a CUDA graph cannot record is found in the finished program; recording itself is played by a stand-in."""

from __future__ import annotations

import contextlib
import operator

import pytest
import torch
from oracle import NO_DECAY, perceptron, points, squared_error
from small_programs import Small, cut, ordered
from sweeps import quick
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiler_trainer import compile_step
from compiler_trainer.config.device import settled
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config
from compiler_trainer.planning.dry import compile_dry
from compiler_trainer.step import given as programs
from compiler_trainer.step.given import Captured, check_recordable
from passes.lower.cudagraphs import Replayed, breaks
from passes.lower.segment import Segment
from passes.program import ir
from passes.program.attend import attend
from passes.program.bodies import calls_of
from passes.program.host import offload
from passes.program.layer import Layer
from passes.program.stages import Stage
from passes.program.torch_private import FakeTensor

aten = torch.ops.aten
F32 = torch.float32


def fake(small, device="cuda", shape=(4, 4), dtype=F32):
    """A value on a device, which need not be there."""
    return FakeTensor(small.ctx.fake_mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device(device))


def planted(target, *others, of=fake):
    """A layer, an operator planted behind it, and another layer, all on CUDA and cut into bodies.

    `of` gives what the operator computes; of `others`, given after the layer's result, "mask" and "rows" are indices and
    "host" is a number in host memory.
    """
    small = Small()
    x, w, mask, rows, host = (small.input(name, cut((4, 4)), dtype=F32) for name in ("x", "w", "mask", "rows", "host"))
    first = small.call(aten.mm.default, x, w)
    given = {"mask": mask, "rows": rows, "host": host}
    operands = [[given[o[0]]] if isinstance(o, list) else given.get(o, o) for o in others]
    found = small.builder.graph.call_function(target, (first, *operands))
    second = small.call(aten.mm.default, first, w)
    for node in (x, w, first, found, second):
        ir.set_value(node, fake(small))
    ir.set_value(mask, fake(small, dtype=torch.bool))
    ir.set_value(rows, fake(small, shape=(4,), dtype=torch.int64))
    ir.set_value(host, fake(small, "cpu", ()))
    for node, line, layer in ((first, 1, 0), (found, 41, 0), (second, 3, 1)):
        ir.set_origin(node, f"model.py:{line}", f"layers.{layer}")
        ir.set_layer(node, Layer("layers", layer))
        ir.set_phase(node, "forward")
    outputs = [("loss", "l", second, cut((4, 4))), ("metric", "m", found, cut((4, 4)))]
    given = ordered(small.program(outputs, Stage.EXPLICIT), small.ctx)
    found = next(node for node in given.calls() if node.name == found.name)
    program, _ = Segment()(given, small.ctx)
    ir.set_value(found, of(small))  # only now: no pass takes a shape that it does not know
    assert any(node.target is target for body in calls_of(program) for node in body.graph.nodes)
    return program


def unknown_size(small):
    """A tensor as long as only data will tell."""
    return fake(small, shape=(ShapeEnv().create_unbacked_symint(),))


BREAKS = {
    "a number read": (planted(aten._local_scalar_dense.default), "reads a value on the host"),
    "a shape of data": (planted(aten.nonzero.default, of=unknown_size), "depends on data"),
    "an unbacked size": (planted(aten.neg.default, of=unknown_size), "depends on data"),
    "an unbacked number": (planted(aten.neg.default, of=lambda _: ShapeEnv().create_unbacked_symint()), "depends on data"),
    "a mask": (planted(aten.index_put.default, ["mask"], "rows"), "counts on the host what a mask selects"),
    "an assertion": (planted(aten._assert_async.default, of=lambda _: None), "tests a value"),
    "a number given": (planted(aten.mul.Tensor, "host"), "is of cpu and cuda"),
    "a copy": (planted(aten._to_copy.default, of=lambda small: fake(small, "cpu")), "is of cpu and cuda"),
    "offloading": (planted(offload, of=lambda small: fake(small, "cpu")), "is of cpu and cuda"),
}


@pytest.mark.parametrize(("program", "reason"), BREAKS.values(), ids=BREAKS)
def test_what_breaks_a_recording_is_named_with_its_line(program, reason):
    (said,) = breaks(program)
    assert "(model.py:41)" in said and reason in said
    with pytest.raises(UserError, match=r"lower.cudagraphs: .*step: %\w+ \(model.py:41\)"):
        check_recordable({"step": Captured(program, None)})


def test_attention_by_interval_is_recorded_only_compiled():
    """The eager backend's kernel reads its bounds."""
    small = Small()
    q, bounds = small.input("q", cut((1, 2, 4, 8)), dtype=F32), small.input("bounds", cut((1, 4)), dtype=torch.int64)
    out = small.call(operator.getitem, small.call(attend, q, q, q, bounds, bounds, None, [], 1.0, ""), 0)
    program = small.program([("loss", "l", out, cut((1, 2, 4, 8)))])
    assert breaks(program) == []
    (said,) = breaks(program, compiled=False)
    assert "use lower.backend=inductor" in said


def test_all_that_breaks_is_named():
    found = [Captured(program, None) for program, _ in BREAKS.values()]
    with pytest.raises(UserError) as caught:
        check_recordable({f"step{i}": each for i, each in enumerate(found)})
    assert all(f"step{i}: %" in str(caught.value) for i in range(len(found)))


@pytest.mark.parametrize("operator", [(aten.neg.default,), (aten.index.Tensor, ["rows"])])
def test_what_can_be_recorded_is_not_named(operator):
    assert breaks(planted(*operator)) == []


@pytest.mark.parametrize("passes", quick([{}, {"cast": {"param_dtype": "bfloat16", "float8": "rowwise"}}], 0), ids=["fp32", "float8"])
def test_a_dry_run_checks_too(passes, monkeypatch):
    options = {"mesh": {"dp_shard": 2, "tp": 2}, "model": {"n_layers": 1}, "lower": {"cudagraphs": True}, "passes": passes}
    cfg = settled(build(Config, options), on_gpu=False)
    compile_dry(cfg, None)
    monkeypatch.setattr(programs, "breaks", lambda *_: ["%item (model.py:41) reads a value on the host"])
    with pytest.raises(UserError, match=r"lower.cudagraphs: cannot record step: %item \(model.py:41\)"):
        compile_dry(cfg, None)


@pytest.mark.parametrize(("ranks", "says"), [("processes", "runs on cpu"), ("lockstep", "runs on cpu")])
def test_there_are_no_cuda_graphs_on_the_cpu(ranks, says):
    with pytest.raises(UserError, match=f"lower.cudagraphs: is true, but the step {says}"):
        compile_step(perceptron(), squared_error, points()[0], optim=NO_DECAY, ranks=ranks, lower={"cudagraphs": True})


# ---- recording, played ------------------------------------------------------------------------------


class PlayedGraph:
    """Records a run and replays it into the same results."""

    def replay(self):
        for result, new in zip(self.replayed.results, self.replayed.run(self.replayed.values), strict=True):
            result.copy_(new)


@pytest.fixture
def played(monkeypatch):
    """A program under recording: w += lr * x, returning its sum; and what was done."""
    done = []

    def run(values):
        x, lr, w = values
        done.append("run")
        w += lr * x
        return (w.sum(),)

    @contextlib.contextmanager
    def recording(graph, **options):
        done.append("record")
        kept = [value.clone() for value in replayed.values]
        yield
        done.pop()  # the run that was recorded computed nothing
        for value, before in zip(replayed.values, kept, strict=True):
            value.copy_(before)
        graph.replayed = replayed

    class Stream:
        def wait_stream(self, other):
            done.append("wait")

    for name, value in {"Stream": Stream, "CUDAGraph": PlayedGraph, "graph": recording, "current_stream": Stream,
                        "stream": lambda stream: contextlib.nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    kinds = {"x": "batch", "lr": "scalar", "w": "parameter"}
    replayed = Replayed(run, [ir.Input(name, kind, cut((3,))) for name, kind in kinds.items()])
    return replayed, done


def test_two_runs_then_one_recording_then_replays_of_what_is_new(played):
    replayed, done = played
    w, wanted, found = torch.zeros(3), torch.zeros(3), []
    for i in range(5):
        x, lr = torch.full((3,), i + 1.0), torch.tensor(0.1 * (i + 1))
        wanted = wanted + lr * x
        found.append((replayed([x, lr, w])[0], wanted.sum()))
        torch.testing.assert_close(w, wanted)
    for ours, theirs in found:  # a result is not written over by later replays
        torch.testing.assert_close(ours, theirs)
    assert done == ["wait", "run", "wait"] * 2 + ["record"] + ["run"] * 3


def test_state_that_moved_is_refused(played):
    replayed, _ = played
    given = [torch.ones(3), torch.tensor(0.1), torch.zeros(3)]
    for _ in range(3):
        replayed(given)
    with pytest.raises(RuntimeError, match="w is another tensor than the CUDA graph has recorded"):
        replayed([*given[:2], torch.zeros(3)])
