"""Recording, played by a stand-in for `torch.cuda`: programs whole and in runs, and what they carry to each other."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from small_programs import Small, cut, ordered
from torch import fx

from compiler_trainer.step.ranks import stop_ranks
from passes.lower import cudagraphs
from passes.lower.backends import NamingInterpreter
from passes.lower.calls import Calls
from passes.lower.cudagraphs import Recorder, Replayed
from passes.lower.segment import Segment
from passes.program import ir
from passes.program.bodies import calls_of
from passes.program.layer import Layer
from passes.program.stages import Stage

aten = torch.ops.aten
F32 = torch.float32


class PlayedGraph:
    """Replays what was recorded into the same results, by running it again."""

    def replay(self):
        (part,) = (part for part in cudagraphs._all if part.graph is self)
        for result, new in zip(part.results, part.run(list(part.values)), strict=True):
            result.copy_(new)

    def reset(self):
        pass


@pytest.fixture
def done(monkeypatch):
    """A CUDA that is not there; what was done on it."""
    found = []

    @contextlib.contextmanager
    def recording(graph, **options):
        (part,) = (part for part in cudagraphs._all if part.values and part.graph is None)
        kept = [value.clone() for value in part.values]
        yield
        found.append("record")
        for value, before in zip(part.values, kept, strict=True):  # what is recorded computes nothing
            value.copy_(before)

    class Stream:
        def wait_stream(self, other):
            found.append("wait")

    on = {"Stream": Stream, "CUDAGraph": PlayedGraph, "graph": recording, "current_stream": Stream}
    on |= {"stream": lambda stream: contextlib.nullcontext(), "graph_pool_handle": lambda: (0, 0)}
    for name, value in on.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield found
    cudagraphs.release()


def stepping(args):
    """w += lr * x; its sum."""
    x, lr, w = args
    args.clear()
    w += lr * x
    return (w.sum(),)


@pytest.fixture
def replayed(done):
    return Replayed(stepping, ["x", "lr", "w"], {0, 1}, SimpleNamespace(pool=None, stream=None), lambda: True)


def test_two_runs_then_one_recording_then_replays_of_what_is_new(replayed, done):
    w, wanted = torch.zeros(3), torch.zeros(3)
    for i in range(5):
        x, lr = torch.full((3,), i + 1.0), torch.tensor(0.1 * (i + 1))
        wanted = wanted + lr * x
        (found,) = replayed([x, lr, w])
        torch.testing.assert_close((w, found), (wanted, wanted.sum()))
        assert done == ["record"] * (i > 1)


def test_state_that_moved_is_refused(replayed):
    given = [torch.ones(3), torch.tensor(0.1), torch.zeros(3)]
    for _ in range(3):
        replayed(list(given))
    with pytest.raises(RuntimeError, match="w is another tensor than the CUDA graph has recorded"):
        replayed([*given[:2], torch.zeros(3)])


def test_recordings_end_before_ranks_part(replayed, done):
    """NCCL waits for those that use a communicator when it is destroyed."""
    w = torch.zeros(3)
    for _ in range(3):
        replayed([torch.ones(3), torch.tensor(0.1), w])
    assert replayed.graph is not None
    stop_ranks()
    assert replayed.graph is None and not replayed.values and not replayed.results


# ---- in runs ----------------------------------------------------------------------------------------


def three_layers():
    """Three layers, the second of which reads the host; the last reads what both have made."""
    small = Small()
    x, w = small.input("x", cut((4, 4)), "batch", F32), small.input("w", cut((4, 4)), dtype=F32)
    first = small.call(aten.mm.default, x, w)
    second = small.call(aten.mm.default, first, w)
    found = small.call(aten.count_nonzero.default, second)
    third = small.call(aten.mm.default, second, first)
    for node, layer in ((first, 0), (second, 1), (found, 1), (third, 2)):
        ir.set_origin(node, f"model.py:{layer}", f"layers.{layer}")
        ir.set_layer(node, Layer("layers", layer))
    outputs = [("loss", "l", third, cut((4, 4))), ("metric", "m", found, cut(()))]
    program, _ = Segment()(ordered(small.program(outputs, Stage.EXPLICIT), small.ctx), small.ctx)
    return program, found.name


def interpreted(body):
    """What runs a body, and counts."""
    module = fx.GraphModule(torch.nn.Module(), body.graph)

    def run(args):
        values = list(args)
        args.clear()
        run.times += 1
        return fx.Interpreter(module).run(*values, enable_io_processing=False)

    run.times = 0
    return run


def test_a_program_that_reads_the_host_is_recorded_around_it(done, monkeypatch):
    program, host = three_layers()
    monkeypatch.setattr("passes.lower.host_reads.why_not", lambda node, compiled: "reads" if node.name == host else "")
    bodies = {body: interpreted(body) for body in calls_of(program)}
    run = Recorder().recorded(program, Calls(program, bodies))
    assert [type(call.run) is Replayed for call in run.run.calls] == [True, False, True]
    w = torch.eye(4) * 2
    for i in range(5):
        x = torch.full((4, 4), i + 1.0)
        loss, count = run([x, w])
        first = x @ w
        torch.testing.assert_close((loss, count), (first @ w @ first, torch.tensor(16)))
        w += 0.1  # state changes in place
    assert done == ["wait"] * 4 + ["wait", "record", "record", "wait"] + ["wait"] * 4


def test_results_are_not_written_over_by_later_replays(done, monkeypatch):
    program, _ = three_layers()
    monkeypatch.setattr("passes.lower.host_reads.why_not", lambda node, compiled: "")
    run = Recorder().recorded(program, Calls(program, {body: interpreted(body) for body in calls_of(program)}))
    w, kept = torch.eye(4), []
    for i in range(5):
        x = torch.full((4, 4), i + 1.0)
        kept.append((run([x, w])[0], x @ w @ w @ (x @ w)))
    for ours, theirs in kept:
        torch.testing.assert_close(ours, theirs)


def test_nothing_is_recorded_of_what_reads_the_host_everywhere(done, monkeypatch):
    program, _ = three_layers()
    monkeypatch.setattr("passes.lower.host_reads.why_not", lambda node, compiled: "reads" * (node.op == "call_function"))
    calls = Calls(program, {body: interpreted(body) for body in calls_of(program)})
    assert Recorder().recorded(program, calls) is calls and not done


# ---- between programs -------------------------------------------------------------------------------


def gathering():
    """What is made once a step, of a parameter."""
    small = Small()
    w = small.input("w", cut((3,)), dtype=F32)
    return small.program([("carried", "full", small.call(aten.mul.Tensor, w, 2.0), cut((3,)))])


def reading():
    """What reads it for each microbatch."""
    small = Small()
    full, x = small.input("full", cut((3,)), "carried", F32), small.input("x", cut((3,)), "batch", F32)
    return small.program([("loss", "loss", small.call(aten.sum.default, small.call(aten.mul.Tensor, full, x)), cut(()))])


def test_what_is_carried_from_a_recording_is_read_where_it_lies(done):
    recorder = Recorder()
    gather, read = (recorder.recorded(p, NamingInterpreter(p.module)) for p in (gathering(), reading()))
    w, lay = torch.ones(3), []
    for _ in range(5):
        (full,) = gather([w])
        lay.append(full)
        for m in range(2):
            (loss,) = read([full, torch.full((3,), m + 1.0)])
            torch.testing.assert_close(loss, (2 * w * (m + 1)).sum())
        w += 1.0
    assert lay[2] is lay[3] is lay[4]  # no copy of gathered parameters, not even one
    assert done.count("record") == 2  # reading was recorded once it was known where they lie


def test_what_is_carried_from_elsewhere_is_copied(done):
    program = reading()
    read = Recorder().recorded(program, NamingInterpreter(program.module))
    for i in range(5):
        (loss,) = read([torch.full((3,), i + 1.0), torch.ones(3)])
        torch.testing.assert_close(loss, torch.tensor(3.0 * (i + 1)))

