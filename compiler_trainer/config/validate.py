"""Checks of options against each other, and the number of ranks of each axis."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import is_remote
from compiler_trainer.config.options import is_time
from compiler_trainer.config.schema import (
    EIGHT_BITS,
    LONGEST,
    PLAIN_HEADS,
    STREAM_WINDOW,
    Config,
    DataConfig,
    DistillationConfig,
    EmbedConfig,
    ExpertsConfig,
    FolderConfig,
    GrpoConfig,
    HeadLossConfig,
    MeshConfig,
    ModelConfig,
    RewardConfig,
    SourceConfig,
    open_axes,
    with_steps,
)
from passes.ir.mesh import MeshError, spread_experts

Checks = tuple[tuple[str, Callable[[Any], bool], str], ...]
LONG = 200  # characters of a path in an error
TEXTS = {"classes", "passages", "triplets"}  # records that are no conversations
STREAMS = {"text", "hf_dataset", "stdlib", "synthetic"}  # data that can be streamed
CONVERSATIONS = {"text", "hf_dataset", "tokens", "prompts"}  # data that may be conversations
READ_BY = {  # options of a source, and the data that read them
    "document_separator": ("text",),
    "text_column": ("text", "hf_dataset"),
    "configuration": ("hf_dataset",),
    "split": ("hf_dataset",),
    "documents": ("synthetic",),
}


def with_experts(holds: Callable[[ExpertsConfig], bool]) -> Callable[[Any], bool]:
    """Return a check of a model's experts that holds if the model has none."""
    return lambda cfg: cfg.model.experts is None or holds(cfg.model.experts)


