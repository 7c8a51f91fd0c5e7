"""Configuration in, passes out: read this page first.

    capture -> cast, intervals, chunk_loss, normalize, token_mean, batch_overlap
            -> sequence_layout, experts, place, float8, shard
            -> joint, simplify, cse, reassociate, remat, async_tp, optimize
            -> bucket, collectives, communicators, take_turns, overlap, segment -> lower

`forward` ends in the program that every rank runs to get the loss. Training goes on from there: with one
microbatch as one `step` program, with several as `accumulate`, run once a microbatch, and `apply`.
`async_tp`, `batch_overlap` and `take_turns` are there where asked for. `bucket` comes after `optimize` because the
reductions of replicated gradients appear only there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from compiler_trainer.config.cluster import AUTO_CLUSTER, ClusterConfig
from compiler_trainer.config.clusters import balance_of, cluster_of
from compiler_trainer.config.device import described
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import (
    EIGHT_BITS,
    CastConfig,
    GroupConfig,
    OptimConfig,
    PassesConfig,
    RematConfig,
)
from compiler_trainer.config.tables import build_table
from compiler_trainer.config.targets import called, import_rules
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
from passes.context.intervals import Intervals
from passes.context.sequence_layout import SequenceLayout
from passes.lower.segment import Segment
from passes.lower.unfold import Unfold
from passes.memory.chunk_loss import ChunkLoss
from passes.memory.remat import Remat
from passes.pipeline.assign import Assign
from passes.pipeline.tables import Table
from passes.precision.cast import Cast
from passes.precision.float8 import Float8
from passes.program.folds import Folding
from passes.program.ir import Pass, Program
from passes.program.layer import within
from passes.program.machine import Balance
from passes.program.placing import end, placed
from passes.program.stages import Stage
from passes.sharding.collectives import Collectives
from passes.sharding.experts import Experts
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place
from passes.sharding.shard import Shard
from passes.update.accumulate import Accumulate, ApplyOnly
from passes.update.defer import Defer
from passes.update.groups import Group
from passes.update.muon import Muon
from passes.update.optimize import Optimize
from passes.update.optimizers import SGD, AdamW, Optimizer
from passes.update.token_mean import TokenMean

Passes = tuple[Pass, ...]
DTYPES: dict[str | None, Any] = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Pipeline:
    """The passes of each program; `train` maps a program's name to its passes, run in order within a step.

    Several programs begin with what `joint` makes of the forward. With `folding`, of many layers alike one stands for
    others until `unfold`. With `staged` the programs are cut from one, and `train` is empty.
    """

    forward: Passes
    evaluate: Passes
    train: Mapping[str, Passes]
    joint: Passes = ()
    folding: Folding | None = None
    unfold: Unfold = Unfold()
    staged: Staged | None = None
    trains: bool = True

    def branches(self) -> dict[str, Passes]:
        """The passes of each program of a step, from the forward on."""
        return {name: (*self.joint, *steps) for name, steps in self.train.items()}


@dataclass(frozen=True)
class Staged:
    """Passes of programs that are cut from one, from their joint program on: `whole` up to the cut.

    They are the tasks of pipeline stages that a `table` has, and with `gathers` those of the gathers of parameters.
    `finish` is for each, `update(rank)` for the update of a pipeline rank.
    """

    table: Table | None
    whole: Passes
    finish: Passes
    update: Callable[[int], Passes]
    gathers: bool


def build_pipeline(
    passes: PassesConfig,
    optim: OptimConfig,
    masters: Mapping[str, torch.dtype],
    microbatches: int,
    skip_nonfinite: bool = False,
    pp: int = 1,
    cluster: ClusterConfig = AUTO_CLUSTER,
) -> Pipeline:
    """The passes that a configuration asks for; `masters` are the dtypes of the stored parameters.

    What a pass decides by time, it decides on the `cluster`.
    Raises UserError where a pass of one's own has no place among them, or microbatches cannot be taken at once.
    """
    import_rules(passes.rules)
    check_at_once(passes.communication.batch_overlap, microbatches, pp)
    return with_extra(built_in(passes, optim, masters, microbatches, skip_nonfinite, pp, cluster), build_extra(passes))


def check_at_once(at_once: int, microbatches: int, pp: int) -> None:
    """Raises UserError where microbatches cannot be computed so many at once."""
    if microbatches % at_once:
        fix = "make train.microbatches a multiple of it"
        raise UserError("passes.communication.batch_overlap", f"is {at_once}, of {microbatches} microbatches; {fix}")
    if at_once > 1 and pp > 1:
        what = f"is {at_once} with mesh.pp={pp}, whose stages take microbatches one by one; set it to 1"
        raise UserError("passes.communication.batch_overlap", what)


def built_in(
    passes: PassesConfig,
    optim: OptimConfig,
    masters: Mapping[str, torch.dtype],
    microbatches: int,
    skip_nonfinite: bool,
    pp: int,
    cluster: ClusterConfig,
) -> Pipeline:
    """Those of them that are our own."""
    reduce_dtype = DTYPES[passes.cast.reduce_dtype]
    balance = balance_of(described(cluster), passes.cast.param_dtype)
    links = Balance(balance.gpus_per_node, outside=balance.outside)  # methods were measured with its other figure
    cast, shard, context, remat = passes.cast, passes.shard, passes.context, passes.remat
    table = build_table(passes.pipeline, pp, microbatches)
    together = passes.communication.batch_overlap
    forward: Passes = (
        build_cast(cast, masters),
        Intervals(),
        ChunkLoss(passes.chunk_loss.chunks, passes.chunk_loss.logits_mib),
        Normalize(),
        *of_microbatches(microbatches, together),
        SequenceLayout(context.load_balance, context.block),
        Experts(passes.moe.dispatch, passes.moe.capacity_factor, passes.moe.chunks),
        Place(shard.plan, shard.min_shard_elements),
        Float8(cast.float8, cast.float8_skip, cast.float8_min_size, cast.float8_head),
        Shard(shard.sequence_parallel, shard.strict, reduce_dtype, context.method, context.skip_steps, links),
        *((Assign(table.stages, passes.pipeline.stages),) if pp > 1 else ()),
    )
    how = (EIGHT_BITS.get(optim.name, optim.state), optim.block, optim.stochastic_rounding)
    rest = build_optimizer(optim, DTYPES[cast.param_dtype])
    groups = tuple(build_group(label, group, optim, rest) for label, group in optim.groups.items())
    optimize = Optimize(rest, optim.max_norm, reduce_dtype, 1 / microbatches, *how, groups, skip_nonfinite)
    overlap, segment = Overlap(passes.communication.prefetch, balance), Segment(passes.segment.max_nodes)
    turns: Passes = (TakeTurns(),) if together > 1 else ()
    finish = (Bucket(passes.communication.bucket_mib), Collectives(), Communicators(), *turns, overlap)
    evaluate = (Collectives(), *turns, overlap, segment)
    joint: Passes = (Joint(), Simplify(), CSE(), Reassociate())
    if microbatches // together == pp == 1:
        then = with_async_tp(passes, cluster, (optimize, *finish))
        step = (*joint, build_remat(remat, then), *then, segment)
        return Pipeline(forward, evaluate, {"step": step}, folding=build_folding(passes, optim, masters))
    joint += (Defer(),) if once(passes.accumulate.reduce, pp) else ()
    gathers = once(passes.accumulate.gather, pp)
    added_in = DTYPES[passes.accumulate.dtype]
    total, apply = Accumulate(skip_nonfinite, added_in), ApplyOnly(reduce_dtype=reduce_dtype, dtype=added_in)
    if pp > 1 or gathers:

        def update(rank: int) -> Passes:
            own = replace(apply, rank=rank, rank_of=table.rank_of) if pp > 1 else apply
            return own, replace(optimize, rank=rank, ranks=pp)

        rings = build_async_tp(passes, cluster, (total, *finish))
        whole = (replace(build_remat(remat, (*rings, total)), gathers_once=gathers), *rings, total)
        staged = Staged(table if pp > 1 else None, whole, (*finish, segment), update, gathers)
        return Pipeline(forward, evaluate, {}, joint, staged=staged)
    then = with_async_tp(passes, cluster, (total, *finish))
    train = {
        "accumulate": (build_remat(remat, then, optimize.state_bytes), *then, segment),
        "apply": (apply, optimize, *finish, segment),
    }
    return Pipeline(forward, evaluate, train, joint, build_folding(passes, optim, masters))


def of_microbatches(count: int, at_once: int) -> Passes:
    """What makes of a microbatch one of so many, of which some are computed at once."""
    means: Passes = (TokenMean(count),) if count > 1 else ()
    return (*means, BatchOverlap(at_once)) if at_once > 1 else means


def build_extra(passes: PassesConfig) -> Passes:
    """The passes of one's own; raises UserError where one is none, or changes the stage of a program."""
    found = []
    for number, own in enumerate(passes.extra):
        step = called(own, where := f"passes.extra[{number}]")
        if not isinstance(step, Pass):
            raise UserError(where, f"{own['_target_']} makes a {type(step).__name__}, no passes.program.ir.Pass")
        if step.gives is not None:
            raise UserError(where, f"{step.name} gives a {step.gives} program; leave `gives` out, for others come next")
        found.append(step)
    return tuple(found)


