"""Configuration in, passes out: read this page first.

    capture -> cast, intervals, chunk_loss, normalize, token_mean, batch_overlap
            -> sequence_layout, experts, place, float8, shard
            -> joint, simplify, cse, reassociate, remat, async_tp, optimize
            -> bucket, collectives, communicators, take_turns, overlap, segment -> lower

`build_pipeline` returns the programs of a job as a table. `forward` ends with the program of the loss on every rank.
Training continues from there: with one microbatch as one `step` program, with several as `accumulate`, run once a
microbatch, and `apply`. `async_tp`, `batch_overlap` and `take_turns` run only if options request them. `bucket` comes
after `optimize` because the reductions of replicated gradients appear only there.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from compiler_trainer.config.device import cluster_of, resolve_cluster
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import (
    EIGHT_BITS,
    CastConfig,
    GroupConfig,
    OptimConfig,
    PassesConfig,
)
from compiler_trainer.config.targets import called, import_rules
from compiler_trainer.request import CompileRequest
from passes.autograd.joint import Joint
from passes.autograd.simplify import Simplify
from passes.communication.async_tp import AsyncTP
from passes.communication.batch_overlap import BatchOverlap
from passes.communication.bucket import Bucket
from passes.communication.communicators import Communicators
from passes.communication.cse import CSE
from passes.communication.overlap import Overlap
from passes.communication.reassociate import Reassociate
from passes.communication.take_turns import TakeTurns
from passes.context.sequence_layout import SequenceLayout
from passes.idioms.chunk_loss import ChunkLoss
from passes.idioms.experts import Experts
from passes.idioms.intervals import Intervals
from passes.ir.folds import Folding
from passes.ir.ir import Pass, Program
from passes.ir.layer import within
from passes.ir.placing import end, placed
from passes.ir.stages import Stage
from passes.ir.task import Task
from passes.lower.segment import Segment
from passes.lower.unfold import Unfold
from passes.memory.remat import Remat
from passes.pipeline.assign import Assign
from passes.pipeline.cut import cut, cut_gathers, cut_update, without_unread_state
from passes.precision.cast import Cast
from passes.precision.float8 import Float8
from passes.sharding.collectives import Collectives
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place
from passes.sharding.shard import Shard
from passes.update.accumulate import Accumulate, ApplyOnly
from passes.update.defer import Defer
from passes.update.groups import Group
from passes.update.optimize import Optimize
from passes.update.optimizers import SGD, AdamW, Muon, Optimizer
from passes.update.token_mean import TokenMean

Passes = tuple[Pass, ...]
DTYPES: dict[str | None, Any] = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
CAPTURED, CAPTURED_IN_EVAL = "captured", "captured in eval mode"  # sources: the model and its loss on one device
FORWARD, EVALUATE = "forward", "evaluate"


@dataclass(frozen=True)
class ProgramPlan:
    """One row of a pipeline: the program `name` is made from the program `source` by `passes`.

    A `shared` program is only a source of others; all others run. If there is a `cut`, it returns the programs that run
    by name, each of which goes through `finish`. The program stores its state in the layout of the program `state_of`,
    if given. The forward serves training and evaluation.
    """

    name: str
    source: str
    passes: Passes
    shared: bool = False
    cut: Callable[[Program], Mapping[str, Program]] | None = None
    finish: Passes = ()
    state_of: str = ""
    purpose: Literal["training", "evaluation", "both"] = "training"

    @property
    def trains(self) -> bool:
        """True if the row belongs to training, not to evaluation or to both."""
        return self.purpose == "training"

    @property
    def whole(self) -> Passes:
        """The passes that each part of the program goes through, in order."""
        return (*self.passes, *self.finish)


@dataclass(frozen=True)
class Pipeline:
    """The programs of a job as a table, each row after the row of its source.

    With `folding`, one of many similar layers stands for the others until `unfold`.
    """

    rows: tuple[ProgramPlan, ...]
    folding: Folding | None = None
    unfold: Unfold = Unfold()

    def __getitem__(self, name: str) -> ProgramPlan:
        """Return the row of a program; raise KeyError if there is none."""
        return {row.name: row for row in self.rows}[name]

    @property
    def trains(self) -> bool:
        """True if any row belongs to training."""
        return any(row.trains for row in self.rows)

    def lineage(self, name: str, source: str = CAPTURED) -> Passes:
        """Return the passes between a source and a finished program, in order."""
        row = self[name]
        return row.whole if row.source == source else (*self.lineage(row.source, source), *row.whole)

    def descendants(self, name: str) -> list[ProgramPlan]:
        """Return the rows made from a program, directly or through others."""
        direct = [row for row in self.rows if row.source == name]
        return [*direct, *(each for row in direct for each in self.descendants(row.name))]

    def training(self) -> dict[str, Passes]:
        """Return the passes of each uncut training program, from the forward on."""
        rows = [row for row in self.rows if row.trains and not row.shared]
        return {row.name: self.lineage(row.name, FORWARD) for row in rows if row.cut is None}

    @property
    def is_cut(self) -> bool:
        """True if training programs are cut from a larger one."""
        return any(row.trains and row.cut for row in self.rows)


def build_pipeline(request: CompileRequest) -> Pipeline:
    """Return the programs and passes that a request asks for.

    Raises UserError if one of the user's passes fits nowhere, or `batch_overlap` does not divide the microbatches.
    """
    passes = request.passes
    import_rules(passes.rules)
    check_at_once(passes.communication.batch_overlap, request.microbatches, request.mesh["pp"])
    forward = ProgramPlan(FORWARD, CAPTURED, forward_passes(request), shared=True, purpose="both")
    rows = (forward, *(training_rows(request) if request.train else ()), *evaluation_rows(request))
    return with_extra(Pipeline(rows, build_folding(request)), build_extra(passes))


def check_at_once(at_once: int, microbatches: int, pp: int) -> None:
    """Raise UserError if `at_once` microbatches cannot be computed together."""
    if microbatches % at_once:
        fix = "make train.microbatches a multiple of it"
        raise UserError("passes.communication.batch_overlap", f"is {at_once}, of {microbatches} microbatches; {fix}")
    if at_once > 1 and pp > 1:
        problem = f"is {at_once} with mesh.pp={pp}, whose stages take microbatches one by one; set it to 1"
        raise UserError("passes.communication.batch_overlap", problem)


def forward_passes(request: CompileRequest) -> Passes:
    """Return the passes from the captured model to the forward that every rank runs."""
    passes, masters = request.passes, request.parameter_dtypes
    cast, shard, context = passes.cast, passes.shard, passes.context
    schedule = request.schedule()
    return (
        build_cast(cast, masters),
        Intervals(),
        ChunkLoss(passes.chunk_loss.chunks, passes.chunk_loss.logits_mib),
        Normalize(),
        *((TokenMean(request.microbatches),) if request.microbatches > 1 else ()),
        *((BatchOverlap(request.at_once),) if request.at_once > 1 else ()),
        SequenceLayout(context.load_balance, context.block),
        Experts(passes.moe.dispatch, passes.moe.capacity_factor, passes.moe.chunks),
        Place(shard.plan, shard.min_shard_elements, shard.tower),
        Float8(cast.float8, cast.float8_skip, cast.float8_min_size, cast.float8_head),
        Shard(
            shard.sequence_parallel,
            shard.strict,
            DTYPES[cast.reduce_dtype],
            context.method,
            context.skip_steps,
            request.balance,
        ),
        *((Assign(schedule.stages, passes.pipeline.stages),) if schedule else ()),
    )


def communication_passes(request: CompileRequest) -> Passes:
    """Return the passes from reshard operators to collectives in the order in which they run."""
    communication = request.passes.communication
    turns: Passes = (TakeTurns(),) if request.at_once > 1 else ()
    overlap = Overlap(communication.prefetch, request.balance)
    return Bucket(communication.bucket_mib), Collectives(), Communicators(), *turns, overlap


def evaluation_rows(request: CompileRequest) -> tuple[ProgramPlan, ...]:
    """Return the row of evaluation, if requested: the forward without a backward, or the forward of each stage."""
    _, collectives, _, *ordered = communication_passes(request)
    finish = (collectives, *ordered, Segment(request.passes.segment.max_nodes))
    if not request.evaluate:
        return ()
    if request.mesh["pp"] == 1:
        return (ProgramPlan(EVALUATE, FORWARD, finish, purpose="evaluation"),)
    return (ProgramPlan(EVALUATE, FORWARD, (), cut=cut_evaluation, finish=finish, purpose="evaluation"),)


def cut_evaluation(forward: Program) -> dict[str, Program]:
    """Return the forward of each pipeline stage as a program of evaluation."""
    return {f"{EVALUATE}.{task}": program for task, program in cut(without_unread_state(forward)).items()}


def training_rows(request: CompileRequest) -> tuple[ProgramPlan, ...]:
    """Return the rows of a training step.

    step                                one microbatch: everything in one program
    accumulate, apply                   several: one program run for each of them, one for the update
    gather, accumulate, apply           parameters are gathered once a step
    A0 F0 B0 ... G0 R0 U0 ...           pipeline stages: tasks cut from `microbatch` and the `update` of each rank
    """
    passes, pp = request.passes, request.mesh["pp"]
    optimize, segment = build_optimize(request), Segment(passes.segment.max_nodes)
    finish = communication_passes(request)
    joint: Passes = (Joint(), Simplify(), CSE(), Reassociate())
    if request.microbatches // request.at_once == pp == 1:
        finishing = with_async_tp(request, (optimize, *finish))
        return (ProgramPlan("step", FORWARD, (*joint, build_remat(request, finishing), *finishing, segment)),)
    joint += (Defer(),) if once(passes.accumulate.reduce, pp) else ()
    shared = ProgramPlan("joint", FORWARD, joint, shared=True)
    sum_dtype = DTYPES[passes.accumulate.dtype]
    accumulation = Accumulate(request.skip_nonfinite, sum_dtype)
    apply = ApplyOnly(reduce_dtype=DTYPES[passes.cast.reduce_dtype], dtype=sum_dtype)
    if pp > 1 or once(passes.accumulate.gather, pp):
        return shared, *cut_rows(request, accumulation, apply, optimize, finish)
    finishing = with_async_tp(request, (accumulation, *finish))
    remat = build_remat(request, finishing, optimize.state_bytes)
    accumulate = ProgramPlan("accumulate", "joint", (remat, *finishing, segment))
    return shared, accumulate, ProgramPlan("apply", "joint", (apply, optimize, *finish, segment))


def cut_rows(
    request: CompileRequest, total: Accumulate, apply: ApplyOnly, optimize: Optimize, finish: Passes
) -> tuple[ProgramPlan, ...]:
    """Return the rows of programs that are cut from a microbatch, and of the update."""
    schedule, gathers = request.schedule(), once(request.passes.accumulate.gather, request.mesh["pp"])
    rings = build_async_tp(request, (total, *finish))
    remat = replace(build_remat(request, (*rings, total)), gathers_once=gathers)
    row = partial(ProgramPlan, source="joint", finish=(*finish, Segment(request.passes.segment.max_nodes)))
    microbatch = partial(row, "microbatch", passes=(remat, *rings, total))
    if schedule is None:
        return microbatch(cut=cut_gathers), row("apply", passes=(apply, optimize))
    updates = (
        row(
            f"update{rank}",
            passes=(
                replace(apply, rank=rank, rank_of=schedule.rank_of),
                replace(optimize, rank=rank, ranks=schedule.ranks),
            ),
            cut=partial(cut_update_named, rank),
        )
        for rank in range(schedule.ranks)
    )
    return microbatch(cut=lambda program: named(cut(program, schedule.is_split, gathers))), *updates


def cut_update_named(rank: int, program: Program) -> dict[str, Program]:
    """Return the tasks of a pipeline rank's update by name."""
    return named(cut_update(program, rank))


