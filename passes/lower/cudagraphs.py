"""CUDA graphs: programs run kernel by kernel for two steps, are recorded before the third, and then replayed.

    step 1, 2      run: kernels are loaded and tuned, communicators and workspaces made
    before step 3  recorded, program after program in the order of a step; nothing is computed
    step 3 ...     batch and scalars are copied to where they were recorded; replayed

Recordings are made between steps, when nothing is in flight. Starting a recording waits for all work that was started.
During a step, a rank that has posted a receive for a later microbatch would wait for a send that no rank has started.

Calls that read the host are started by the host at every step, between the recordings (`runs.py`). Microbatches of a
pipeline stage that are in flight at once are in different slots. A slot has its own recordings and its own memory, so
that a value kept by a forward is where the backward was recorded to read it, and no other microbatch overwrites it.
Recordings of a slot share their memory: they run in the order in which they were made, and none reads memory that
another one left, except results, which each keeps. NCCL does not leave a communicator that a recording still uses, so
`release` ends recordings before ranks part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor

from passes.ir import ir
from passes.lower.calls import AsOne, BodyCall, Calls, Executable, Kernels
from passes.lower.host_reads import find_breaks
from passes.lower.runs import Run, runs_of

WARM_UP = 2  # steps before programs are recorded
FED = ("batch", "layout", "scalar", "carried")  # inputs that are new in each run; others are updated in place

Slot = int | None  # None for a program that runs once per step


class Replayed:
    """Calls on CUDA that the host starts until they are recorded; from then on they are replayed.

    Operands `fed` are new in each run, and copied to where the recording reads them. Operands `left` are where other
    recordings leave them. All others are updated in place.
    """

    def __init__(self, run: Kernels, names: Sequence[str], fed: Collection[int], left: Collection[int] = ()):
        self.run, self.names, self.fed, self.left = run, names, fed, left
        self.graph: torch.cuda.CUDAGraph | None = None
        self.values: dict[int, Tensor] = {}  # operands of the last run except `left`; then the recorded ones
        self.results: Sequence[Tensor] = ()

    def __call__(self, args: list[Tensor]) -> Sequence[Tensor]:
        """Return the results, which the next replay overwrites; empty the argument list."""
        if self.graph is None:
            indices = [i for i in range(len(args)) if i not in self.left]
            self.values = {i: args[i].clone() if i in self.fed else args[i] for i in indices}
            return self.run(args)
        self.feed(args)
        args.clear()
        self.graph.replay()
        return self.results

    def record(self, left: Mapping[int, Tensor], pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
        """Record the calls on the values of the last run, and on the values that others have `left`."""
        self.values |= left
        graph, values = torch.cuda.CUDAGraph(), [self.values[i] for i in sorted(self.values)]
        # NCCL's watchdog queries events in another thread, which "global" would treat as our error
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.results = self.run(values)
        self.graph = graph

    def feed(self, args: Sequence[Tensor]) -> None:
        """Copy new operands; raise RuntimeError if state is no longer where it was recorded."""
        for i, value in enumerate(args):
            if i in self.fed:
                self.values[i].copy_(value)
            elif value is not self.values[i]:
                raise RuntimeError(
                    f"{self.names[i]} is not the tensor that the CUDA graph recorded; write into that one"
                )

    def release(self) -> None:
        """End the recording, and drop its memory."""
        if self.graph is not None:
            self.graph.reset()
        self.graph, self.values, self.results = None, {}, ()


class Recorded:
    """A program in a slot whose calls are recorded, on the stream of its recorder.

    Results are copied out of the recordings' memory, except `still` values: they are carried to other programs and
    stay.
    """

    def __init__(self, program: ir.Program, run: Calls, still: Collection[str], stream: torch.cuda.Stream):
        self.program, self.run, self.still, self.stream = program, run, still, stream
        self.is_copied = [output.name not in still for output in program.outputs]

    def __call__(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the program's results."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            results = self.run(values)
            results = tuple(
                result.clone() if is_copied else result
                for result, is_copied in zip(results, self.is_copied, strict=True)
            )
        torch.cuda.current_stream().wait_stream(self.stream)
        return results

    def record(self, lying: Mapping[str, Tensor], pool: tuple[int, int]) -> dict[str, Tensor]:
        """Record the calls on carried values at their places in `lying`.

        Return those that it leaves for other programs.
        """
        inputs = zip(self.run.input_numbers, self.program.inputs, strict=True)
        env = {number: lying[item.name] for number, item in inputs if item.name in lying}
        for call in self.run.calls:
            if isinstance(call.run, Replayed):
                call.run.record({i: env[call.reads[i]] for i in call.run.left}, pool, self.stream)
                env |= {number: call.run.results[index] for index, number in call.yields}
        outputs = zip(self.program.outputs, self.run.result_numbers, strict=True)
        return {output.name: env[number] for output, number in outputs if output.name in self.still}

    def release(self) -> None:
        """End its recordings."""
        for call in self.run.calls:
            if isinstance(call.run, Replayed):
                call.run.release()


class Recorder:
    """The stream on which programs of a step run and are recorded, and the memory that recordings of a slot share.

    Carried values that are `sent` go to other ranks, so they are copied out of the recordings' memory.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.sent: Collection[str] = ()
        self.still = set[str]()  # carried values that stay where recordings leave them
        self.pools: dict[int, tuple[int, int]] = defaultdict(torch.cuda.graph_pool_handle)
        self.made: list[tuple[Slot, Recorded]] = []  # in the order of a step
        self.steps = 0
        _all.add(self)

    def begin(self) -> None:
        """Begin a step while nothing is in flight; before the first step after the warm-up, record all programs."""
        self.steps += 1
        if self.steps == WARM_UP + 1:
            lying = defaultdict[Slot, dict[str, Tensor]](dict)
            for slot, program in self.made:
                lying[slot] |= program.record(lying[None] | lying[slot], self.pools[slot or 0])

    def recorded(self, program: ir.Program, run: Executable) -> Executable:
        """Return a callable that records and replays a program; `run` itself if none of its calls can be recorded."""
        if isinstance(run, Calls):
            calls, runs = run, runs_of(program)
        else:
            calls, runs = AsOne(program, run), [Run(not find_breaks(program, compiled=False), 0, 1)]
        if not any(item.recorded for item in runs):
            return run
        in_slots = InSlots(self, program, calls, runs, self.still & names_carried(program.inputs))
        self.still |= in_slots.still
        return in_slots

    def release(self) -> None:
        """End all recordings, as if no step had run."""
        for _, program in self.made:
            program.release()
        self.steps = 0


