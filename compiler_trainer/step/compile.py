"""Compile a plain model into a training step: capture, passes, lowering, and the state of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from compiler_trainer.capture.capture import first_names
from compiler_trainer.config.cluster import AUTO_CLUSTER, ClusterConfig
from compiler_trainer.config.device import passes_on
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import LowerConfig, MeshConfig, OptimConfig, PassesConfig
from compiler_trainer.request import CompileRequest, LossFn
from compiler_trainer.step.agree import agreed
from compiler_trainer.step.captured import Captured, Reporter, check_offsets, mesh_of, one_microbatch, recorded
from compiler_trainer.step.program_cache import ProgramCache
from compiler_trainer.step.programs import compile_programs
from compiler_trainer.step.ranks import local_device, place_in_job
from compiler_trainer.step.runtime import LockstepRanks, ProcessRanks, Runtime
from compiler_trainer.step.step import PREFIXES, Compiled, State, Step, state_name, stored
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.spec import Value, shard
from passes.lower import inductor
from passes.lower.heap import keep_freed_memory
from passes.pipeline.schedules import Schedule, play

if TYPE_CHECKING:
    from passes.check.runner import Observer


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
    skip_nonfinite: bool = False,
    ranks: Literal["processes", "lockstep"] = "processes",
    initial: Iterable[tuple[str, Value]] | None = None,
    device: torch.device | str | None = None,
    train: bool = True,
    evaluate: bool = True,
    below: Mapping[str, int] | None = None,
    observe: Observer | None = None,
    cache: ProgramCache | None = None,
    cluster: ClusterConfig = AUTO_CLUSTER,
    tell: Callable[[str], None] = lambda what: None,
) -> Step:
    """Compile forward, loss, backward, clipping and optimizer of a plain model into one step over a mesh.

    Args:
        model: a module for one device; its parameters may be on the meta device if `initial` has their values.
        loss_fn: a function of (model, batch) that returns a 0-d tensor, or one and a dict of metrics.
        example_batch: a batch with the names, dtypes and GLOBAL shapes of all later ones. The first dim is samples.
        mesh: sizes of the axes `dp_replicate`, `dp_shard`, `cp`, `tp`, `ep` and `pp`; one rank by default.
        optim: options of the group `optim`, such as `{"name": "adamw", "lr": 1e-3}`.
        passes: options of the group `passes`.
        lower: options of the group `lower`.
        microbatches: the number of parts into which the first dim of a batch is split (gradient accumulation).
        seed: the key of random operators such as dropout; evaluation is captured in eval mode, without them.
        skip_nonfinite: let a step whose gradient norm is infinite or not a number change nothing.
        ranks: "processes": torch.distributed is initialized, and this process is one rank. "lockstep": all ranks are
            interpreted in this process, on the CPU.
        initial: full values of parameters and buffers by name, of which a rank reads its share; by default the model's.
        device: the device of this rank; by default its GPU, or the CPU without one.
        train: compile an update; without it the step can only evaluate.
        evaluate: compile an evaluation; without it the step can only train, and does not store tensors that only
            evaluation reads.
        below: exclusive upper bounds of the values of batch entries.
        observe: a function that gets each program and its report after each pass.
        cache: stored programs; if an earlier start stored those of this job, passes do not run.
        cluster: the times by which passes decide (`async_tp=auto`); by default those of this device.
        tell: a function that gets the name of each task that begins, such as a pass.

    Raises:
        UserError: names the option or input at fault.
        CompileError: names the line of the model that a pass cannot rewrite, and the fix.
    """
    update, options = build(OptimConfig, optim or {}, "optim"), build(PassesConfig, passes or {}, "passes")
    job_mesh, device = mesh_of(mesh), default_device(ranks) if device is None else torch.device(device)
    options = passes_on(options, device.type == "cuda")
    lower = build(LowerConfig, lower or _default_lower(ranks), "lower")
    runtime = _runtime(ranks, job_mesh, lower, device, tell)
    on_cpu = ranks == "processes" and device.type == "cpu"
    if on_cpu:
        keep_freed_memory()
    values: Iterable[tuple[str, Value]] = _initial_values(model, initial)
    if ranks == "processes" and place_in_job()[1] > 1:
        values = agreed(values)
    real = None
    if options.verify == "numeric":
        real = {name: value[()] for name, value in values}  # reads all values: for small models only
        values = real.items()
    request = CompileRequest(
        model=model,
        loss_fn=loss_fn,
        batch=one_microbatch(example_batch, microbatches),
        mesh=job_mesh,
        passes=options,
        optim=update,
        device=device,
        cluster=cluster,
        microbatches=microbatches,
        skip_nonfinite=skip_nonfinite,
        train=train,
        evaluate=evaluate,
        entry_bounds=below or {},
        values=real,
        seed=seed,
    )

    def prepare() -> None:
        if on_cpu and lower.backend == "inductor" and lower.fast_start:
            inductor.get_ready(device)

    result = compile_programs(request, observe=observe, tell=tell, cache=cache, prepare=prepare)
    programs, report, schedule = result.programs, result.report, request.schedule(result.report.cost)
    if device.type == "cuda":
        check_offsets(programs)
    notes = recorded(programs, lower, device, ranks == "lockstep")
    placed_mesh = next(iter(programs.values())).program.mesh  # the mesh as placed; evaluation programs come last
    ranks_by_program = {name: pipeline_rank(captured.program, schedule) for name, captured in programs.items()}
    check_evaluated(programs, ranks_by_program)
    placed = [(captured.program, ranks_by_program[name]) for name, captured in programs.items()]
    state = initial_state(placed, runtime, placed_mesh, device, values)
    compiled, evaluation = lower_programs(programs, ranks_by_program, runtime, report)
    extra: dict[str, Any] = {"cudagraphs": notes} if notes else {}
    if schedule:
        extra["pipeline"] = draw_schedule(options.pipeline.schedule, schedule)
    return Step(
        runtime=runtime,
        mesh=placed_mesh,
        train=compiled,
        evaluation=evaluation,
        schedule=schedule,
        state=state,
        names=names_of(model),
        lr=update.lr,
        seed=seed,
        microbatches=microbatches,
        device=device,
        report=report.finish() | extra,
    )


def names_of(model: nn.Module) -> dict[str, str]:
    """Return the names of a model's state -> the first name of each tensor; non-persistent buffers are not in it."""
    not_stored = dict(model.named_buffers(remove_duplicate=False)).keys() - model.state_dict(keep_vars=True).keys()
    return {name: first for name, first in first_names(model).items() if name not in not_stored}


