"""Recording, with a stand-in for `torch.cuda`: complete programs and runs, and the values that they carry."""

from __future__ import annotations

import pytest
import torch
from played_cuda import played_cuda
from small_programs import Small, cut, ordered
from torch import fx

from compiler_trainer.step.ranks import stop_ranks
from passes.ir import ir
from passes.ir.bodies import calls_of
from passes.ir.layer import Layer
from passes.ir.record import Origin
from passes.ir.stages import Stage
from passes.lower.backends import NamingInterpreter
from passes.lower.calls import Calls
from passes.lower.cudagraphs import Recorder, Replayed
from passes.lower.segment import Segment

aten = torch.ops.aten
F32 = torch.float32


@pytest.fixture
def done():
    """Replace CUDA by a stand-in; return the list of its calls."""
    with played_cuda() as result:
        yield result


def stepping(args):
    """Build w += lr * x, and its sum."""
    x, lr, w = args
    args.clear()
    w += lr * x
    return (w.sum(),)


@pytest.fixture
def replayed(done):
    return Replayed(stepping, ["x", "lr", "w"], {0, 1})


def test_started_then_recorded_on_what_it_was_given_then_replayed_with_what_is_new(replayed, done):
    w, wanted = torch.zeros(3), torch.zeros(3)
    for i in range(5):
        if i == 2:
            replayed.record({}, (0, 0), None)
        x, lr = torch.full((3,), i + 1.0), torch.tensor(0.1 * (i + 1))
        wanted = wanted + lr * x
        (actual,) = replayed([x, lr, w])
        torch.testing.assert_close((w, actual), (wanted, wanted.sum()))
    assert done == ["record"]


def test_state_that_moved_is_refused(replayed):
    inputs = [torch.ones(3), torch.tensor(0.1), torch.zeros(3)]
    replayed(list(inputs))
    replayed.record({}, (0, 0), None)
    replayed(list(inputs))
    with pytest.raises(RuntimeError, match="w is not the tensor that the CUDA graph recorded"):
        replayed([*inputs[:2], torch.zeros(3)])


# ---- in runs ----------------------------------------------------------------------------------------


def three_layers():
    """Build three layers, the second of which reads the host; the last reads the results of both others."""
    small = Small()
    x, w = small.input("x", cut((4, 4)), "batch", F32), small.input("w", cut((4, 4)), dtype=F32)
    first = small.call(aten.mm.default, x, w)
    second = small.call(aten.mm.default, first, w)
    result = small.call(aten.count_nonzero.default, second)
    third = small.call(aten.mm.default, second, first)
    for node, layer in ((first, 0), (second, 1), (result, 1), (third, 2)):
        ir.update(node, origin=Origin(f"model.py:{layer}", (f"layers.{layer}",)), layer=Layer("layers", layer))
    outputs = [("loss", "l", third, cut((4, 4))), ("metric", "m", result, cut(()))]
    program, _ = Segment()(ordered(small.program(outputs, Stage.EXPLICIT), small.ctx), small.ctx)
    return program, result.name


def interpreted(body):
    """Return a function that interprets a body and counts its calls."""
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
    recorder = Recorder()
    run = recorder.recorded(program, Calls(program, bodies))
    assert [type(call.run) is Replayed for call in run.at(None).run.calls] == [True, False, True]
    w = torch.eye(4) * 2
    for i in range(5):
        recorder.begin()
        x = torch.full((4, 4), i + 1.0)
        loss, count = run([x, w])
        first = x @ w
        torch.testing.assert_close((loss, count), (first @ w @ first, torch.tensor(16)))
        w += 0.1  # state changes in place
    assert done == ["wait"] * 4 + ["record", "record"] + ["wait"] * 6


def test_results_are_not_written_over_by_later_replays(done, monkeypatch):
    program, _ = three_layers()
    monkeypatch.setattr("passes.lower.host_reads.why_not", lambda node, compiled: "")
    recorder = Recorder()
    run = recorder.recorded(program, Calls(program, {body: interpreted(body) for body in calls_of(program)}))
    w, saved = torch.eye(4), []
    for i in range(5):
        recorder.begin()
        x = torch.full((4, 4), i + 1.0)
        saved.append((run([x, w])[0], x @ w @ w @ (x @ w)))
    for ours, theirs in saved:
        torch.testing.assert_close(ours, theirs)