class InSlots:
    """A program that is recorded in each slot it runs in; it reads carried values `lying` where others left them."""

    def __init__(
        self, recorder: Recorder, program: ir.Program, run: Calls, runs: Sequence[Run], lying: Collection[str]
    ):
        self.recorder, self.program, self.run, self.runs = recorder, program, run, runs
        self.by_slot: dict[Slot, Recorded] = {}
        inputs = list(zip(run.input_numbers, program.inputs, strict=True))
        self.names = {number: item.name for number, item in inputs}
        self.left = {number for number, item in inputs if item.kind == "carried" and item.name in lying}
        self.fed = {number for number, item in inputs if item.kind in FED} - self.left
        self.calls = list(zip(runs, (run.merge(run.calls[first:last]) for _, first, last in runs), strict=True))
        for item, call in self.calls:
            (self.left if item.recorded else self.fed).update(number for _, number in call.yields)
        outputs = zip(program.outputs, run.result_numbers, strict=True)
        carried = {output.name for output, number in outputs if output.kind == "carried" and number in self.left}
        self.still = carried - set(recorder.sent)

    def __call__(self, values: Sequence[Tensor], slot: Slot = None) -> tuple[Tensor, ...]:
        """Return the program's results in a slot."""
        return self.at(slot)(values)

    def at(self, slot: Slot) -> Recorded:
        """Return the program in a slot."""
        if slot not in self.by_slot:
            run = copy(self.run)
            run.calls = [self.replay_call(call) if item.recorded else call for item, call in self.calls]
            self.by_slot[slot] = Recorded(self.program, run, self.still, self.recorder.stream)
            self.recorder.made.append((slot, self.by_slot[slot]))
        return self.by_slot[slot]

    def replay_call(self, call: BodyCall) -> BodyCall:
        """Return a call that will be recorded."""
        fed, left = (
            {i for i, number in enumerate(call.reads) if number in numbers} for numbers in (self.fed, self.left)
        )
        names = [self.names.get(number, f"value {number}") for number in call.reads]
        return replace(call, run=Replayed(call.run, names, fed, left))


def names_carried(inputs: Sequence[ir.Input]) -> set[str]:
    """Return the names of the carried inputs."""
    return {item.name for item in inputs if item.kind == "carried"}


_all: WeakSet[Recorder] = WeakSet()


def release() -> None:
    """End all recordings of this process: otherwise the shutdown of a communicator that one uses would wait forever."""
    for recorder in list(_all):
        recorder.release()