def with_extra(pipeline: Pipeline, extra: Passes) -> Pipeline:
    """A pipeline with passes of one's own, each where its stage first is; raises UserError where that is nowhere.

    All layers are there then: no other pass is known to treat those alike that are alike.
    """
    if not extra:
        return pipeline
    own, staged = pipeline.joint, pipeline.staged
    ways = {"whole": staged.whole, "update": staged.update(0), "finish": staged.finish} if staged else pipeline.train
    last = names_of(*ways.values())
    forward, in_forward = placed(pipeline.forward, Stage.CAPTURED, extra, [*names_of(own), *last])
    local, rest = end(forward, Stage.CAPTURED), without(extra, in_forward)
    evaluate, in_evaluation = placed(pipeline.evaluate, local, rest)
    joint, in_joint = placed(own, local, rest, last) if own else (own, ())
    begin, rest = end(joint, local), without(rest, in_joint)
    made = {name: placed(steps, begin, rest) for name, steps in pipeline.train.items()}
    if staged:
        staged, in_stages = staged_with(staged, begin, rest)
        made["stages"] = (), in_stages
    found = [step for _, fit in made.values() for step in fit]
    if lost := without(without(rest, in_evaluation), found):
        takes, after = " or ".join(map(str, lost[0].takes)), ", ".join(lost[0].after) or "nothing"
        raise UserError("passes.extra", f"{lost[0].name} takes a {takes} program after {after}: there is none")
    train = {name: made[name][0] for name in pipeline.train}
    made_with = replace(pipeline, forward=forward, evaluate=evaluate, joint=joint, train=train)
    return replace(made_with, staged=staged, folding=None)


