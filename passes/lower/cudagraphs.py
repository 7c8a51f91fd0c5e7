"""A program that is started kernel by kernel twice, recorded as CUDA graphs, and replayed from then on.

    step 1, 2      run: kernels are loaded and tuned, communicators and workspaces made
    step 3         recorded, and replayed
    step 4 ...     batch and scalars copied to where they were recorded; replayed

What reads the host is started by it at every step, between the recordings (`runs.py`). All recordings share one memory:
none reads what another has left in it, but for results, which each keeps. NCCL leaves no communicator that a recording
still uses, so `release` ends them before ranks part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor

from passes.lower.calls import BodyCall, Calls, Executable, Kernels
from passes.lower.host_reads import breaks
from passes.lower.runs import runs_of
from passes.program import ir

WARM_UP = 2  # runs before a program is recorded
FED = ("batch", "layout", "scalar", "carried")  # inputs that are new at a run; others are written where they are


class Replayed:
    """Calls on CUDA that are recorded when they have run `WARM_UP` times, and are `ready`; replayed from then on.

    Operands `fed` are others at each run, and copied to where the recording reads them.
    """

    def __init__(
        self, run: Kernels, names: Sequence[str], fed: Collection[int], recorder: Recorder, ready: Callable[[], bool]
    ):
        self.run, self.names, self.fed, self.recorder, self.ready = run, names, fed, recorder, ready
        self.runs = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.values: list[Tensor] = []  # that were recorded
        self.results: Sequence[Tensor] = ()
        _all.add(self)

    def __call__(self, args: list[Tensor]) -> Sequence[Tensor]:
        """The results, which the next run writes over; empties the list that it is given."""
        if self.graph is None:
            self.runs += 1
            if self.runs <= WARM_UP or not self.ready():
                return self.run(args)
            self.graph = self.record(args)
        self.feed(args)
        args.clear()
        self.graph.replay()
        return self.results

    def record(self, args: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """Record the calls on copies of what is fed; nothing is computed."""
        self.values = [value.clone() if i in self.fed else value for i, value in enumerate(args)]
        graph, pool, stream = torch.cuda.CUDAGraph(), self.recorder.pool, self.recorder.stream
        # NCCL's watchdog asks for events in a thread of its own, which "global" would take for a mistake of ours
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.results = self.run(list(self.values))
        return graph

    def feed(self, args: Sequence[Tensor]) -> None:
        """Copy what is new; raises RuntimeError if state is no longer where it was recorded."""
        for i, (value, recorded) in enumerate(zip(args, self.values, strict=True)):
            if i in self.fed:
                recorded.copy_(value)
            elif value is not recorded:
                raise RuntimeError(f"{self.names[i]} is another tensor than the CUDA graph has recorded; write into it")

    def release(self) -> None:
        """End the recording, and what it holds."""
        if self.graph is not None:
            self.graph.reset()
        self.graph, self.values, self.results, self.runs = None, [], (), 0


_all: WeakSet[Replayed] = WeakSet()


def release() -> None:
    """End all recordings of this process: a communicator that one uses would be waited for without end."""
    for replayed in list(_all):
        replayed.release()


class Recorded:
    """A program of which calls are recorded, on the stream of its recorder.

    Results are in memory of their own; values `still` are not: carried to other programs, they lie where they lay.
    """

    def __init__(
        self, run: Executable, parts: Sequence[Replayed], outputs: Sequence[ir.Output], still: Collection[str]
    ):
        self.run, self.parts, self.still = run, parts, still
        self.own = [output.name not in still for output in outputs]
        self.stream = parts[0].recorder.stream

    def __call__(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The program's results."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            results = self.run(values)
            results = tuple(result.clone() if own else result for result, own in zip(results, self.own, strict=True))
        torch.cuda.current_stream().wait_stream(self.stream)
        return results

    @property
    def is_recorded(self) -> bool:
        """Whether nothing of it is run for the first time any more."""
        return all(part.graph is not None for part in self.parts)


class Recorder:
    """The stream that programs of a step run and are recorded on, and the memory that their recordings share."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.programs: list[Recorded] = []

    def recorded(self, program: ir.Program, run: Executable) -> Executable:
        """What runs a program, as it is recorded; as it was where nothing of it can be.

        It reads values that other programs carry, and which lie `still`, once these are recorded.
        """
        names = {given.name for given in program.inputs if given.kind == "carried"}
        sources = [each for each in self.programs if not names.isdisjoint(each.still)]
        still = {name for each in sources for name in each.still}
        fed = [i for i, given in enumerate(program.inputs) if given.kind in FED and given.name not in still]

        def ready() -> bool:
            return all(each.is_recorded for each in sources)

        if isinstance(run, Calls):
            made = self.in_runs(program, run, fed, ready)
        else:
            made = self.as_whole(program, run, fed, ready)
        if made is None:
            return run
        self.programs.append(made)
        return made

    def in_runs(
        self, program: ir.Program, run: Calls, fed: Sequence[int], ready: Callable[[], bool]
    ) -> Recorded | None:
        """Compiled calls, recorded run by run; None where none is."""
        names = {number: given.name for number, given in zip(run.given, program.inputs, strict=True)}
        moving, parts, calls = {run.given[i] for i in fed}, list[Replayed](), list[BodyCall]()
        still = set[int]()
        for recorded, first, last in runs_of(program):
            call = run.together(run.calls[first:last])
            made = {number for _, number in call.yields}
            if recorded:
                said = [names.get(number, f"value {number}") for number in call.reads]
                moved = {i for i, number in enumerate(call.reads) if number in moving}
                parts.append(Replayed(call.run, said, moved, self, ready))
                call = replace(call, run=parts[-1])
            (still if recorded else moving).update(made)
            calls.append(call)
        if not parts:
            return None
        run.calls = calls
        ends = zip(program.outputs, run.returned, strict=True)
        lasting = {output.name for output, number in ends if output.kind == "carried" and number in still}
        return Recorded(run, parts, program.outputs, lasting)

    def as_whole(
        self, program: ir.Program, run: Executable, fed: Sequence[int], ready: Callable[[], bool]
    ) -> Recorded | None:
        """A program that is interpreted, recorded as one; None where something reads the host."""
        if breaks(program, compiled=False):
            return None
        part = Replayed(run, [given.name for given in program.inputs], set(fed), self, ready)
        return Recorded(part_as_program(part), [part], program.outputs, carried_of(program))


def part_as_program(part: Replayed) -> Executable:
    """What runs a program of one part."""
    return lambda values: tuple(part(list(values)))


def carried_of(program: ir.Program) -> frozenset[str]:
    """What a program makes for others."""
    return frozenset(output.name for output in program.outputs if output.kind == "carried")