def with_folder(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check of a job that holds if its model is no folder."""
    return lambda cfg: not isinstance(cfg.model, FolderConfig) or holds(cfg)


def evaluates_at_checkpoints(cfg: Config) -> bool:
    """Return True if every checkpoint has a validation loss."""
    saves, evaluates = cfg.checkpoint.interval, cfg.eval.interval
    return saves is not None and evaluates is not None and saves % evaluates == 0


def names(sources: tuple[SourceConfig, ...]) -> set[str]:
    """Return the kinds of the sources."""
    return {source.name for source in sources}


# The option at fault, the condition, the message if it does not hold.
DECODER_CHECKS: Checks = (
    (
        "model.n_heads",
        lambda c: bool(c.model.head_dim or c.model.latent) or c.model.dim % (2 * c.model.n_heads) == 0,
        "{c.model.n_heads} heads do not split model.dim={c.model.dim} into equal heads of even size; change either, or "
        "set model.head_dim",
    ),
    (
        "model.head_dim",
        lambda c: c.model.head_dim is None or c.model.head_dim % 2 == 0,
        "{c.model.head_dim} is odd, and features rotate in pairs; use an even number",
    ),
    (
        "model.rope_scaling.low_freq_factor",
        lambda c: c.model.rope_scaling is None
        or c.model.rope_scaling.low_freq_factor <= c.model.rope_scaling.high_freq_factor,
        "{c.model.rope_scaling.low_freq_factor} must be at most "
        "model.rope_scaling.high_freq_factor={c.model.rope_scaling.high_freq_factor}; change either",
    ),
    (
        "model.n_kv_heads",
        lambda c: c.model.n_heads % c.model.n_kv_heads == 0,
        "{c.model.n_kv_heads} does not divide model.n_heads={c.model.n_heads}; use one of its divisors",
    ),
    (
        "model.latent.rope_dim",
        lambda c: c.model.latent is None or c.model.latent.rope_dim % 2 == 0,
        "{c.model.latent.rope_dim} is odd, and features rotate in pairs; use an even number",
    ),
    (
        "model.latent",
        lambda c: c.model.latent is None or c.model.n_kv_heads == c.model.n_heads,
        "gives every head its own keys and values, so model.n_kv_heads={c.model.n_kv_heads} has no effect; set it to "
        "model.n_heads={c.model.n_heads}",
    ),
    (
        "model.latent",
        lambda c: c.model.latent is None or (c.model.head_dim, c.model.qk_norm, c.model.nope_every) == PLAIN_HEADS,
        "gives heads their sizes and norms; leave model.head_dim and model.nope_every null and model.qk_norm none",
    ),
    (
        "model.experts.balance_loss",
        lambda c: not (c.has_preference_loss or c.has_rollouts) or with_experts(lambda e: not e.balance_loss)(c),
        "{c.model.experts.balance_loss} is not part of loss={c.loss.name}; set it to 0",
    ),
    (
        "model.mtp",
        lambda c: c.model.mtp is None or not c.loss,
        "predicts further tokens, which only the default loss does, next-token cross-entropy; leave out either",
    ),
    (
        "model.experts.groups",
        with_experts(lambda e: e.groups == 1 or (e.count % e.groups == 0 and e.count // e.groups >= 2)),
        "{c.model.experts.groups} do not split model.experts.count={c.model.experts.count} into equal groups of two or "
        "more; change either",
    ),
    (
        "model.experts.top_groups",
        with_experts(lambda e: e.top_groups <= e.groups),
        "{c.model.experts.top_groups} is more than model.experts.groups={c.model.experts.groups}; change either",
    ),
    (
        "model.experts.top_k",
        with_experts(lambda e: e.top_k <= e.top_groups * (e.count // e.groups)),
        "{c.model.experts.top_k} is more than the experts to choose from: model.experts.count={c.model.experts.count}, "
        "in {c.model.experts.top_groups} of {c.model.experts.groups} groups; change either",
    ),
    (
        "model.experts.normalize",
        with_experts(lambda e: e.top_k > 1 or not e.normalize),
        "with model.experts.top_k=1 makes every weight 1, and the router learns nothing; set it to false",
    ),
    (
        "model.experts.dense_layers",
        lambda c: with_experts(lambda e: any(map(e.are_in, range(c.model.n_layers))))(c),
        "{c.model.experts.dense_layers} and model.experts.every={c.model.experts.every} leave no layer with experts in "
        "model.n_layers={c.model.n_layers}; change one of them",
    ),
)

ROLLOUT_CHECKS: Checks = (
    (
        "data.prompts",
        lambda c: bool(c.data.prompts) == (c.data.name == "prompts"),
        "{c.data.prompts} with data={c.data.name}; data=prompts needs some, as data.prompts=[a.jsonl], other none",
    ),
    (
        "loss",
        lambda c: c.has_rollouts == (c.data.name == "prompts"),
        "{c.loss_name} with data={c.data.name}; grpo and gkd go with data=prompts, other losses with other data",
    ),
    (
        "rewards",
        lambda c: bool(c.rewards) == isinstance(c.loss, GrpoConfig),
        "{c.rewards} with loss={c.loss_name}; loss=grpo needs functions of (records, answers), as "
        "rewards=[my.rewards.correct], other losses none",
    ),
    (
        "train.global_batch_size",
        lambda c: not c.has_rollouts or c.train.global_batch_size % c.loss.group_size == 0,
        "{c.train.global_batch_size} answers are not groups of loss.group_size={c.loss.group_size}; use a multiple",
    ),
    (
        "loss.answer_tokens",
        lambda c: not c.has_rollouts or c.loss.answer_tokens < c.train.seq_len,
        "{c.loss.answer_tokens} leaves no room for a prompt in train.seq_len={c.train.seq_len}; change either",
    ),
    (
        "checkpoint.interval",
        lambda c: (c.checkpoint.interval or 0) % c.steps_per_rollout == 0,
        "{c.checkpoint.interval} is not a multiple of loss.steps_per_rollout={c.loss.steps_per_rollout}, so that a run "
        "would resume within a rollout; change either",
    ),
    (
        "train.steps",
        lambda c: c.train.steps == LONGEST or c.train.steps % c.steps_per_rollout == 0,
        "{c.train.steps} is not a multiple of loss.steps_per_rollout={c.loss.steps_per_rollout}; change either",
    ),
    (
        "data.eval_fraction",
        lambda c: not c.has_rollouts or c.data.eval_fraction == 0 and not c.data.validation,
        "{c.data.eval_fraction} (or data.validation); loss={c.loss_name} has no validation loss: set it to 0",
    ),
    (
        "data.bad_records",
        lambda c: not c.has_rollouts or c.data.bad_records == "stop",
        "{c.data.bad_records} with data=prompts, all of which must be usable; remove bad ones from the files",
    ),
    (
        "data.pairs",
        lambda c: not c.has_rollouts or not c.data.pairs,
        "true with loss={c.loss_name}, which has prompts without answers; set it to false",
    ),
    (
        "run.elastic",
        lambda c: not c.has_rollouts or not c.run.elastic,
        "true with loss={c.loss_name}, which does not go on without a rank; set it to false",
    ),
)

DISTILL_CHECKS: Checks = (
    (
        "loss.teacher",
        lambda c: not isinstance(c.loss, DistillationConfig) or bool(c.loss.teacher),
        "names no model; give the folder of a larger model, as loss.teacher=Qwen/Qwen3-8B",
    ),
    (
        "loss.name",
        lambda c: not isinstance(c.loss, DistillationConfig) or isinstance(c.model, FolderConfig),
        "{c.loss_name} compares a model of transformers with its teacher; set model=hf model.path=FOLDER",
    ),
    (
        "data.pairs",
        lambda c: not isinstance(c.loss, DistillationConfig) or not c.data.pairs,
        "true with loss={c.loss_name}, which compares no answers; set it to false",
    ),
)

HEAD_CHECKS: Checks = (
    (
        "loss.name",
        lambda c: not isinstance(c.loss, HeadLossConfig) or isinstance(c.model, FolderConfig),
        "{c.loss.name} puts a head on a model of transformers; set model=hf model.path=FOLDER",
    ),
    (
        "model.head",
        lambda c: not isinstance(c.loss, HeadLossConfig) or c.head == c.loss.head,
        "{c.head} with loss={c.loss.name}, which needs model.head={c.loss.head}, as recipe={c.loss.name} has",
    ),
    (
        "model.head",
        lambda c: c.head == "lm" or c.has_own_loss or isinstance(c.loss, HeadLossConfig),
        "{c.head} has no next tokens to learn; set loss=reward (or classify, embed), your own loss, or model.head=lm",
    ),
    (
        "data.records",
        lambda c: c.has_own_loss or c.data.records in c.records,
        "{c.data.records} with loss={c.loss_name}, which needs {c.records[0]}, as its recipe has",
    ),
    (
        "train.microbatches",
        lambda c: not isinstance(c.loss, EmbedConfig) or c.train.microbatches == 1,
        "{c.train.microbatches} with loss=embed: passages of other microbatches would be no negatives; set it to 1",
    ),
    (
        "passes.communication.batch_overlap",
        lambda c: not isinstance(c.loss, EmbedConfig) or c.passes.communication.batch_overlap == 1,
        "{c.passes.communication.batch_overlap} with loss=embed, whose negatives are those of the batch; set it to 1",
    ),
    (
        "data.records",
        lambda c: c.data.records == "documents" or not c.data.pairs,
        "{c.data.records} with data.pairs=true, whose records are pairs; set one of them",
    ),
    (
        "data.records",
        lambda c: c.data.records not in TEXTS or not c.data.chat,
        "{c.data.records} are texts, not conversations; set data.chat=false",
    ),
    (
        "data.records",
        lambda c: c.data.records != "answers" or c.data.chat,
        "answers are those of conversations; set data.chat=true",
    ),
    (
        "loss.nll_weight",
        lambda c: c.data.records != "answers" or c.has_own_loss or not c.loss.nll_weight,
        "{c.loss.nll_weight} with data.records=answers, none of which is preferred to another; set it to 0",
    ),
    (
        "data.records",
        lambda c: c.data.records == "documents" or names((*c.data.read, *c.data.validation)) <= CONVERSATIONS,
        "{c.data.records} come from data=text, hf_dataset or tokens; name files, as data=text data.files=[a.jsonl]",
    ),
    (
        "data.labels",
        lambda c: bool(c.data.labels) == (c.data.records == "classes"),
        "{c.data.labels} with data.records={c.data.records}; classes need names, as data.labels=[negative,positive], "
        "other records none",
    ),
    (
        "data.labels",
        lambda c: not c.data.labels or len({*c.data.labels}) == len(c.data.labels) > 1,
        "{c.data.labels} are not several different names; name each class once",
    ),
    (
        "data.margins",
        lambda c: not c.data.margins or c.data.pairs and (c.has_own_loss or isinstance(c.loss, RewardConfig)),
        "true with loss={c.loss_name}, which takes no margin; set loss=reward with data.pairs=true, or false",
    ),
    (
        "eval.prompts",
        lambda c: not c.eval.prompts or c.head == "lm",
        "are continued, and a model with model.head={c.head} writes nothing; leave them out",
    ),
)

CHECKS: Checks = (
    ("run.dir", lambda c: c.run.dir.strip() != "", "is empty; name a folder, . for this one"),
    ("checkpoint.dir", lambda c: c.checkpoint.dir is None or c.checkpoint.dir.strip() != "", "is empty; name a folder"),
    ("run.dir", lambda c: not is_remote(c.run.dir), "{c.run.dir} is in a store; name a folder on this machine"),
    (
        "checkpoint.dir",
        lambda c: not is_remote(c.checkpoint.dir or ""),
        "{c.checkpoint.dir} is in a store; checkpoints are written to disk, and copied with "
        "checkpoint.store={c.checkpoint.dir}",
    ),
    (
        "checkpoint.store",
        lambda c: c.checkpoint.store is None or is_remote(c.checkpoint.store),
        "{c.checkpoint.store} is not a URL; name a folder of a store, as s3://bucket/runs/a, or one on disk with "
        "checkpoint.dir",
    ),
    (
        "data.sources",
        lambda c: bool(c.data.sources) == (c.data.name == "mixture")
        and not {"mixture", "prompts"} & names(c.data.listed[1:]),
        "{c.data.sources} with data={c.data.name}; sources go with data=mixture, which needs some; none is a mixture, "
        "or prompts",
    ),
    (
        "data.files",
        lambda c: all(bool(s.files) or s.name != "text" for s in c.data.listed),
        "is empty; data=text needs files, folders or patterns, as data.files=[a.txt,books]; the same holds for sources",
    ),
    (
        "data.files",
        lambda c: all(not s.files or s.name == "text" for s in c.data.listed),
        "go with data=text, not data={c.data.name}; set data=text, too; the same holds for sources",
    ),
    (
        "data.path",
        lambda c: all(bool(s.path) == (s.name == "hf_dataset") for s in c.data.listed),
        "goes with data=hf_dataset, which needs one; check data.name, data.path and data.sources",
    ),
    (
        "data._target_",
        lambda c: all((s._target_ is not None) == (s.name == "custom") for s in c.data.listed),
        "goes with data=custom, which needs one; the same holds for sources",
    ),
    (
        "data.tokens",
        lambda c: all((s.tokens is not None) == (s.name == "tokens") for s in c.data.listed),
        "{c.data.tokens} with data={c.data.name}; it goes with data=tokens, which needs it; the same holds for sources",
    ),
    (
        "data.chat",
        lambda c: not c.data.chat or names((*c.data.read, *c.data.validation)) <= CONVERSATIONS,
        "conversations come from data=text, hf_dataset, tokens or prompts; set it to false",
    ),
    (
        "data.chat",
        lambda c: not c.data.chat or c.data.tokenizer != "bytes",
        "needs a tokenizer with a chat template; set data.tokenizer to a tokenizer.json",
    ),
    (
        "data.add_bos_token",
        lambda c: not c.data.chat or c.data.add_bos_token is None,
        "is {c.data.add_bos_token} with data.chat=true, and the chat template writes the bos_token; leave it null",
    ),
    (
        "data.images_per_row",
        lambda c: not c.data.images_per_row or c.takes_images,
        "{c.data.images_per_row} is for a folder's vision-language model, conversations and the default loss: "
        "set model.path, data=text or hf_dataset, data.chat=true, data.packing=auto, and neither data.pairs nor loss",
    ),
    (
        "data.image_size",
        lambda c: c.data.image_size is None or c.data.images_per_row > 0,
        "goes with data.images_per_row; set it to null",
    ),
    (
        "data.image_tokens_per_row",
        lambda c: c.data.image_tokens_per_row is None or c.data.images_per_row > 0,
        "goes with data.images_per_row; set it to null",
    ),
    (
        "data.image_tokens_per_row",
        lambda c: (c.data.image_tokens_per_row or 0) <= c.train.seq_len,
        "is {c.data.image_tokens_per_row}, and a sequence has {c.train.seq_len} tokens (train.seq_len); lower it",
    ),
    (
        "data.pairs",
        lambda c: not c.data.pairs or c.data.chat,
        "are conversations; set data.chat=true, too",
    ),
    (
        "data.train_on",
        lambda c: c.data.train_on == "all" or c.data.chat,
        "{c.data.train_on} with data.chat=false, and only conversations have answers; set data.chat=true",
    ),
    (
        "data.pairs",
        lambda c: not c.data.pairs or bool(c.loss),
        "need a loss that compares two answers: set loss=dpo (or ipo, simpo, orpo, cpo, kto, reward), or your own loss",
    ),
    (
        "loss.name",
        lambda c: not c.compares_pairs or c.data.pairs or c.data.records == "answers",
        "{c.loss.name} compares two answers; set data.pairs=true, data.chat=true",
    ),
    *ROLLOUT_CHECKS,
    *DISTILL_CHECKS,
    *HEAD_CHECKS,
    (
        "data.packing",
        lambda c: c.data.packing == "auto" or names((*c.data.read, *c.data.validation)) != {"custom"},
        "{c.data.packing} with data=custom, whose rows are packed; leave it auto",
    ),
    (
        "data.bad_records",
        lambda c: c.data.bad_records == "stop"
        or c.data.pairs
        or c.data.records != "documents"
        or not names((*c.data.read, *c.data.validation)) <= {"custom", "tokens"},
        "{c.data.bad_records} with data={c.data.name}, which has no records to read; leave it stop",
    ),
    (
        "data.packing",
        lambda c: not c.data.pairs or c.data.packing == "auto",
        "{c.data.packing} with data.pairs, and each pair is one sequence; leave it auto",
    ),
    (
        "data.packing",
        lambda c: c.data.records == "documents" or c.data.packing == "auto",
        "{c.data.packing} with data.records={c.data.records}, which stay whole; leave it auto",
    ),
    (
        "model.attention",
        lambda c: not c.data.pairs or getattr(c.model, "attention", "documents") == "documents",
        "{c.model.attention} with data.pairs: both answers share a sequence and must not see each other; set documents",
    ),
    (
        "model.attention",
        lambda c: c.data.records == "documents" or getattr(c.model, "attention", "documents") == "documents",
        "{c.model.attention} with data.records={c.data.records}, several of which share a sequence; set documents",
    ),
    (
        "data.stream",
        lambda c: not c.data.stream or names(c.data.read) <= STREAMS,
        "true reads files or a dataset of the hub, not data={c.data.name}; set data=text or data=hf_dataset, or false; "
        "the same holds for sources",
    ),
    (
        "data.stream",
        lambda c: not c.data.stream or c.data.held_out == 0,
        "true with data.eval_fraction={c.data.eval_fraction}, and no share of a stream can be held out; name "
        "data.validation, or set data.eval_fraction=0 eval.interval=null",
    ),
    (
        "data.stream",
        lambda c: not c.data.stream or isinstance(c.train.steps, int) and c.train.steps != LONGEST,
        "true with train.steps in epochs or tokens, and the length of a stream is not known; give a number of steps",
    ),
    (
        "data.stream",
        lambda c: not c.data.stream or not c.reference_entries,
        "true with loss={c.loss_name}, whose reference model reads all answers before training; set false, or "
        "loss=simpo, orpo or cpo",
    ),
    (
        "data.stream",
        lambda c: not c.data.stream or not c.data.images_per_row,
        "true with data.images_per_row={c.data.images_per_row}: images are stored with their tokens; set false",
    ),
    (
        "data.stream_window",
        lambda c: c.data.stream or c.data.stream_window == STREAM_WINDOW,
        "{c.data.stream_window} is for data.stream=true; leave it out",
    ),
    (
        "data.tokenizer",
        lambda c: c.data.tokenizer != "" or c.run.dry,
        "is empty, and the model's vocabulary is not bytes; set data.tokenizer=FOLDER/tokenizer.json, as it "
        "was downloaded with the model",
    ),
    (
        "train.microbatches",
        lambda c: c.train.global_batch_size % c.train.microbatches == 0,
        "{c.train.microbatches} does not divide train.global_batch_size={c.train.global_batch_size}; change either",
    ),
    (
        "passes.remat.budget_gib",
        lambda c: c.passes.remat.policy == "budget" or c.passes.remat.budget_gib is None,
        "{c.passes.remat.budget_gib} with passes.remat.policy={c.passes.remat.policy}; it goes with policy=budget",
    ),
    (
        "passes.remat.layers",
        lambda c: not c.passes.remat.layers or c.passes.remat.policy != "budget",
        "set the policy of some layers, but a budget decides for all layers; use either",
    ),
    (
        "optim.momentum",
        lambda c: c.optim.name in ("sgd", "muon") or c.optim.momentum == 0,
        "{c.optim.momentum} has no effect on {c.optim.name}; use optim=sgd, optim=muon or leave it 0",
    ),
    (
        "optim._target_",
        lambda c: (c.optim._target_ is not None) == (c.optim.name == "custom"),
        "{c.optim._target_} with optim={c.optim.name}; it goes with optim=custom, which needs one",
    ),
    (
        "lr_schedule._target_",
        lambda c: (c.lr_schedule._target_ is not None) == (c.lr_schedule.name == "custom"),
        "{c.lr_schedule._target_} with lr_schedule={c.lr_schedule.name}; it goes with custom, which needs one",
    ),
    (
        "optim.groups",
        lambda c: c.optim.name == "muon" or all(group.optimizer is None for group in c.optim.groups.values()),
        "set optimizer with optim={c.optim.name}; only with optim=muon groups have an optimizer of their own",
    ),
    (
        "optim.groups",
        lambda c: all(group.kinds or group.names for group in c.optim.groups.values()),
        "one of them has neither kinds nor names, so it has no parameters; set either",
    ),
    (
        "optim.state",
        lambda c: c.optim.state is None or c.optim.name not in EIGHT_BITS,
        "{c.optim.state} with optim={c.optim.name}, which has its own format; leave it null",
    ),
    (
        "lr_schedule.warmup_steps",
        lambda c: c.lr_schedule.warmup(c.train.steps) <= c.train.steps,
        "{c.lr_schedule.warmup_steps} is more than train.steps={c.train.steps}; change either",
    ),
    (
        "lr_schedule.decay_steps",
        lambda c: c.lr_schedule.warmup(c.train.steps) + (c.lr_schedule.decay(c.train.steps) or 0) <= c.train.steps,
        "{c.lr_schedule.decay_steps} and lr_schedule.warmup_steps={c.lr_schedule.warmup_steps} (null: "
        "lr_schedule.warmup_ratio={c.lr_schedule.warmup_ratio}) are more than train.steps={c.train.steps}; "
        "change one of them",
    ),
    (
        "checkpoint.keep_best",
        lambda c: c.checkpoint.keep_best == 0 or not c.checkpoint.saves or evaluates_at_checkpoints(c),
        "{c.checkpoint.keep_best} needs an evaluation with every checkpoint; set eval.interval to a divisor of "
        "checkpoint.interval={c.checkpoint.interval}, or checkpoint.keep_best=0",
    ),
    (
        "train.nonfinite",
        lambda c: c.train.nonfinite != "rollback" or c.checkpoint.saves,
        "{c.train.nonfinite} with checkpoint.interval=null, which leaves nothing to go back to; change either",
    ),
    (
        "model.quantize",
        with_folder(lambda c: c.model.quantize is None or c.model.lora is not None),
        "{c.model.quantize} stores frozen weights, and without model.lora all are trained; use recipe=qlora, or null",
    ),
    (
        "model.mtp",
        with_folder(lambda c: c.model.mtp is None or not c.loss),
        "predicts further tokens, which only the default loss does, next-token cross-entropy; leave out either",
    ),
    (
        "model.mtp",
        with_folder(lambda c: c.model.mtp is None or c.model.lora is None),
        "trains all weights of further layers, and model.lora adapters alone; leave out either",
    ),
    (
        "model.mtp",
        with_folder(lambda c: c.model.mtp is None or not c.data.images_per_row),
        "is for text alone, and data.images_per_row is {c.data.images_per_row}; leave out either",
    ),
    (
        "train.replica_check.action",
        lambda c: c.run.elastic or c.train.replica_check.action != "leave_out",
        "leave_out needs the other ranks to go on; set run.elastic=true, or use repair",
    ),
    (
        "run.most_slowdown",
        lambda c: c.run.most_slowdown is None or c.run.elastic and c.run.pace_interval is not None,
        "{c.run.most_slowdown} needs run.elastic=true and run.pace_interval, which measures ranks; set them, or null",
    ),
    (
        "run.time_limit",
        lambda c: c.run.time_limit is None or is_time(c.run.time_limit),
        "{c.run.time_limit} is not a time; give seconds, or hours, minutes and seconds as 2h30m, 90m or 45s",
    ),
    (
        "eval.interval",
        lambda c: c.eval.interval is None or c.data.eval_fraction > 0 or bool(c.data.validation),
        "{c.eval.interval}, but data.eval_fraction=0 leaves no validation data; set eval.interval=null, a fraction, or "
        "data.validation",
    ),
    (
        "eval.patience",
        lambda c: c.eval.patience is None or c.eval.interval is not None,
        "{c.eval.patience} counts evaluations, and eval.interval=null has none; change either",
    ),
    (
        "eval.prompts",
        lambda c: not c.eval.prompts or c.eval.interval is not None,
        "are continued at evaluations, and eval.interval=null has none; change either",
    ),
    (
        "eval.prompts",
        lambda c: not c.eval.prompts or c.data.name != "custom",
        "are texts, and data=custom has no tokenizer; generate in a callback of your own",
    ),
    (
        "passes.remat.policy",
        lambda c: c.mesh.pp == 1 or c.passes.remat.policy != "budget",
        "budget with mesh.pp={c.mesh.pp}, whose ranks keep several microbatches at once; use another policy",
    ),
    (
        "passes.verify",
        lambda c: c.mesh.pp == 1 or c.passes.verify != "numeric",
        "numeric with mesh.pp={c.mesh.pp}, whose programs are parts of a step; use spec",
    ),
    (
        "passes.remat.policy",
        lambda c: not (c.run.dry and "offload" in (c.passes.remat.policy, *c.passes.remat.layers.values())),
        "offload with run.dry=true, which cannot predict copies to host memory; use another policy",
    ),
)


def validate(cfg: Config, world_size: int) -> Config:
    """Return `cfg` with its mesh resolved for `world_size` ranks; raise UserError for options that contradict."""
    counted = cfg if isinstance(cfg.train.steps, int) else with_steps(cfg, LONGEST)
    check(counted, (*CHECKS, *(DECODER_CHECKS if isinstance(cfg.model, ModelConfig) else ())))
    check_sources(cfg.data)
    for where, path in (
        ("run.dir", cfg.run.dir),
        ("checkpoint.dir", cfg.checkpoint.dir),
        ("checkpoint.resume", cfg.checkpoint.resume),
    ):
        check_path(where, path or "")
    return with_microbatches(dataclasses.replace(cfg, mesh=resolve_mesh(cfg.mesh, world_size)))


def with_microbatches(cfg: Config) -> Config:
    """Return `cfg` with the number of microbatches by `train.batch_per_rank`; raise UserError if it is not whole."""
    train = cfg.train
    if train.batch_per_rank is None:
        return cfg
    at_once = train.batch_per_rank * cfg.mesh.dp_replicate * cfg.mesh.dp_shard
    if train.global_batch_size % at_once:
        problem = f"{train.batch_per_rank} on each rank are {at_once} at once"
        fix = f"which does not divide train.global_batch_size={train.global_batch_size}; change either"
        raise UserError("train.batch_per_rank", f"{problem}, {fix}")
    count = train.global_batch_size // at_once
    return dataclasses.replace(cfg, train=dataclasses.replace(train, microbatches=count, batch_per_rank=None))


def validate_data(cfg: Config) -> DataConfig:
    """Return the options of data; raise UserError if two of them contradict each other."""
    check(cfg, tuple(entry for entry in CHECKS if entry[0].startswith("data.")))
    check_sources(cfg.data)
    return cfg.data


def check(cfg: Config, checks: Checks) -> None:
    """Raise UserError for the first check that does not hold."""
    for where, holds, message in checks:
        if not holds(cfg):
            raise UserError(where, message.format(c=cfg))


def check_sources(data: DataConfig) -> None:
    """Raise UserError for an option of a source that its kind of data does not read."""
    groups = (("data.sources", data.sources), ("data.validation", data.validation))
    places = [(f"{group}[{at}]", source) for group, sources in groups for at, source in enumerate(sources)]
    for place, source in [("data", data), *places]:
        for option, kinds in READ_BY.items():
            value, default = getattr(source, option), getattr(SourceConfig, option)
            if source.name not in kinds and value != default:
                fix = "set it in data.sources" if source.name == "mixture" else f"leave it {default or 'null'}"
                readers = " and ".join(f"data={kind}" for kind in kinds)
                raise UserError(f"{place}.{option}", f"{value} is for {readers}, not data={source.name}; {fix}")


def check_path(where: str, path: str) -> None:
    """Raise UserError if a path can be neither opened nor created."""
    try:
        os.stat(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError):  # it can be created, or its reader reports it
            return
        shown = path if len(path) < LONG else f"{path[:LONG]}..."
        act = "read" if where == "checkpoint.resume" else "written"
        raise UserError(where, f"{shown} cannot be {act}: {error.strerror}; choose another") from error


def dry_world_size(cfg: Config) -> int:
    """Return the ranks of a dry run: `cluster.gpus`, or the product of the mesh; raise UserError without either."""
    if cfg.cluster.gpus is not None:
        return cfg.cluster.gpus
    if len(open_axes(cfg.mesh)) > 1 and (product := stated(cfg.mesh)) > 1:
        return product
    return ranks_of(cfg.mesh, ", or cluster.gpus to the number of GPUs")


def ranks_of(mesh: MeshConfig, another_fix: str = "") -> int:
    """Return the number of ranks of a mesh that are not started yet; raise UserError if the size of an axis is open."""
    if left := [axis for axis, size in vars(mesh).items() if size == -1]:
        problem = "-1 takes the remaining ranks, and nothing says how many there are"
        raise UserError(f"mesh.{left[0]}", f"{problem}; set mesh.{left[0]}{another_fix}")
    return stated(mesh)


def stated(mesh: MeshConfig) -> int:
    """Return the product of the axes that are given."""
    return math.prod(size for axis, size in dataclasses.asdict(mesh).items() if axis != "ep" and size != -1)


def resolve_mesh(mesh: MeshConfig, world_size: int) -> MeshConfig:
    """Return `mesh` with its -1 filled in; raise UserError unless its sizes multiply to `world_size`."""
    sizes = dataclasses.asdict(mesh)
    del sizes["ep"]  # its ranks are those of other axes
    left = [axis for axis, size in sizes.items() if size == -1]
    if len(left) > 1:
        raise UserError(f"mesh.{left[1]}", f"-1, and so is mesh.{left[0]}; only one axis can take the remaining ranks")
    product = math.prod(size for size in sizes.values() if size != -1)
    is_divisible = world_size % product == 0 if left else world_size == product
    if not is_divisible:
        shape = "*".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "every axis=1"
        largest = max(sizes, key=lambda axis: (sizes[axis], axis == "dp_shard"))
        needed = f"a multiple of {product} ranks" if left else f"{product} ranks"
        raise UserError("mesh", f"{shape} needs {needed}, not {world_size}; change mesh.{largest} or start {needed}")
    mesh = dataclasses.replace(mesh, **{axis: world_size // product for axis in left})
    try:
        spread_experts(dataclasses.asdict(mesh))
    except MeshError as error:
        raise UserError(error.option, error.problem) from error
    return mesh
