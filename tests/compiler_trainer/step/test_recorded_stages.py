"""Pipeline stages recorded as CUDA graphs give the same bits as unrecorded ones.

All ranks are played here, with stand-ins for CUDA graphs: a replay overwrites the results that other recordings left in
its memory.
"""

from __future__ import annotations

import pytest
import torch
from oracle import NO_DECAY, batches, llama, llama_loss
from played_cuda import played_cuda
from torch import fx

from compiler_trainer.step import compile as of_step
from compiler_trainer.step.runtime import LockstepRanks
from compiler_trainer.step.turns import sent_between, slots_of, turns_of_step
from passes.ir.bodies import calls_of
from passes.lower.calls import Calls
from passes.lower.cudagraphs import Recorder, names_carried
from passes.pipeline.schedules import interleaved, one_f_one_b, zbv, zero_bubble

MICROBATCHES, STEPS = 4, 5


class PlayedRanks(LockstepRanks):
    """Pipeline ranks of one process, whose compiled regions are called one by one, as in compiled programs."""

    def __init__(self, mesh, recorder):
        super().__init__(mesh)
        self.recorder = recorder

    def meet(self, programs):
        if self.recorder:
            self.recorder.sent = sent_between(p for p in programs.values() if not p.evaluates)

    def compile(self, name, program, ctx):
        run = Calls(program, {body: called(body) for body in calls_of(program)})
        return self.recorder.recorded(program, run) if self.recorder and not program.evaluates else run

    def begin(self):
        if self.recorder:
            self.recorder.begin()

    def run(self, compiled, inputs, slot=None):
        ((rank, values),) = inputs.items()
        with torch.no_grad():
            return {rank: compiled(values) if isinstance(compiled, Calls) else compiled(values, slot)}


def called(body):
    """Return the function that runs a compiled region."""
    module = fx.GraphModule(torch.nn.Module(), body.graph)

    def run(args):
        values = list(args)
        args.clear()
        return fx.Interpreter(module).run(*values, enable_io_processing=False)

    return run


def compiled(monkeypatch, schedule, recorder=None):
    """Return a step of two pipeline ranks."""
    monkeypatch.setattr(of_step, "_runtime", lambda ranks, mesh, *rest: PlayedRanks(mesh, recorder))
    model = llama(4, tied=True, dtype=torch.float32)
    passes = {"pipeline": {"schedule": schedule}, "verify": "none"}
    return of_step.compile_step(model, llama_loss, batches(rows=8)[0], mesh={"pp": 2}, optim=NO_DECAY | {"max_norm": 0.1},
                                microbatches=MICROBATCHES, passes=passes, ranks="lockstep")  # fmt: skip


def trained(step):
    """Return metrics of some steps and an evaluation, and the final parameters."""
    data = batches(rows=8)
    result = [step(data[i % len(data)]) for i in range(STEPS)]
    return result, step.evaluate(data[0]), {name: value.tolist() for name, value in step.state_dict().items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble", "zbv"])
def test_recorded_stages_have_the_bits_of_others(schedule, monkeypatch):
    expected = trained(compiled(monkeypatch, schedule))
    with played_cuda() as done:
        recorder = Recorder()
        step = compiled(monkeypatch, schedule, recorder)
        assert trained(step) == expected
        assert len({*step.slots.values()}) > step.schedule.stages  # several are in flight
        assert done.count("record") == len({(turn.program, step.slots.get(turn)) for turn in step.training[0]})


@pytest.mark.full
def test_what_a_backward_reads_of_its_forward_is_not_copied(monkeypatch):
    """Only the batch and the values of other ranks are copied: one activation, one gradient."""
    with played_cuda():
        recorder = Recorder()
        step = compiled(monkeypatch, "1f1b", recorder)
        trained(step)
        backward = step.train["B0"].executable
        carried = names_carried(backward.program.inputs)
        fed = {backward.names[number] for number in backward.fed & backward.names.keys()}
        assert len(carried) > 10 and len(fed & carried) == 1 and fed & carried <= recorder.sent


TABLES = {"1f1b": one_f_one_b(4, 7), "interleaved": interleaved(2, 6, 2), "zero_bubble": zero_bubble(3, 6), "zbv": zbv(3, 7)}


@pytest.mark.parametrize("name", TABLES)
def test_no_two_microbatches_of_a_rank_are_in_a_slot_at_once(name):
    table = TABLES[name]
    tasks = {str(slot.task): None for row in table.rows for slot in row}
    turns = turns_of_step(tasks, table, table.microbatches)
    for rank in range(table.ranks):
        here = [turn for turn in turns if turn.rank == rank]
        slots = slots_of(here)
        last = {(turn.program[1:], turn.microbatch): turn for turn in here}
        occupied: dict[int, tuple] = {}
        for turn in here:
            passing = turn.program[1:], turn.microbatch
            assert occupied.setdefault(slots[turn], passing) == passing
            if last[passing] is turn:
                del occupied[slots[turn]]
        assert all(len({turn.program[1:] for turn in here if slots[turn] == slot}) == 1 for slot in slots.values())


def test_one_f_one_b_needs_as_many_slots_as_there_are_stages_from_here():
    table = one_f_one_b(4, 7)
    tasks = {str(slot.task): None for row in table.rows for slot in row}
    turns = turns_of_step(tasks, table, 7)
    slots = [set(slots_of([turn for turn in turns if turn.rank == rank]).values()) for rank in range(4)]
    assert slots == [{0, 1, 2, 3}, {0, 1, 2}, {0, 1}, {0}]