def default_device(ranks: str) -> torch.device:
    """Return this rank's GPU, or the CPU without one; lockstep ranks are interpreted on the CPU."""
    return local_device() if ranks == "processes" else torch.device("cpu")


def lower_programs(
    programs: Mapping[str, Captured], ranks_by_program: Mapping[str, int], runtime: Runtime, report: Reporter
) -> tuple[dict[str, Compiled], dict[str, Compiled]]:
    """Return the training programs and the evaluation programs, with their executables.

    Training programs of stages on this process are lowered now, evaluation programs when they first run.
    """
    compiled = {name: Compiled(c.program, partial(runtime.compile, name, *c)) for name, c in programs.items()}
    runtime.meet({name: entry.finished for name, entry in compiled.items()})
    evaluation = {name: compiled.pop(name) for name, c in programs.items() if c.program.evaluates}
    runtime.build((entry.finished for entry in compiled.values()), next(iter(programs.values())).ctx)
    stages = {runtime.stage_of(rank) for rank in runtime.ranks}
    for name, entry in compiled.items():
        if ranks_by_program[name] in stages:
            report.time(f"{name}.lower", partial(getattr, entry, "executable"))
    return compiled, evaluation


def draw_schedule(name: str, schedule: Schedule) -> dict[str, Any]:
    """Return the schedule of pipeline tasks as a page draws it: a forward takes 1, a backward 2."""
    timing = play(schedule)
    rows = [[(str(slot), *timing.spans[slot][:2]) for slot in row] for row in schedule.rows]
    return {"schedule": name, "unit": "forwards", "idle": timing.idle, "slots": rows}