def staged_with(staged: Staged, begin: Stage, extra: Passes) -> tuple[Staged, Passes]:
    """Passes of stages with those of one's own that fit, and these: where a cut begins, they come after it."""
    later = names_of(staged.finish)

    def update(rank: int) -> tuple[Passes, Passes]:
        return placed(staged.update(rank), begin, extra, later, at_end=False)

    whole, in_whole = placed(staged.whole, begin, extra, later, at_end=False)
    found = (*in_whole, *update(0)[1])
    finish, in_finish = placed(staged.finish, Stage.STEP, without(extra, found))
    return replace(staged, whole=whole, finish=finish, update=lambda rank: update(rank)[0]), (*found, *in_finish)


def names_of(*passes: Passes) -> list[str]:
    """The names of passes."""
    return [step.name for steps in passes for step in steps]


def without(passes: Passes, others: Sequence[Pass]) -> Passes:
    """Passes but for some."""
    return tuple(step for step in passes if step not in others)


def once(when: str, pp: int) -> bool:
    """Whether something is done once a step, not for each microbatch."""
    return when == "step" or when == "auto" and pp > 1


def build_folding(passes: PassesConfig, optim: OptimConfig, masters: Mapping[str, torch.dtype]) -> Folding | None:
    """Which layers may stand for others; None where options treat them by their number, or all at once."""
    by_number = passes.remat.policy in ("every_n", "budget") or optim.stochastic_rounding or optim.name == "muon"
    if by_number or passes.verify == "numeric" or not passes.fold_layers or passes.segment.max_nodes is None:
        return None
    remat, prefetch = passes.remat, passes.communication.prefetch
    patterns = (*(passes.shard.plan or ()), *passes.cast.modules, *passes.cast.float8_skip, *remat.modules)
    patterns += tuple(pattern for group in optim.groups.values() for pattern in group.names)
    offloads = "offload" in (remat.policy, *remat.layers.values(), *remat.modules.values(), *remat.ops.values())
    further = 2 if passes.cast.float8 or offloads else 0  # what is fetched comes early, as maxima do
    # Gathers start `prefetch` layers early, gradients are waited for as late, for each axis.
    return Folding(
        lambda name: (
            masters.get(name),
            [p for p in patterns if within(name, p)],
            next((policy for p, policy in remat.layers.items() if within(name, p)), None),
        ),
        before=3 + further,
        after=2 + further,
        on_its_way=2 * prefetch,
    )