def test_nothing_is_recorded_of_what_reads_the_host_everywhere(done, monkeypatch):
    program, _ = three_layers()
    monkeypatch.setattr("passes.lower.host_reads.why_not", lambda node, compiled: "reads" * (node.op == "call_function"))
    calls = Calls(program, {body: interpreted(body) for body in calls_of(program)})
    assert Recorder().recorded(program, calls) is calls and not done


# ---- between programs -------------------------------------------------------------------------------


def gathering(kind="parameter"):
    """Build a value for other programs, from a parameter once per step, or from a microbatch's input."""
    small = Small()
    w = small.input("w", cut((3,)), kind, F32)
    return small.program([("carried", "full", small.call(aten.mul.Tensor, w, 2.0), cut((3,)))])


def reading():
    """Build a program that reads it for each microbatch."""
    small = Small()
    full, x = small.input("full", cut((3,)), "carried", F32), small.input("x", cut((3,)), "batch", F32)
    return small.program([("loss", "loss", small.call(aten.sum.default, small.call(aten.mul.Tensor, full, x)), cut(()))])


def test_what_is_carried_from_a_recording_is_read_where_it_lies(done):
    recorder = Recorder()
    gather, read = (recorder.recorded(p, NamingInterpreter(p.module)) for p in (gathering(), reading()))
    w, lay = torch.ones(3), []
    for _ in range(5):
        recorder.begin()
        (full,) = gather([w])
        lay.append(full)
        for m in range(2):
            (loss,) = read([full, torch.full((3,), m + 1.0)], 0)
            torch.testing.assert_close(loss, (2 * w * (m + 1)).sum())
        w += 1.0
    assert lay[2] is lay[3] is lay[4]  # gathered parameters are never copied
    assert done.count("record") == 2


def test_what_is_in_flight_in_two_slots_does_not_meet(done):
    """Make two values before the first is read; each is read from its slot."""
    recorder = Recorder()
    make, read = (recorder.recorded(p, NamingInterpreter(p.module)) for p in (gathering("batch"), reading()))
    w, lay = torch.ones(3), []
    for _ in range(5):
        recorder.begin()
        made = [make([w * (slot + 1)], slot)[0] for slot in range(2)]
        lay.append(made)
        for slot in range(2):
            (loss,) = read([made[slot], torch.ones(3)], slot)
            torch.testing.assert_close(loss, (2 * w * (slot + 1)).sum())
        w += 1.0
    assert all(lay[2][slot] is lay[4][slot] for slot in range(2)) and lay[2][0] is not lay[2][1]
    assert done.count("record") == 4


@pytest.mark.parametrize("sent", [(), ("full",)])
def test_what_other_ranks_are_sent_is_copied_out_of_the_recording(done, sent):
    recorder = Recorder()
    recorder.sent = sent
    make, read = (recorder.recorded(p, NamingInterpreter(p.module)) for p in (gathering(), reading()))
    w, made = torch.ones(3), []
    for _ in range(5):
        recorder.begin()
        made.append(make([w], 0)[0])
        (loss,) = read([made[-1], torch.ones(3)], 0)
        torch.testing.assert_close(loss, (2 * w).sum())
        w += 1.0
    assert (made[3] is made[4]) == (not sent)


def test_what_is_carried_from_elsewhere_is_copied(done):
    program, recorder = reading(), Recorder()
    read = recorder.recorded(program, NamingInterpreter(program.module))
    for i in range(5):
        recorder.begin()
        (loss,) = read([torch.full((3,), i + 1.0), torch.ones(3)])
        torch.testing.assert_close(loss, torch.tensor(3.0 * (i + 1)))
    assert done.count("record") == 1


def test_recordings_end_before_ranks_part(done):
    """Check the order, because NCCL waits for users of a communicator when it is destroyed."""
    program, recorder = reading(), Recorder()
    read = recorder.recorded(program, NamingInterpreter(program.module))
    for _ in range(3):
        recorder.begin()
        read([torch.ones(3), torch.ones(3)])
    (part,) = (call.run for call in read.at(None).run.calls)
    assert part.graph is not None
    stop_ranks()
    assert part.graph is None and not part.values and not part.results
