"""From a plain model to a training step: capture, passes, lowering, and the state on its ranks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compiler_trainer.capture import LossFn, capture
from compiler_trainer.config import LowerConfig, MeshConfig, OptimConfig, PassesConfig
from compiler_trainer.errors import UserError
from compiler_trainer.options import build
from compiler_trainer.pipeline import DTYPES, build_pipeline
from compiler_trainer.runtime import LockstepRanks, ProcessRanks, Runtime
from compiler_trainer.step import Compiled, State, Step, state_name, stored
from passes import ir
from passes.mesh import Mesh
from passes.runner import Observer, PassRecord, run_passes
from passes.spec import shard



def compile_step(model: nn.Module, loss_fn: LossFn, example_batch: Mapping[str, Tensor], *,
                 mesh: Mapping[str, int] | MeshConfig | None = None,
                 optim: Mapping[str, Any] | OptimConfig | None = None,
                 passes: Mapping[str, Any] | PassesConfig | None = None,
                 lower: Mapping[str, Any] | LowerConfig | None = None,
                 microbatches: int = 1,
                 ranks: Literal["processes", "lockstep"] = "processes",
                 initial: Iterable[tuple[str, Tensor]] | None = None,
                 device: torch.device | str = "cpu",
                 observe: Observer | None = None) -> Step:
    """Compile forward, loss, backward, clip and optimizer of a plain model into one step over a mesh of ranks.

    `example_batch` holds tensors of GLOBAL shape, whose rows are split into `microbatches`. `initial` gives full
    values of parameters and buffers (by default the model's own, which must then be real). With "processes"
    torch.distributed is up and this process is one rank; with "lockstep" all ranks are interpreted here.
    Raises UserError naming what is at fault.
    """
    optim, passes = _typed(OptimConfig, optim, "optim"), _typed(PassesConfig, passes, "passes")
    lower = _typed(LowerConfig, lower if lower is not None else _default_lower(ranks), "lower")
    named = _mesh(mesh)
    runtime = _runtime(ranks, named, lower)
    device = torch.device(device)
    masters = {name: p.dtype for name, p in model.named_parameters()}
    pipeline = build_pipeline(passes, optim, masters, microbatches)
    started = time.perf_counter()
    program, ctx = capture(model, loss_fn, _one_microbatch(example_batch, microbatches), device,
                           DTYPES[passes.cast.param_dtype])
    program = dataclasses.replace(program, mesh=named)
    report = Reporter(time.perf_counter() - started)

    def run(stage: str, steps, given: ir.Program) -> ir.Program:
        try:
            program, records = run_passes(stage, steps, given, ctx, verify=passes.verify, observe=observe)
        except ir.Refused as error:
            raise UserError(*str(error).split(": ", 1)) from error
        report.add(stage, records)
        return program

    forward = run("forward", pipeline.forward, program)
    evaluation = run("evaluate", pipeline.evaluate, forward)
    train = {name: run(name, steps, forward) for name, steps in pipeline.train.items()}
    state = initial_state(train.values(), runtime, named, device, _initial_values(model, initial))
    compiled = {name: report.time(name, lambda p=p, name=name: Compiled(p, runtime.compile(name, p, ctx)))
                for name, p in {**train, "evaluate": evaluation}.items()}
    return Step(runtime, named, {name: compiled[name] for name in train}, compiled["evaluate"], state, optim.lr,
                microbatches, device, report.finish())


class Reporter:
    """Collects what every pass did and how long compilation took."""

    def __init__(self, capture_s: float):
        self.seconds: dict[str, float] = {"capture": capture_s}
        self.passes: list[dict[str, Any]] = []

    def add(self, stage: str, records: Iterable[PassRecord]) -> None:
        """Record the passes of one program."""
        for record in records:
            self.seconds[f"{stage}.{record.name}"] = record.seconds
            self.passes.append({"program": stage, **record.as_dict()})

    def time(self, name: str, compile_one: Callable[[], Compiled]) -> Compiled:
        """Lower one program and record how long it took."""
        started = time.perf_counter()
        compiled = compile_one()
        self.seconds[f"{name}.lower"] = time.perf_counter() - started
        return compiled

    def finish(self) -> dict[str, Any]:
        """The report: seconds by pass, and each pass's counts, notes, communication and memory."""
        return {"seconds": {name: round(s, 4) for name, s in self.seconds.items()}, "passes": self.passes}


def initial_state(programs: Iterable[ir.Program], runtime: Runtime, mesh: Mesh, device: torch.device,
                  values: Iterable[tuple[str, Tensor]]) -> dict[str, State]:
    """Local state of the ranks here for every stored input: given values, zero moments and accumulators."""
    needed: dict[str, tuple[ir.Input, Tensor]] = {}
    for program in programs:
        for given, node in zip(program.inputs, program.placeholders()):
            if given.kind in ("parameter", "buffer", "moment", "gradient"):
                needed.setdefault(state_name(given), (given, ir.example(node)))
    state = {}
    for name, full in values:
        if (key := f"model.{name}") in needed:
            given, example = needed.pop(key)
            if tuple(full.shape) != given.spec.shape:
                raise UserError(name, f"initial value has shape {tuple(full.shape)}, the model has {given.spec.shape}")
            spec = stored(given)
            state[key] = State(spec, {rank: shard(full.detach().to(device, example.dtype), spec, mesh, mesh.coordinates(rank))
                                      for rank in runtime.ranks})
    if missing := [name for name, (given, _) in needed.items() if given.kind in ("parameter", "buffer")]:
        raise UserError(missing[0].removeprefix("model."), "has no initial value; give real weights or `initial`")
    for name, (given, example) in needed.items():
        zeros = {rank: torch.zeros(example.shape, dtype=example.dtype, device=device) for rank in runtime.ranks}
        state[name] = State(stored(given), zeros)
    return state


def _initial_values(model: nn.Module, initial: Iterable[tuple[str, Tensor]] | None) -> Iterable[tuple[str, Tensor]]:
    if initial is not None:
        yield from initial
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            yield name, tensor


def _typed(cls: type, given: Any, where: str) -> Any:
    return given if isinstance(given, cls) else build(cls, dict(given or {}), where)


def _default_lower(ranks: str) -> dict[str, str]:
    return {"backend": "eager" if ranks == "lockstep" else "inductor"}


def _mesh(given: Mapping[str, int] | MeshConfig | None) -> Mesh:
    sizes = dataclasses.asdict(given) if isinstance(given, MeshConfig) else dict(given or {})
    try:
        return Mesh.of(sizes)
    except ValueError as error:
        raise UserError("mesh", str(error)) from error


def _runtime(ranks: str, mesh: Mesh, lower: LowerConfig) -> Runtime:
    if ranks == "processes":
        return ProcessRanks(mesh, lower)
    if ranks != "lockstep":
        raise UserError("ranks", f"is {ranks!r}; must be 'processes' or 'lockstep'")
    if lower.backend != "eager":
        raise UserError("lower.backend", f"is {lower.backend!r}, but lockstep ranks are interpreted; use 'eager'")
    return LockstepRanks(mesh)


def _one_microbatch(batch: Mapping[str, Tensor], microbatches: int) -> dict[str, Tensor]:
    """The first rows of a batch: its shapes are those that are compiled."""
    for key, value in batch.items():
        if value.shape[0] % microbatches:
            raise UserError("microbatches", f"{microbatches} does not divide the {value.shape[0]} rows of batch[{key!r}]")
    return {key: value[: value.shape[0] // microbatches] for key, value in batch.items()}