def build_cast(cast: CastConfig, masters: Mapping[str, torch.dtype]) -> Cast:
    """The precision that a configuration asks for."""
    ops, modules = ({p: DTYPES[d] for p, d in patterns.items()} for patterns in (cast.ops, cast.modules))
    return Cast(masters, ops, modules, DTYPES[cast.output_dtype])


def build_async_tp(passes: PassesConfig, cluster: ClusterConfig, following: Passes) -> Passes:
    """The pass that puts products beside rings, if it is asked for; `following` passes finish its program."""
    choice = passes.communication.async_tp
    if choice == "none":
        return ()
    return (AsyncTP(choice, cluster_of(described(cluster)) if choice == "auto" else None, following),)


def with_async_tp(passes: PassesConfig, cluster: ClusterConfig, following: Passes) -> Passes:
    """Passes that finish a program, from products beside rings on."""
    return (*build_async_tp(passes, cluster, following), *following)


def build_remat(remat: RematConfig, rest: Passes, reserved: Callable[[Program], int] = lambda _: 0) -> Remat:
    """The recomputation that a configuration asks for; `rest` finish its program, `reserved` bytes lie beside it."""
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
    )


def build_optimizer(optim: OptimConfig, compute: torch.dtype | None) -> Optimizer:
    """The optimizer of a configuration; products of its own are made in the dtype `compute`."""
    if optim._target_ is not None:
        return build_own({"_target_": optim._target_, **optim.arguments})
    if optim.name == "custom":
        raise UserError("optim._target_", "is null with optim=custom; name what makes the optimizer")
    if optim.name == "sgd":
        return SGD(optim.momentum, optim.weight_decay)
    if optim.name == "muon":
        return Muon(optim.momentum, optim.weight_decay, compute)
    return AdamW(optim.betas, optim.eps, optim.weight_decay)


def build_own(own: Mapping[str, Any]) -> Optimizer:
    """An optimizer of one's own; raises UserError where it is none."""
    found = called(own, "optim")
    if missing := [name for name in ("moments", "scalars", "update") if not hasattr(found, name)]:
        fix = "docs/guides/your-loop.md shows a whole one"
        raise UserError("optim._target_", f"{own['_target_']} makes what has no `{missing[0]}`; {fix}")
    return found


def build_group(label: str, group: GroupConfig, optim: OptimConfig, rest: Optimizer) -> Group:
    """A group of parameters: as the rest, but for what it says."""
    mine = AdamW(optim.betas, optim.eps, optim.weight_decay) if group.optimizer == "adamw" else rest
    if group.weight_decay is not None:
        if "weight_decay" not in getattr(mine, "__dataclass_fields__", ()):
            what = f"{type(mine).__name__} is no dataclass with a field weight_decay"
            raise UserError(f"optim.groups.{label}.weight_decay", f"{group.weight_decay}, but {what}; leave it null")
        mine = replace(mine, weight_decay=group.weight_decay)  # type: ignore[type-var]
    return Group(mine, group.lr, frozenset(group.kinds), group.names, label)
