"""One optimizer step as a call: compiled programs, and the state that they change in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.pipeline import EVALUATE
from compiler_trainer.step.batch_layout import BatchLayout, balance, on_device
from compiler_trainer.step.messages import Post
from compiler_trainer.step.results import Results
from compiler_trainer.step.runtime import Runtime
from compiler_trainer.step.turns import Carried, Turn, slots_of, turns_of_evaluation, turns_of_step
from passes.communication.batch_overlap import SEED, microbatches_in, name_of, together
from passes.pipeline.tables import Table
from passes.program import host, ir, shift
from passes.program.bodies import flatten
from passes.program.mesh import Mesh
from passes.program.spec import Spec, shard, unshard

ByRank = dict[int, Tensor]
NUMBERS = ("loss", "metric", "count")  # kinds of outputs that are numbers


@dataclass
class State:
    """A stored tensor: its placement, and the local tensor of each rank of this process that has it.

    `stages` are the pipeline ranks that have it; `like`, on the meta device, has its local shape and dtype.
    """

    spec: Spec
    local: ByRank
    like: Tensor
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Compiled:
    """A finished program and its executable, which is made when it is first used."""

    finished: ir.Program
    lower: Callable[[], Any]

    @cached_property
    def program(self) -> ir.Program:
        """The program as one flat graph."""
        return flatten(self.finished)

    @cached_property
    def executable(self) -> Any:
        """The object that a runtime runs."""
        return self.lower()

    def compile(self) -> None:
        """Make the executable now: ranks compile together, and no message may wait for that."""
        self.executable  # noqa: B018


class Step:
    """A compiled training step that runs on global batches; made by `compile_step`."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        mesh: Mesh,
        train: Mapping[str, Compiled],
        evaluation: Mapping[str, Compiled],
        table: Table | None,
        state: dict[str, State],
        lr: float,
        seed: int,
        microbatches: int,
        device: torch.device,
        report: dict[str, Any],
    ):
        self.runtime, self.mesh, self.ranks = runtime, mesh, runtime.ranks
        self.train, self.evaluation, self.state = train, evaluation, state
        self.lr, self.seed, self.microbatches, self.table = lr, seed, microbatches, table
        self.at_once = microbatches_in(each.finished for each in (*train.values(), *evaluation.values()))
        self.device, self.report = device, report
        self.layouts: list[BatchLayout] = []  # of the last step's microbatches
        compiled = (*train.values(), *evaluation.values())
        named = dict.fromkeys(o.name for each in compiled for o in each.finished.outputs if o.kind == "metric")
        self.metrics = tuple(name for name in named if name != "grad_norm")  # metrics that the loss function returns
        given = [i for each in compiled for i in each.finished.inputs]
        self.constants = {i.name: i.value.to(device) for i in given if i.value is not None}
        self.coordinates = {
            rank: {axis: torch.tensor(at, device=device) for axis, at in mesh.coordinates(rank).items()}
            for rank in self.ranks
        }
        self.restored = {state_name(i): None for each in train.values() for i in each.finished.inputs if i.restored}
        self.counted = {i.name: i.count for i in given if i.count is not None}
        self.entries = {entry: of for each in compiled for entry, of in entries_of(each.finished).items()}
        self.training = self.turns(turns_of_step(programs_of(train), table, microbatches), train)
        self.slots = slots_of(self.training[0])
        measuring = turns_of_evaluation(EVALUATE, programs_of(evaluation), table, microbatches)
        self.measuring = self.turns(measuring, evaluation)

    def turns(self, turns: Sequence[Turn], programs: Mapping[str, Compiled]) -> tuple[list[Turn], Carried]:
        """Return the turns that run here, of those of all ranks, and the values they carry; empty without programs."""
        found = programs_of(programs)
        turns = [turn for turn in turns if turn.program in found]
        assert not found.keys() - {turn.program for turn in turns}, f"programs that no turn runs, of {[*found]}"
        here = sorted({self.runtime.stage_of(rank) for rank in self.ranks})
        post, ways = None, self.runtime.ways
        if ways is not None:
            (rank,) = self.ranks
            post = Post(turns, found, rank, here[0], self.runtime.apart, self.device, ways)
        return [turn for turn in turns if turn.rank in here], Carried(turns, found, here, post)

    def __call__(self, batch: Mapping[str, Tensor], lr: float | None = None) -> dict[str, float]:
        """Take one optimizer step on a global batch, wait for it, and return its results by name.

        "loss" is the loss of the whole batch, "grad_norm" the norm before clipping. Means over labels are over all
        labels of the batch; other terms of the loss, and its other metrics, are means over microbatches.
        `passes.moe.dispatch=bounded` adds "dropped_rows": the tokens without room, of all layers and ranks.
        """
        return self.launch(batch, lr).read()

    def launch(self, batch: Mapping[str, Tensor], lr: float | None = None) -> Results:
        """Begin one optimizer step on a global batch; on a GPU, return without waiting for its end.

        Everything launched later sees the state after the step.
        """
        rate, self.layouts = self.lr if lr is None else lr, []
        self.runtime.begin()
        count = self.state["optim.step"].local[self.ranks[0]].to(torch.int64, copy=True)
        before = [(local, local.clone()) for name in self.restored for local in self.state[name].local.values()]
        numbers = self.summed(self.take(self.training, self.train, batch, rate, count), self.train)
        for local, value in before:
            local.copy_(torch.where(torch.isfinite(numbers["grad_norm"]), local, value))
        return Results(numbers, self.device)

    def summed(self, values: Mapping[str, list[Tensor]], programs: Mapping[str, Compiled]) -> dict[str, Tensor]:
        """Return the numbers among the microbatches' results for the whole batch, fp64[] on the device."""
        kinds = {name: kind for name, kind in kinds_of(programs).items() if kind in NUMBERS}
        numbers = {name: number_of(each, kinds[name], self.at_once) for name, each in values.items() if name in kinds}
        return self.runtime.numbers(numbers, list(kinds))

    def take(
        self,
        taken: tuple[list[Turn], Carried],
        programs: Mapping[str, Compiled],
        batch: Mapping[str, Tensor],
        lr: float,
        count: Tensor,
    ) -> dict[str, list[Tensor]]:
        """Run the turns of step number `count` (i64[]), or of an evaluation; return the results of each microbatch.

        The host reads nothing from the device before all turns are started.
        """
        turns, carried = taken
        parts = self.split(batch)
        counts = self.counts(parts)
        given = [together(parts[i : i + self.at_once]) for i in range(0, len(parts), self.at_once)]
        found: dict[str, list[Tensor]] = {}
        for name in {turn.program: None for turn in turns}:
            programs[name].compile()
        host.forget()
        shift.forget()
        carried.begin()
        for turn in turns:
            carried.start(turn)
            compiled, m = programs[turn.program], turn.microbatch
            number = count if m is None else count * self.microbatches + m * self.at_once
            scalars = self.scalars(lr, number) | counts
            for name, value in self.run(turn, compiled, {} if m is None else given[m], scalars, carried).items():
                found.setdefault(name, []).append(value)
        carried.end()
        return found

    def scalars(self, lr: float, count: Tensor) -> dict[str, Tensor]:
        """Return the scalar inputs: the learning rate, and the seeds of the (micro)batches' random numbers.

        They are filled on the device, because a copy from the host would wait for all work started before.
        """
        return {
            "lr": torch.full((), lr, dtype=torch.float64, device=self.device),
            **{name_of(SEED, k): count + k + (self.seed << 32) for k in range(self.at_once)},
        }

    def counts(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the counts of labels over all microbatches, which are inputs of programs."""
        for part in parts:
            check_batch(part, self.entries)
        read = dict.fromkeys(name for count in self.counted.values() for name in count.names)
        there = [{name: on_device(part[name], self.device) for name in read} for part in parts]
        return {name: count.of(there) for name, count in self.counted.items()}

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """Return the mean loss of a global batch, without changing the state."""
        return self.measure(batch)["loss"]

    def measure(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean loss of a global batch and its metrics, without changing the state."""
        return Results(self.summed(self.evaluated(batch), self.evaluation), self.device).read()

    def rows(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss function's outputs per sample of a global batch, [rows], without changing the state."""
        kinds = kinds_of(self.evaluation)
        found = {name: values for name, values in self.evaluated(batch).items() if kinds[name] == "rows"}
        return self.runtime.share({name: torch.cat(values).cpu() for name, values in found.items()})

    def evaluated(self, batch: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return the results of each microbatch of an evaluation."""
        if not self.evaluation:
            what = "is false, so that this step can only train; give compile_step(evaluate=True)"
            raise UserError("evaluate", what)
        none = torch.zeros((), dtype=torch.int64, device=self.device)
        return self.take(self.measuring, self.evaluation, batch, 0.0, none)

    def split(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the microbatches of a global batch: consecutive samples."""
        parts = {key: value.chunk(self.microbatches) for key, value in batch.items()}
        return [{key: chunks[i] for key, chunks in parts.items()} for i in range(self.microbatches)]

    def run(
        self,
        turn: Turn,
        compiled: Compiled,
        batch: Mapping[str, Tensor],
        scalars: Mapping[str, Tensor],
        carried: Carried,
    ) -> dict[str, Tensor]:
        """Run one turn for the ranks here; return its results by name, as the first of these ranks has them."""
        program, batch_layout = compiled.finished, BatchLayout(compiled.finished, batch)
        if turn.program in self.train and batch and turn.rank == self.runtime.stage_of(self.ranks[0]):
            self.layouts.append(batch_layout)
        ranks = [rank for rank in self.ranks if self.runtime.stage_of(rank) == turn.rank]

        def value(given: ir.Input, rank: int) -> Tensor:
            if given.kind == "carried":
                return carried.get(turn, given.name, rank, self.runtime.apart)
            return self.value(given, rank, batch_layout, scalars)

        inputs = {rank: [value(i, rank) for i in program.inputs] for rank in ranks}
        results = self.runtime.run(compiled.executable, inputs, self.slots.get(turn))
        found = {}
        for k, output in enumerate(program.outputs):
            if output.kind == "carried":
                carried.put(turn, output.name, {rank: results[rank][k] for rank in ranks})
            elif output.kind != "buffer":
                found[output.name] = results[ranks[0]][k]
        carried.done(turn)
        return found

    def value(self, given: ir.Input, rank: int, batch_layout: BatchLayout, scalars: Mapping[str, Tensor]) -> Tensor:
        """Return the value of a program's input on one rank."""
        if given.kind == "batch":
            whole, spec = batch_layout.batch[given.name], given.spec.ordered(batch_layout.order(rank))
            return on_device(shard(whole, spec, self.mesh, self.mesh.coordinates(rank)), self.device)
        if given.kind == "layout":
            return batch_layout.value(given, rank, self.device)
        if given.kind == "coordinate":
            return self.coordinates[rank][given.name]
        if given.kind == "constant":
            return self.constants[given.name]
        if given.kind == "scalar":
            return scalars[given.name]
        return self.state[state_name(given)].local[rank]

    def balance(self) -> dict[str, float]:
        """Return the balance of attention work in the last step, in the `cp` group of the first rank here."""
        return balance(self.layouts, self.ranks[0])

    def tensors(self) -> dict[str, tuple[Spec, ByRank]]:
        """Return the state here for a checkpoint, name -> (placement, local tensor by rank); write to it to restore."""
        state = {name: (s.spec, s.local) for name, s in self.state.items() if not name.startswith("gradient.")}
        return {name: (spec, local) for name, (spec, local) in state.items() if local}

    def state_dict(self) -> dict[str, Tensor]:
        """Return full parameters and buffers by the model's own names; with processes, every rank must call this."""
        return {name.removeprefix("model."): value for name, value in self.wholes("model.").items()}

    def wholes(self, *kinds: str) -> dict[str, Tensor]:
        """Return the full state tensors whose names begin with `kinds`; with processes, every rank must call this."""
        return {name: self.whole(name) for name in self.state if name.startswith(kinds)}

    def whole(self, name: str) -> Tensor:
        """Return a full tensor of the state; with processes, every rank must call this."""
        state = self.state[name]
        return unshard(self.runtime.of_stage(state.local, state.stages[0], state.like), state.spec, self.mesh)


def number_of(values: Sequence[Tensor], kind: str, at_once: int) -> Tensor:
    """Return microbatches' values as one number, fp64[]: counts are added, everything else is averaged."""
    stacked = torch.stack(list(values))
    number = stacked.sum() if kind == "count" else stacked.mean() / (at_once if kind == "loss" else 1)
    return number.double()


def kinds_of(programs: Mapping[str, Compiled]) -> dict[str, ir.OutputKind]:
    """Return the kinds of programs' outputs, by name."""
    return {o.name: o.kind for each in programs.values() for o in each.finished.outputs}


def programs_of(compiled: Mapping[str, Compiled]) -> dict[str, ir.Program]:
    """Return the finished programs, by the same names."""
    return {name: each.finished for name, each in compiled.items()}


def state_name(given: ir.Input) -> str:
    """Return the name under which an input's value is stored."""
    prefix = {"parameter": "model", "buffer": "model", "moment": "optim", "gradient": "gradient"}[given.kind]
    return f"{prefix}.{given.name}"


def stored(given: ir.Input) -> Spec:
    """Return the placement in which an input is stored: a replicate copy as an invariant one."""
    return replace(given.spec, replicate=())


class Entry(NamedTuple):
    """The expected shape and dtype of a batch entry; with `runs`, equal numbers of a row must be adjacent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: bool


def entries_of(program: ir.Program) -> dict[str, Entry]:
    """Return the batch entries that a program reads."""
    nodes = zip(program.inputs, program.placeholders(), strict=True)
    return {i.original: Entry(i.spec.shape, ir.example(n).dtype, i.runs) for i, n in nodes if i.kind == "batch"}


def check_batch(batch: Mapping[str, Tensor], wanted: Mapping[str, Entry]) -> None:
    """Raise UserError unless the batch has the compiled entries, shapes and dtypes."""
    if missing := sorted(wanted.keys() - batch.keys()):
        raise UserError(f"batch[{missing[0]!r}]", f"is missing; the step was compiled for {', '.join(wanted)}")
    for key, value in batch.items():
        if key not in wanted:
            raise UserError(f"batch[{key!r}]", f"is not among the compiled entries {', '.join(wanted)}")
        shape, dtype, _ = wanted[key]
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise UserError(
                f"batch[{key!r}]",
                f"is {value.dtype}{list(value.shape)}, the step was compiled for {dtype}{list(shape)} a microbatch",
            )
    for name in (name for name, entry in wanted.items() if entry.runs):
        check_runs(name, batch[name])


def check_runs(name: str, value: Tensor) -> None:
    """Raise UserError unless equal entries of each row are adjacent, which attention's bounds assume."""
    turns = value[..., 1:] != value[..., :-1]
    last = value.masked_fill(value == -1, 2**31 - 1)  # padding, document -1, ends a row
    if bool((last[..., 1:] >= last[..., :-1]).all()):
        return
    for number, (row, turn) in enumerate(zip(value.flatten(0, -2), turns.flatten(0, -2))):
        ids = torch.cat([row[:1], row[1:][turn]])
        values, counts = ids.unique(return_counts=True)
        if bool((counts > 1).any()):
            again = int(values[counts > 1][0])
            fix = "the mask compares these ids, so give each document an id of its own"
            raise UserError(f"batch[{name!r}]", f"row {number} has {again} in two places with others between; {fix}")
