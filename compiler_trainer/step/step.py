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
from compiler_trainer.step.batch_layout import BatchLayout, balance, on_device, samples_read
from compiler_trainer.step.messages import Post
from compiler_trainer.step.results import Results
from compiler_trainer.step.runtime import Runtime
from compiler_trainer.step.turns import CarriedValues, Mail, Turn, slots_of, turns_of_evaluation, turns_of_step
from passes.communication.batch_overlap import SEED, join_microbatches, microbatches_in, name_of
from passes.ir import ir
from passes.ir.bodies import flatten
from passes.ir.mesh import Mesh
from passes.ir.spec import Spec, shard, unshard
from passes.ops import host, shift
from passes.pipeline.schedules import Schedule
from passes.sharding.place import samples_of

ByRank = dict[int, Tensor]
PREFIXES = {**dict.fromkeys(ir.MODEL_STATE, "model"), "moment": "optim", "gradient": "gradient"}  # of stored tensors
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
    """A compiled training step that runs on global batches; made by `compile_step`.

    Attributes:
        report: seconds of the parts of compilation, counts of rewrites, predicted communication and memory.
    """

    def __init__(
        self,
        *,
        runtime: Runtime,
        mesh: Mesh,
        train: Mapping[str, Compiled],
        evaluation: Mapping[str, Compiled],
        schedule: Schedule | None,
        state: dict[str, State],
        names: Mapping[str, str],
        lr: float,
        seed: int,
        microbatches: int,
        device: torch.device,
        report: dict[str, Any],
    ):
        self.runtime, self.mesh, self.ranks = runtime, mesh, runtime.ranks
        self.train, self.evaluation, self.state = train, evaluation, state
        self.first_names = names  # of parameters and buffers in the model -> the name of the tensor in `state`
        self.lr, self.seed, self.microbatches, self.schedule = lr, seed, microbatches, schedule
        self.microbatches_per_turn = microbatches_in(c.finished for c in (*train.values(), *evaluation.values()))
        self.device, self.report = device, report
        self.layouts: list[BatchLayout] = []  # of the last step's microbatches
        compiled = (*train.values(), *evaluation.values())
        metrics = dict.fromkeys(o.name for c in compiled for o in c.finished.outputs if o.kind == "metric")
        self.metrics = tuple(name for name in metrics if name != "grad_norm")  # metrics that the loss function returns
        inputs = [i for c in compiled for i in c.finished.inputs]
        self.constants = {i.name: i.value.to(device) for i in inputs if i.value is not None}
        self.coordinates = {
            rank: {axis: torch.tensor(at, device=device) for axis, at in mesh.coordinates(rank).items()}
            for rank in self.ranks
        }
        self.restored_names = {state_name(i): None for c in train.values() for i in c.finished.inputs if i.restored}
        nodes = [n for c in compiled for n in c.finished.placeholders()]
        self.label_counts = {
            i.name: (i.count, ir.example(n).dtype) for i, n in zip(inputs, nodes, strict=True) if i.count is not None
        }
        self.entries = {entry: entry_spec for c in compiled for entry, entry_spec in entries_of(c.finished).items()}
        self.samples = self.own_samples()
        self.training = self.turns(turns_of_step(programs_of(train), schedule, microbatches), train)
        self.slots = slots_of(self.training[0])
        measuring = turns_of_evaluation(EVALUATE, programs_of(evaluation), schedule, microbatches)
        self.measuring = self.turns(measuring, evaluation)

    def turns(self, turns: Sequence[Turn], programs: Mapping[str, Compiled]) -> tuple[list[Turn], CarriedValues]:
        """Return the turns that run here, of those of all ranks, and the values they carry; empty without programs."""
        programs_by_name = programs_of(programs)
        turns = [turn for turn in turns if turn.program in programs_by_name]
        assert not programs_by_name.keys() - {turn.program for turn in turns}, (
            f"programs that no turn runs, of {[*programs_by_name]}"
        )
        stages = sorted({self.runtime.stage_of(rank) for rank in self.ranks})
        post, ways = Mail(), self.runtime.ways
        if ways is not None:
            (rank,) = self.ranks
            post = Post(turns, programs_by_name, rank, stages[0], self.runtime.ranks_per_stage, self.device, ways)
        return [turn for turn in turns if turn.rank in stages], CarriedValues(turns, programs_by_name, stages, post)

    def __call__(self, batch: Mapping[str, Tensor], lr: float | None = None) -> dict[str, float]:
        """Take one optimizer step on a global batch, wait for it, and return its results by name.

        "loss" is the loss of the whole batch, "grad_norm" the norm before clipping. Means over labels are over all
        labels of the batch; other terms of the loss, and its other metrics, are means over microbatches.
        `passes.moe.dispatch=bounded` adds "dropped_rows": the tokens without room, of all layers and ranks.

        Args:
            batch: tensors with the names, dtypes and global shapes of the example batch, the same on every rank.
            lr: the learning rate of this step; by default that of `optim`.

        Raises:
            UserError: the batch differs from the example batch, or the step can only evaluate.
        """
        return self.launch(batch, lr).read()

    def launch(self, batch: Mapping[str, Tensor], lr: float | None = None) -> Results:
        """Begin one optimizer step on a global batch; on a GPU, return without waiting for its end.

        Everything launched later sees the state after the step.

        Args:
            batch: a global batch, as for a call.
            lr: the learning rate of this step; by default that of `optim`.
        """
        if "optim.step" not in self.state:
            raise UserError("train", "is false, so this step can only evaluate; give compile_step(train=True)")
        rate, self.layouts = self.lr if lr is None else lr, []
        self.runtime.begin()
        count = self.state["optim.step"].local[self.ranks[0]].to(torch.int64, copy=True)
        saved = [(local, local.clone()) for name in self.restored_names for local in self.state[name].local.values()]
        numbers = self.batch_numbers(self.take(self.training, self.train, batch, rate, count), self.train)
        for local, value in saved:
            local.copy_(torch.where(torch.isfinite(numbers["grad_norm"]), local, value))
        return Results(numbers, self.device)

    def batch_numbers(self, values: Mapping[str, list[Tensor]], programs: Mapping[str, Compiled]) -> dict[str, Tensor]:
        """Return the numbers among the microbatches' results for the whole batch, fp64[] on the device."""
        kinds = {name: kind for name, kind in kinds_of(programs).items() if kind in NUMBERS}
        numbers = {
            name: number_of(parts, kinds[name], self.microbatches_per_turn)
            for name, parts in values.items()
            if name in kinds
        }
        return self.runtime.numbers(numbers, list(kinds))

    def take(
        self,
        turns_and_values: tuple[list[Turn], CarriedValues],
        programs: Mapping[str, Compiled],
        batch: Mapping[str, Tensor],
        lr: float,
        count: Tensor,
    ) -> dict[str, list[Tensor]]:
        """Run the turns of step number `count` (i64[]), or of an evaluation; return the results of each microbatch.

        The host reads nothing from the device before all turns are started.
        """
        turns, carried = turns_and_values
        parts = self.split(batch)
        for part in parts:
            check_batch(part, self.entries)
        for name in (name for name, entry in self.entries.items() if entry.runs):
            check_runs(name, batch[name], self.samples)
        counts = self.counts(batch)
        batches = [
            join_microbatches(parts[i : i + self.microbatches_per_turn])
            for i in range(0, len(parts), self.microbatches_per_turn)
        ]
        results: dict[str, list[Tensor]] = {}
        for name in {turn.program: None for turn in turns}:
            programs[name].compile()
        host.forget()
        shift.forget()
        carried.begin()
        for turn in turns:
            carried.start(turn)
            compiled, m = programs[turn.program], turn.microbatch
            number = count if m is None else count * self.microbatches + m * self.microbatches_per_turn
            scalars = self.scalars(lr, number) | counts
            for name, value in self.run(turn, compiled, {} if m is None else batches[m], scalars, carried).items():
                results.setdefault(name, []).append(value)
        carried.end()
        return results

    def scalars(self, lr: float, count: Tensor) -> dict[str, Tensor]:
        """Return the scalar inputs: the learning rate, and the seeds of the (micro)batches' random numbers.

        They are filled on the device, because a copy from the host would wait for all work started before.
        """
        return {
            "lr": torch.full((), lr, dtype=torch.float64, device=self.device),
            **{name_of(SEED, k): count + k + (self.seed << 32) for k in range(self.microbatches_per_turn)},
        }

    def counts(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the counts of labels over all samples, which are inputs of programs; ranks add those of their own."""
        names = dict.fromkeys(name for count, _ in self.label_counts.values() for name in count.names)
        labels = {name: on_device(batch[name][self.samples], self.device) for name in names}
        totals = self.runtime.total({name: count.of(labels) for name, (count, _) in self.label_counts.items()})
        return {name: totals[name].to(dtype) for name, (_, dtype) in self.label_counts.items()}

    def weights(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the counts that loss and metrics of a global batch are divided by, of those that have one."""
        outputs = [o for compiled in self.evaluation.values() for o in compiled.finished.outputs if o.count]
        counts = self.counts(batch)
        return {o.name: float(counts[o.count]) for o in outputs}

    def own_samples(self) -> Tensor:
        """Return the numbers of this process's samples of a global batch, each counted once, int64[samples]."""
        size = next((entry.shape[0] for entry in self.entries.values()), 0)
        return self.in_batch({number for rank in self.ranks for number in samples_of(rank, size, self.mesh)})

    def samples_read(self, ranks: Sequence[int]) -> Tensor:
        """Return the numbers of the samples of a global batch that ranks read, int64[samples]."""
        programs = [compiled.finished for compiled in (*self.train.values(), *self.evaluation.values())]
        return self.in_batch({number for p in programs for rank in ranks for number in samples_read(p, rank)})

    def in_batch(self, samples: set[int]) -> Tensor:
        """Return the numbers in a global batch of each microbatch's samples, ascending."""
        size = next((entry.shape[0] for entry in self.entries.values()), 0)
        numbers = [part * size + number for part in range(self.microbatches) for number in sorted(samples)]
        return torch.tensor(numbers, dtype=torch.int64)

    def total(self, values: Tensor) -> float:
        """Return the sum of a global batch's numbers, [samples], of which each rank adds those of its own samples."""
        return float(self.runtime.total({"": values[self.samples].sum().to(self.device)})[""])

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """Return the mean loss of a global `batch`, without changing the state."""
        return self.measure(batch)["loss"]

    def measure(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean loss of a global `batch` and its metrics, without changing the state."""
        return Results(self.batch_numbers(self.evaluate_parts(batch), self.evaluation), self.device).read()

    def rows(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss function's outputs per sample of a global `batch`, [samples], without changing the state."""
        kinds = kinds_of(self.evaluation)
        results = {name: values for name, values in self.evaluate_parts(batch).items() if kinds[name] == "rows"}
        return self.runtime.share({name: torch.cat(values).cpu() for name, values in results.items()})

    def evaluate_parts(self, batch: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return the results of each microbatch of an evaluation."""
        if not self.evaluation:
            problem = "is false, so this step can only train; give compile_step(evaluate=True)"
            raise UserError("evaluate", problem)
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        return self.take(self.measuring, self.evaluation, batch, 0.0, count)

    def split(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the microbatches of a global batch: consecutive samples."""
        parts = {key: value.chunk(self.microbatches) for key, value in batch.items()}
        for key, chunks in parts.items():
            if len(chunks) != self.microbatches:
                problem = f"has {len(batch[key])} samples, which are not {self.microbatches} microbatches"
                raise UserError(f"batch[{key!r}]", problem)
        return [{key: chunks[i] for key, chunks in parts.items()} for i in range(self.microbatches)]

    def run(
        self,
        turn: Turn,
        compiled: Compiled,
        batch: Mapping[str, Tensor],
        scalars: Mapping[str, Tensor],
        carried: CarriedValues,
    ) -> dict[str, Tensor]:
        """Run one turn for the ranks here; return its results by name, as the first of these ranks has them."""
        program, batch_layout = compiled.finished, BatchLayout(compiled.finished, batch)
        if turn.program in self.train and batch and turn.rank == self.runtime.stage_of(self.ranks[0]):
            self.layouts.append(batch_layout)
        ranks = [rank for rank in self.ranks if self.runtime.stage_of(rank) == turn.rank]

        def value(entry: ir.Input, rank: int) -> Tensor:
            if entry.kind == "carried":
                return carried.get(turn, entry.name, rank, self.runtime.ranks_per_stage)
            return self.value(entry, rank, batch_layout, scalars)

        inputs = {rank: [value(i, rank) for i in program.inputs] for rank in ranks}
        results = self.runtime.run(compiled.executable, inputs, self.slots.get(turn))
        outputs = {}
        for k, output in enumerate(program.outputs):
            if output.kind == "carried":
                carried.put(turn, output.name, {rank: results[rank][k] for rank in ranks})
            elif output.kind != "buffer":
                outputs[output.name] = results[ranks[0]][k]
        carried.done(turn)
        return outputs

    def value(self, entry: ir.Input, rank: int, batch_layout: BatchLayout, scalars: Mapping[str, Tensor]) -> Tensor:
        """Return the value of a program's input on one rank."""
        if entry.kind == "batch":
            full, spec = batch_layout.batch[entry.name], entry.spec.ordered(batch_layout.order(rank))
            return on_device(shard(full, spec, self.mesh, self.mesh.coordinates(rank)), self.device)
        if entry.kind == "layout":
            return batch_layout.value(entry, rank, self.device)
        if entry.kind == "coordinate":
            return self.coordinates[rank][entry.name]
        if entry.kind == "constant":
            return self.constants[entry.name]
        if entry.kind == "scalar":
            return scalars[entry.name]
        return self.state[state_name(entry)].local[rank]

    def balance(self) -> dict[str, float]:
        """Return the balance of attention work in the last step, in the `cp` group of the first rank here."""
        return balance(self.layouts, self.ranks[0])

    def tensors(self) -> dict[str, tuple[Spec, ByRank]]:
        """Return the state here for a checkpoint, name -> (placement, local tensor by rank); write to it to restore."""
        state = {name: (s.spec, s.local) for name, s in self.state.items() if not name.startswith("gradient.")}
        return {name: (spec, local) for name, (spec, local) in state.items() if local}

    def state_dict(self) -> dict[str, Tensor]:
        """Return full parameters and buffers by the model's own names; with processes, every rank must call this.

        A tied parameter is there under each of its names. Tensors that the model does not read are not there.
        """
        values = {name.removeprefix("model."): value for name, value in self.wholes("model.").items()}
        return {name: values[first] for name, first in self.first_names.items() if first in values}

    def wholes(self, *kinds: str) -> dict[str, Tensor]:
        """Return the full state tensors whose names begin with `kinds`; with processes, every rank must call this."""
        return {name: self.whole(name) for name in self.state if name.startswith(kinds)}

    def whole(self, name: str) -> Tensor:
        """Return a full tensor of the state; with processes, every rank must call this."""
        state = self.state[name]
        return unshard(self.runtime.of_stage(state.local, state.stages[0], state.like), state.spec, self.mesh)


def number_of(values: Sequence[Tensor], kind: str, microbatches_per_turn: int) -> Tensor:
    """Return microbatches' values as one number, fp64[]: counts are added, everything else is averaged."""
    stacked = torch.stack(list(values)).double()
    number = stacked.sum() if kind == "count" else stacked.mean() / (microbatches_per_turn if kind == "loss" else 1)
    return number.double()


def kinds_of(programs: Mapping[str, Compiled]) -> dict[str, ir.OutputKind]:
    """Return the kinds of programs' outputs, by name."""
    return {o.name: o.kind for compiled in programs.values() for o in compiled.finished.outputs}


def programs_of(compiled: Mapping[str, Compiled]) -> dict[str, ir.Program]:
    """Return the finished programs, by the same names."""
    return {name: program.finished for name, program in compiled.items()}


def state_name(entry: ir.Input) -> str:
    """Return the name under which an input's value is stored."""
    return f"{PREFIXES[entry.kind]}.{entry.name}"


def stored(entry: ir.Input) -> Spec:
    """Return the placement in which an input is stored: a replicate copy as an invariant one."""
    return replace(entry.spec, replicate=())


class Entry(NamedTuple):
    """The expected shape and dtype of a batch entry; with `runs`, equal numbers of a row must be adjacent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: bool


def entries_of(program: ir.Program) -> dict[str, Entry]:
    """Return the batch entries that a program reads."""
    nodes = zip(program.inputs, program.placeholders(), strict=True)
    return {i.original: Entry(i.spec.shape, ir.example(n).dtype, i.runs) for i, n in nodes if i.kind == "batch"}


def check_batch(batch: Mapping[str, Tensor], expected: Mapping[str, Entry]) -> None:
    """Raise UserError unless the batch has the compiled entries, shapes and dtypes."""
    if absent := sorted(expected.keys() - batch.keys()):
        raise UserError(f"batch[{absent[0]!r}]", f"is missing; the step was compiled for {', '.join(expected)}")
    for key, value in batch.items():
        if key not in expected:
            raise UserError(f"batch[{key!r}]", f"is not among the compiled entries {', '.join(expected)}")
        shape, dtype, _ = expected[key]
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise UserError(
                f"batch[{key!r}]",
                f"is {value.dtype}{list(value.shape)}, but the step was compiled for {dtype}{list(shape)} a microbatch",
            )


def check_runs(name: str, value: Tensor, samples: Tensor) -> None:
    """Raise UserError unless equal entries of each sample's rows are adjacent, which attention's bounds assume."""
    value = value[samples].long()
    last = value.masked_fill(value == -1, 2**31 - 1)  # padding, document -1, ends a row
    if bool((last[..., 1:] >= last[..., :-1]).all()):
        return
    for number, rows in zip(samples.tolist(), value):
        for row in rows.reshape(-1, rows.shape[-1]):
            ids, counts = row.unique_consecutive().unique(return_counts=True)
            if bool((counts > 1).any()):
                problem = f"row {number} has {int(ids[counts > 1][0])} in two places with other ids between"
                fix = "the mask compares these ids, so give each document its own id"
                raise UserError(f"batch[{name!r}]", f"{problem}; {fix}")
