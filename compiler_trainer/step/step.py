"""One optimizer step as a call: compiled programs, and the state that they change in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.step.dealing import Dealt, balance
from compiler_trainer.step.runtime import Runtime
from passes.program import ir
from passes.program.bodies import flatten
from passes.program.mesh import Mesh
from passes.program.spec import Spec, shard, unshard

ByRank = dict[int, Tensor]


@dataclass
class State:
    """A stored tensor: its placement, and the local tensor of every rank that lives here."""

    spec: Spec
    local: ByRank


@dataclass(frozen=True)
class Compiled:
    """A finished program with what runs it, made when it is first asked for."""

    finished: ir.Program
    lower: Callable[[], Any]

    @cached_property
    def program(self) -> ir.Program:
        """The program as one flat graph."""
        return flatten(self.finished)

    @cached_property
    def executable(self) -> Any:
        """What a runtime runs."""
        return self.lower()


class Step:
    """Runs training steps on global batches; made by `compile_step`."""

    def __init__(
        self,
        runtime: Runtime,
        mesh: Mesh,
        train: Mapping[str, Compiled],
        evaluation: Compiled | None,
        state: dict[str, State],
        lr: float,
        seed: int,
        microbatches: int,
        device: torch.device,
        report: dict[str, Any],
    ):
        self.runtime, self.mesh, self.ranks = runtime, mesh, runtime.ranks
        self.train, self._evaluation, self.state = train, evaluation, state
        self.lr, self.seed, self.microbatches = lr, seed, microbatches
        self.device, self.report = device, report
        self.dealt: list[Dealt] = []  # the microbatches of the last step
        compiled = (*train.values(), *([evaluation] if evaluation else []))
        named = dict.fromkeys(o.name for each in compiled for o in each.finished.outputs if o.kind == "metric")
        self.metrics = tuple(name for name in named if name != "grad_norm")  # what a loss returns beside the loss
        given = (i for each in compiled for i in each.finished.inputs)
        self.constants = {i.name: i.value.to(device) for i in given if i.value is not None}
        self.places = {
            rank: {axis: torch.tensor(at, device=device) for axis, at in mesh.coordinates(rank).items()}
            for rank in self.ranks
        }

    def __call__(self, batch: Mapping[str, Tensor], lr: float | None = None) -> dict[str, float]:
        """One optimizer step on a global batch: {"loss": of the whole batch, metrics, "grad_norm": before clipping}.

        Means over labels are over those of the whole batch, other terms of the loss, and other metrics that it returns
        beside it, are means over microbatches.
        With `passes.moe.dispatch=bounded` also "dropped_rows", how many found no room, of all layers and ranks.
        """
        rate, self.dealt = self.lr if lr is None else lr, []
        count = int(self.state["optim.step"].local[self.ranks[0]])
        if self.microbatches == 1:
            out = self.run(self.train["step"], batch, self.scalars(rate, count))
            return {name: float(value) for name, value in out.items()}
        accumulate, parts = self.train["accumulate"], self.split(batch)
        counts = self.counts(accumulate, parts)
        outs = [
            self.run(accumulate, part, self.scalars(rate, count * self.microbatches + i) | counts)
            for i, part in enumerate(parts)
        ]
        norm = self.run(self.train["apply"], {}, self.scalars(rate, count))["grad_norm"]
        return {**together(accumulate.finished, outs), "grad_norm": float(norm)}

    @property
    def evaluation(self) -> Compiled:
        """The program of evaluation; raises UserError where none was compiled."""
        if self._evaluation is None:
            raise UserError("evaluate", "is false, so that this step can only train; give compile_step(evaluate=True)")
        return self._evaluation

    def scalars(self, lr: float, count: int) -> dict[str, Tensor]:
        """What is fed as a value: the learning rate, and the seed of a (micro)batch's random numbers."""
        seed = (self.seed << 32) + count
        return {
            "lr": torch.tensor(lr, dtype=torch.float64, device=self.device),
            "seed": torch.tensor(seed, dtype=torch.int64, device=self.device),
        }

    def counts(self, compiled: Compiled, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What a program is fed of all microbatches together: how many labels they have."""
        for part in parts:
            check_batch(part, compiled.finished)
        return {i.name: i.count.of(parts, self.device) for i in compiled.finished.inputs if i.count is not None}

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """The mean loss of a global batch, nothing changed."""
        return self.measure(batch)["loss"]

    def measure(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """The mean loss of a global batch and its metrics, nothing changed."""
        parts = self.split(batch)
        scalars = self.scalars(0.0, 0) | self.counts(self.evaluation, parts)
        return together(self.evaluation.finished, [self.run(self.evaluation, part, scalars) for part in parts])

    def split(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The microbatches of a global batch: consecutive rows."""
        parts = {key: value.chunk(self.microbatches) for key, value in batch.items()}
        return [{key: chunks[i] for key, chunks in parts.items()} for i in range(self.microbatches)]

    def run(self, compiled: Compiled, batch: Mapping[str, Tensor], scalars: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run one program for the ranks here; its outputs by name, as the first of them has them."""
        check_batch(batch, compiled.finished)
        given, dealt = compiled.finished.inputs, Dealt(compiled.finished, batch)
        if compiled is not self._evaluation and batch:
            self.dealt.append(dealt)
        inputs = {rank: [self.value(i, rank, dealt, scalars) for i in given] for rank in self.ranks}
        results = self.runtime.run(compiled.executable, inputs)
        first = results[self.ranks[0]]
        return {o.name: value for o, value in zip(compiled.finished.outputs, first, strict=True) if o.kind != "buffer"}

    def value(self, given: ir.Input, rank: int, dealt: Dealt, scalars: Mapping[str, Tensor]) -> Tensor:
        """What one input of a program is on one rank."""
        if given.kind == "batch":
            whole, spec = dealt.batch[given.name].to(self.device), given.spec.ordered(dealt.order(rank))
            return shard(whole, spec, self.mesh, self.mesh.coordinates(rank))
        if given.kind == "layout":
            return dealt.value(given, rank, self.device)
        if given.kind == "coordinate":
            return self.places[rank][given.name]
        if given.kind == "constant":
            return self.constants[given.name]
        if given.kind == "scalar":
            return scalars[given.name]
        return self.state[state_name(given)].local[rank]

    def balance(self) -> dict[str, float]:
        """How even the work of attention was in the last step, among the ranks along `cp` of the first rank here."""
        return balance(self.dealt, self.ranks[0])

    def tensors(self) -> dict[str, tuple[Spec, ByRank]]:
        """All state that a checkpoint needs: name -> (placement, local tensor by rank); write in place to restore."""
        return {name: (s.spec, s.local) for name, s in self.state.items() if not name.startswith("gradient.")}

    def state_dict(self) -> dict[str, Tensor]:
        """Full parameters and buffers by the model's own names; with processes, every rank must call it."""
        return {
            name.removeprefix("model."): unshard(self.runtime.all_locals(s.local), s.spec, self.mesh)
            for name, s in self.state.items()
            if name.startswith("model.")
        }


def together(program: ir.Program, outs: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """What the microbatches of a program gave, as one: counts added, all else averaged."""
    counts = {o.name for o in program.outputs if o.kind == "count"}
    stacked = {name: torch.stack([out[name] for out in outs]) for name in outs[0]}
    return {name: float(values.sum() if name in counts else values.mean()) for name, values in stacked.items()}


def state_name(given: ir.Input) -> str:
    """The name under which an input's value is stored."""
    prefix = {"parameter": "model", "buffer": "model", "moment": "optim", "gradient": "gradient"}[given.kind]
    return f"{prefix}.{given.name}"


def stored(given: ir.Input) -> Spec:
    """How an input is stored: a varying copy is a copy."""
    return replace(given.spec, varying=())


def check_batch(batch: Mapping[str, Tensor], program: ir.Program) -> None:
    """Raises UserError unless the batch has the entries, shapes and dtypes that were compiled."""
    nodes = zip(program.inputs, program.placeholders())
    wanted = {i.name: (i.spec.shape, ir.example(n).dtype) for i, n in nodes if i.kind == "batch"}
    if missing := sorted(wanted.keys() - batch.keys()):
        raise UserError(f"batch[{missing[0]!r}]", f"is missing; the step was compiled for {', '.join(wanted)}")
    for key, value in batch.items():
        if key not in wanted:
            raise UserError(f"batch[{key!r}]", f"is not among the compiled entries {', '.join(wanted)}")
        shape, dtype = wanted[key]
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise UserError(
                f"batch[{key!r}]",
                f"is {value.dtype}{list(value.shape)}, the step was compiled for {dtype}{list(shape)} a microbatch",
            )
    for name in (i.name for i in program.inputs if i.runs):
        check_runs(name, batch[name])


def check_runs(name: str, value: Tensor) -> None:
    """Raises UserError unless equal entries of each row are neighbours, which attention's bounds were made for."""
    turns = value[..., 1:] != value[..., :-1]
    if bool((value[..., 1:] >= value[..., :-1]).all()):
        return
    for number, (row, turn) in enumerate(zip(value.flatten(0, -2), turns.flatten(0, -2))):
        ids = torch.cat([row[:1], row[1:][turn]])
        values, counts = ids.unique(return_counts=True)
        if bool((counts > 1).any()):
            again = int(values[counts > 1][0])
            fix = "the mask compares these ids, so give each document an id of its own"
            raise UserError(f"batch[{name!r}]", f"row {number} has {again} in two places with others between; {fix}")
