"""From a plain model to a training step: capture, passes, lowering, and the state on its ranks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from compiler_trainer.capture import LossFn, capture
from compiler_trainer.config import LowerConfig, MeshConfig, OptimConfig, PassesConfig
from compiler_trainer.errors import UserError
from compiler_trainer.options import build
from compiler_trainer.pipeline import DTYPES, Passes, build_pipeline
from compiler_trainer.runtime import LockstepRanks, ProcessRanks, Runtime
from compiler_trainer.step import Compiled, State, Step, state_name, stored
from passes import ir
from passes.mesh import Mesh
from passes.normalize import drops
from passes.runner import Observer, PassRecord, run_passes
from passes.spec import shard

T = TypeVar("T")


def compile_step(
    model: nn.Module,
    loss_fn: LossFn,
    example_batch: Mapping[str, Tensor],
    *,
    mesh: Mapping[str, int] | MeshConfig | None = None,
    optim: Mapping[str, Any] | OptimConfig | None = None,
    passes: Mapping[str, Any] | PassesConfig | None = None,
    lower: Mapping[str, Any] | LowerConfig | None = None,
    microbatches: int = 1,
    seed: int = 0,
    ranks: Literal["processes", "lockstep"] = "processes",
    initial: Iterable[tuple[str, Tensor]] | None = None,
    device: torch.device | str = "cpu",
    observe: Observer | None = None,
) -> Step:
    """Compile forward, loss, backward, clip and optimizer of a plain model into one step over a mesh.

    `example_batch` holds tensors of GLOBAL shape, whose rows are split into `microbatches`. `initial` gives full
    values of parameters and buffers (by default the model's own, which must then be real). `seed` keys random
    operators such as dropout, which are off in evaluation: that is captured in eval mode. With "processes"
    torch.distributed is up and this process is one rank; with "lockstep" all ranks are interpreted here.
    Raises UserError naming what is at fault.
    """
    update, options = _typed(OptimConfig, optim, "optim"), _typed(PassesConfig, passes, "passes")
    named = _mesh(mesh)
    runtime = _runtime(ranks, named, _typed(LowerConfig, lower or _default_lower(ranks), "lower"))
    device = torch.device(device)
    if microbatches < 1:
        raise UserError("microbatches", f"is {microbatches}; must be at least 1")
    masters = {name: p.dtype for name, p in model.named_parameters()}
    pipeline = build_pipeline(options, update, masters, microbatches)
    report, values = Reporter(), _initial_values(model, initial)
    batch, dtype = _one_microbatch(example_batch, microbatches), DTYPES[options.cast.param_dtype]
    values = list(values) if options.verify == "numeric" else values  # all at once: for small models
    scalars = {"lr": torch.tensor(update.lr), "seed": torch.tensor(seed)}
    whole = {**dict(values), **batch, **scalars} if options.verify == "numeric" else None

    def captured() -> Captured:
        program, ctx = report.time("capture", lambda: capture(model, loss_fn, batch, device, dtype))
        return Captured(dataclasses.replace(program, mesh=named), ctx)

    def run(stage: str, steps: Passes, given: Captured) -> Captured:
        try:
            program, records = run_passes(
                stage, steps, given.program, given.ctx, verify=options.verify, observe=observe, inputs=whole
            )
        except ir.Refused as error:
            raise UserError(*str(error).split(": ", 1)) from error
        report.add(stage, records)
        return Captured(program, given.ctx)

    single = captured()
    forward = run("forward", pipeline.forward, single)
    laid_out = forward.program.mesh  # as placement has it
    programs = {name: run(name, steps, forward) for name, steps in pipeline.train.items()}
    if depends_on_mode(single.program):
        with evaluating(model):
            forward = run("forward_eval", pipeline.forward, captured())
    programs["evaluate"] = run("evaluate", pipeline.evaluate, forward)
    stored_by = [c.program for c in programs.values()]
    state = initial_state(stored_by, runtime, laid_out, device, values)
    compiled = lower_all(programs, runtime, report)
    evaluation = compiled.pop("evaluate")
    return Step(runtime, laid_out, compiled, evaluation, state, update.lr, seed, microbatches, device, report.finish())


def lower_all(programs: Mapping[str, Captured], runtime: Runtime, report: Reporter) -> dict[str, Compiled]:
    """Something to call for each program."""
    return {
        name: Compiled(c.program, report.time(f"{name}.lower", partial(runtime.compile, name, *c)))
        for name, c in programs.items()
    }


class Captured(NamedTuple):
    """A program and the context its values live in."""

    program: ir.Program
    ctx: ir.Context


def depends_on_mode(program: ir.Program) -> bool:
    """Whether the captured forward may be another in eval mode: it drops out, or changes buffers."""
    return any(o.kind == "buffer" for o in program.outputs) or any(drops(node) for node in program.calls())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, each module's own mode restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class Reporter:
    """Collects what every pass did and how long compilation took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.passes: list[dict[str, Any]] = []

    def add(self, stage: str, records: Iterable[PassRecord]) -> None:
        """Record the passes of one program."""
        for record in records:
            self.seconds[f"{stage}.{record.name}"] = record.seconds
            self.passes.append({"program": stage, **record.as_dict()})

    def time(self, name: str, work: Callable[[], T]) -> T:
        """Do something and record how long it took."""
        started = time.perf_counter()
        done = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        return done

    def finish(self) -> dict[str, Any]:
        """The report: seconds by pass, and each pass's counts, notes, communication and memory."""
        return {"seconds": {name: round(s, 4) for name, s in self.seconds.items()}, "passes": self.passes}


def initial_state(
    programs: Iterable[ir.Program],
    runtime: Runtime,
    mesh: Mesh,
    device: torch.device,
    values: Iterable[tuple[str, Tensor]],
) -> dict[str, State]:
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
            state[key] = State(
                spec,
                {
                    rank: shard(full.detach().to(device, example.dtype), spec, mesh, mesh.coordinates(rank))
                    for rank in runtime.ranks
                },
            )
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


def _typed(cls: type[T], given: Any, where: str) -> T:
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
            raise UserError(
                "microbatches", f"{microbatches} does not divide the {value.shape[0]} rows of batch[{key!r}]"
            )
    return {key: value[: value.shape[0] // microbatches] for key, value in batch.items()}