def check_evaluated(programs: Mapping[str, Captured], ranks_by_program: Mapping[str, int]) -> None:
    """Raise CompileError if evaluation reads state on a pipeline rank whose copy training does not update."""
    ends = [(name, c.program, i) for name, c in programs.items() for i in range(len(c.program.inputs))]
    ranks_with = dict[str, set[int]]()
    for name, program, i in ends:
        if not program.evaluates:
            ranks_with.setdefault(program.inputs[i].name, set()).add(ranks_by_program[name])
    for name, program, i in ends:
        entry, rank = program.inputs[i], ranks_by_program[name]
        is_changed = entry.kind in ("parameter", "buffer")
        if is_changed and rank not in ranks_with.get(entry.name, {rank}):
            trained_on = ", ".join(map(str, sorted(ranks_with[entry.name])))
            problem = f"{entry.kind} {entry.name!r} is trained on pipeline rank {trained_on}, {name} reads it on {rank}"
            raise ir.CompileError("assign", program.placeholders()[i], problem)


def pipeline_rank(program: ir.Program, schedule: Schedule | None) -> int:
    """Return the pipeline rank that runs a program."""
    return schedule.rank(program.task) if schedule and program.task else 0


@torch.no_grad()
def initial_state(
    programs: Iterable[tuple[ir.Program, int]],
    runtime: Runtime,
    mesh: Mesh,
    device: torch.device,
    values: Iterable[tuple[str, Value]],
) -> dict[str, State]:
    """Return the local state of the ranks here for each stored input: given values, or zero moments and accumulators.

    Programs come with the pipeline rank that runs them. The accumulator of a tied parameter may have another placement
    on each stage that reads the parameter: terms of a sum on one, a shard on another.
    """
    needed: dict[str, tuple[ir.Input, Tensor]] = {}
    likes: dict[str, dict[int, Tensor]] = {}  # by stage
    for program, stage in programs:
        for entry, node in zip(program.inputs, program.placeholders()):
            if entry.kind in PREFIXES:
                needed.setdefault(name := state_name(entry), (entry, ir.example(node)))
                likes.setdefault(name, {}).setdefault(stage, ir.example(node))

    def make_state(name: str, entry: ir.Input, like: Tensor, local: Callable[[int], Tensor]) -> State:
        stages = tuple(sorted(likes[name]))
        local_values = {rank: local(rank) for rank in runtime.ranks if runtime.stage_of(rank) in stages}
        return State(stored(entry), local_values, torch.empty(like.shape, dtype=like.dtype, device="meta"), stages)

    def part(full: Value, entry: ir.Input, like: Tensor, rank: int) -> Tensor:
        return shard(full, stored(entry), mesh, mesh.coordinates(rank), like.dtype, device)

    def zeros(name: str, rank: int) -> Tensor:
        like = likes[name][runtime.stage_of(rank)]
        return torch.zeros(like.shape, dtype=like.dtype, device=device)

    state = {}
    for name, full in values:
        if (key := f"model.{name}") in needed:
            entry, like = needed.pop(key)
            if tuple(full.shape) != entry.spec.shape:
                raise UserError(name, f"initial value has shape {tuple(full.shape)}, the model has {entry.spec.shape}")
            state[key] = make_state(key, entry, like, partial(part, full, entry, like))
    if absent := [name for name, (entry, _) in needed.items() if entry.kind in ir.MODEL_STATE]:
        raise UserError(absent[0].removeprefix("model."), "has no initial value; give real weights or `initial`")
    for name, (entry, like) in needed.items():
        state[name] = make_state(name, entry, like, partial(zeros, name))
    return state


def _initial_values(model: nn.Module, initial: Iterable[tuple[str, Value]] | None) -> Iterable[tuple[str, Value]]:
    if initial is not None:
        yield from initial
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            yield name, tensor.detach()


def _default_lower(ranks: str) -> dict[str, str]:
    return {"backend": "eager" if ranks == "lockstep" else "inductor"}


def _runtime(ranks: str, mesh: Mesh, lower: LowerConfig, device: torch.device, tell: Callable[[str], None]) -> Runtime:
    if lower.cudagraphs is True and device.type != "cuda":
        raise UserError("lower.cudagraphs", f"is true, but the step runs on {device.type}; use a GPU, or auto")
    if ranks == "processes":
        return ProcessRanks(mesh, lower, device, tell)
    if ranks != "lockstep":
        raise UserError("ranks", f"is {ranks!r}; must be 'processes' or 'lockstep'")
    if lower.cudagraphs is True:
        raise UserError("lower.cudagraphs", "is true, but lockstep ranks are interpreted; set it to false")
    if lower.backend != "eager":
        raise UserError("lower.backend", f"is {lower.backend!r}, but lockstep ranks are interpreted; use 'eager'")
    return LockstepRanks(mesh)