def named(tasks: Mapping[Task, Program]) -> dict[str, Program]:
    """Return programs by the names of their tasks."""
    return {str(task): program for task, program in tasks.items()}


def in_eval_mode(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with evaluation made from the model captured in eval mode."""
    name = f"{FORWARD}_eval"
    passes = pipeline[FORWARD].passes
    eval_forward = ProgramPlan(name, CAPTURED_IN_EVAL, passes, shared=True, state_of=FORWARD, purpose="evaluation")
    rows = [(eval_forward, replace(row, source=name)) if row.name == EVALUATE else (row,) for row in pipeline.rows]
    return replace(pipeline, rows=tuple(row for group in rows for row in group))


def build_extra(passes: PassesConfig) -> Passes:
    """Return the user's own passes; raise UserError if an object is no pass or changes the stage of a program."""
    steps = []
    for number, options in enumerate(passes.extra):
        step = called(options, where := f"passes.extra[{number}]")
        if not isinstance(step, Pass):
            problem = f"{options['_target_']} returned a {type(step).__name__}"
            raise UserError(where, f"{problem}; return a passes.ir.ir.Pass")
        if problem := what_is_missing(step):
            raise UserError(where, f"{options['_target_']} {problem}")
        if step.gives is not None:
            raise UserError(
                where, f"{step.name} gives a {step.gives} program; leave `gives` out; other passes come next"
            )
        steps.append(step)
    return tuple(steps)


def what_is_missing(step: Pass) -> str:
    """Return the problem with the class attributes of a user's pass, with the fix; empty if there is none."""
    if not isinstance(getattr(step, "name", None), str):
        return 'has no name; add name = "my_pass" to the class'
    takes = getattr(step, "takes", None)
    if not isinstance(takes, tuple | list) or not all(isinstance(stage, Stage) for stage in takes):
        return "takes no stages; add takes = (Stage.CAPTURED,), or other stages, to the class"
    if not isinstance(step.after, tuple | list):
        return f"has after = {step.after!r}; write a tuple of names of passes"
    return ""


def with_extra(pipeline: Pipeline, extra: Passes) -> Pipeline:
    """Return the pipeline with the user's passes, each at the first position of each program whose stage it accepts.

    It does not fold layers, because user passes might treat similar layers differently. Raises UserError if a pass fits
    nowhere in training.
    """
    if not extra:
        return pipeline
    refuse_unknown_names(extra)
    rows: dict[str, ProgramPlan] = {}
    stages, present = {CAPTURED: Stage.CAPTURED}, {CAPTURED: tuple[Pass, ...]()}  # at the end of each program
    placed_in_finish: dict[str, Passes] = {}
    for row in pipeline.rows:
        begin, not_placed = stages[row.source], without(extra, present[row.source])
        later = names_of(row.finish, *(descendant.whole for descendant in pipeline.descendants(row.name)))
        passes, fitting = placed(row.passes, begin, not_placed, later, at_end=not row.finish)
        rows[row.name] = replace(row, passes=passes)
        stages[row.name], present[row.name] = end(passes, begin), (*present[row.source], *fitting)
    for row in [row for row in rows.values() if row.finish]:
        siblings = [other.name for other in rows.values() if other.finish and other.trains == row.trains]
        placed_before = [step for name in siblings for step in present[name]]
        finish, fitting = placed(row.finish, stages[row.name], without(extra, placed_before))
        rows[row.name] = replace(row, finish=finish)
        placed_in_finish[row.name] = fitting
    present |= {name: (*present[name], *fitting) for name, fitting in placed_in_finish.items()}
    trained = [step for row in rows.values() if row.trains for step in present[row.name]]
    if pipeline.trains and (unplaced := without(extra, trained)):
        takes, after = " or ".join(map(str, unplaced[0].takes)), ", ".join(unplaced[0].after) or "nothing"
        raise UserError("passes.extra", f"{unplaced[0].name} takes a {takes} program after {after}: there is none")
    return replace(pipeline, rows=tuple(rows.values()), folding=None)


def refuse_unknown_names(extra: Passes) -> None:
    """Raise UserError if a user's pass names a pass in `after` that does not exist, in this job or another."""
    classes = [kind.name for kind in Pass.__subclasses__() if isinstance(getattr(kind, "name", None), str)]
    known = sorted({*classes, *names_of(extra)})
    for step in extra:
        for name in step.after:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise UserError("passes.extra", f"{step.name} has after = {name!r}, but no pass is called so; {hint}")


def names_of(*passes: Passes) -> list[str]:
    """Return the names of passes."""
    return [step.name for steps in passes for step in steps]


def without(passes: Passes, others: Sequence[Pass]) -> Passes:
    """Return the passes that are not among `others`."""
    return tuple(step for step in passes if step not in others)


def once(when: str, pp: int) -> bool:
    """Return True if an option asks for once a step, not once a microbatch."""
    return when == "step" or when == "auto" and pp > 1


def build_folding(request: CompileRequest) -> Folding | None:
    """Return the layers that may stand for others; None if options treat layers by number, or all of them together."""
    passes, optim, masters = request.passes, request.optim, request.parameter_dtypes
    if request.mesh["pp"] > 1 or request.microbatches > request.at_once and once(passes.accumulate.gather, 1):
        return None
    by_number = passes.remat.policy in ("every_n", "budget") or optim.stochastic_rounding or optim.name == "muon"
    if by_number or passes.verify == "numeric" or not passes.fold_layers or passes.segment.max_nodes is None:
        return None
    remat, prefetch = passes.remat, passes.communication.prefetch
    patterns = (*(passes.shard.plan or ()), *passes.cast.modules, *passes.cast.float8_skip, *remat.modules)
    patterns += tuple(pattern for group in optim.groups.values() for pattern in group.names)
    offloads = "offload" in (remat.policy, *remat.layers.values(), *remat.modules.values(), *remat.ops.values())
    extra_layers = 2 if passes.cast.float8 or offloads else 0  # fetches and maxima are issued layers early
    # Gathers start `prefetch` layers early, gradients are waited for as late, for each axis.
    return Folding(
        lambda name: (
            masters.get(name),
            [p for p in patterns if within(name, p)],
            next((policy for p, policy in remat.layers.items() if within(name, p)), None),
        ),
        before=3 + extra_layers,
        after=2 + extra_layers,
        on_its_way=2 * prefetch,
    )


def build_cast(cast: CastConfig, masters: Mapping[str, torch.dtype]) -> Cast:
    """Return the cast to the precision of a configuration."""
    ops, modules = ({p: DTYPES[d] for p, d in patterns.items()} for patterns in (cast.ops, cast.modules))
    return Cast(masters, ops, modules, DTYPES[cast.output_dtype])


def build_async_tp(request: CompileRequest, following: Passes) -> Passes:
    """Return the pass that overlaps matmuls with rings, if requested; the `following` passes finish its program."""
    choice = request.passes.communication.async_tp
    if choice == "none":
        return ()
    return (AsyncTP(choice, cluster_of(resolve_cluster(request.cluster)) if choice == "auto" else None, following),)


def with_async_tp(request: CompileRequest, following: Passes) -> Passes:
    """Return the passes that finish a program, the overlap of matmuls with rings first."""
    return (*build_async_tp(request, following), *following)


def build_optimize(request: CompileRequest) -> Optimize:
    """Return the update of a configuration."""
    optim, cast = request.optim, request.passes.cast
    default = build_optimizer(optim, DTYPES[cast.param_dtype])
    return Optimize(
        default,
        optim.max_norm,
        DTYPES[cast.reduce_dtype],
        1 / request.microbatches,
        EIGHT_BITS.get(optim.name, optim.state),
        optim.block,
        optim.stochastic_rounding,
        tuple(build_group(label, group, optim, default) for label, group in optim.groups.items()),
        request.skip_nonfinite,
    )


def build_remat(request: CompileRequest, rest: Passes, reserved: Callable[[Program], int] = lambda _: 0) -> Remat:
    """Return the recomputation of a request; the passes `rest` finish its program, `reserved` bytes are outside it."""
    remat = request.passes.remat
    budget_bytes = None if remat.budget_gib is None else int(remat.budget_gib * 2**30)
    return Remat(
        remat.policy,
        remat.regather,
        remat.save,
        remat.every_n,
        budget_bytes,
        remat.headroom,
        remat.layers,
        remat.modules,
        remat.ops,
        rest,
        reserved,
        balance=request.balance,
    )


def build_optimizer(optim: OptimConfig, compute: torch.dtype | None) -> Optimizer:
    """Return the optimizer of a configuration; its own matmuls run in the dtype `compute`."""
    adamw = AdamW(optim.betas, optim.eps, optim.weight_decay)
    if optim._target_ is not None:
        return build_own({"_target_": optim._target_, **optim.arguments})
    if optim.name == "custom":
        raise UserError("optim._target_", "is null with optim=custom; name the optimizer's class or a function")
    if optim.name == "sgd":
        return SGD(optim.momentum, optim.weight_decay)
    if optim.name == "muon":
        return Muon(optim.momentum, optim.weight_decay, compute, adamw)
    return adamw


def build_own(options: Mapping[str, Any]) -> Optimizer:
    """Return the user's own optimizer; raise UserError if a method is missing, or it cannot be hashed."""
    optimizer = called(options, "optim")
    if missing := [name for name in ("moments", "scalars", "update") if not hasattr(optimizer, name)]:
        fix = "docs/guides/your-loop.md shows a complete one"
        raise UserError("optim._target_", f"{options['_target_']} returned an object without `{missing[0]}`; {fix}")
    if type(optimizer).__hash__ is None:  # what passes compute once is looked up by it
        problem = f"{type(optimizer).__name__} cannot be hashed; declare it as @dataclass(frozen=True)"
        raise UserError("optim._target_", problem)
    return optimizer


def build_group(label: str, group: GroupConfig, optim: OptimConfig, default: Optimizer) -> Group:
    """Return a group of parameters: like the default, except for the options that it sets."""
    optimizer = AdamW(optim.betas, optim.eps, optim.weight_decay) if group.optimizer == "adamw" else default
    if group.weight_decay is not None:
        if "weight_decay" not in getattr(optimizer, "__dataclass_fields__", ()):
            problem = f"{type(optimizer).__name__} is no dataclass with a field weight_decay"
            raise UserError(f"optim.groups.{label}.weight_decay", f"{group.weight_decay}, but {problem}; leave it null")
        optimizer = replace(optimizer, weight_decay=group.weight_decay)  # type: ignore[type-var]
        if isinstance(optimizer, Muon):
            optimizer = replace(optimizer, others=replace(optimizer.others, weight_decay=group.weight_decay))
    return Group(optimizer, group.lr, frozenset(group.kinds), group.names, label, group.optimizer is not None)
