"""Every option of a run: frozen dataclasses, one a group of `conf/`, and what must hold between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from omegaconf import OmegaConf

from compiler_trainer.config import yamls
from compiler_trainer.config.cluster import AUTO_CLUSTER, ClusterConfig
from compiler_trainer.config.earlier import understood
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import put
from compiler_trainer.config.kinds import (
    AxisSize,
    Count,
    Epsilon,
    Fraction,
    Interval,
    Layers,
    NonNegativeFloat,
    OpenFraction,
    Own,
    Positive,
    PositiveFloat,
    RopeBase,
    RowLength,
    Seed,
    Text,
)
from compiler_trainer.config.lengths import is_length
from compiler_trainer.config.options import Chosen, Must, build  # noqa: F401  # build: of what `Config` is in
from passes.memory.policies import SAVE, Action, OfLayer, Policy
from passes.precision.sensitive import OPS

Dtype = Literal["float32", "bfloat16"]


EIGHT_BITS: dict[str, Literal["int8", "float8"]] = {"adamw8bit": "int8", "adamwfp8": "float8"}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of rotary wavelengths (arXiv:2407.21783); positions in tokens."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position: Positive


@dataclass(frozen=True)
class LatentConfig:
    """Keys and values made of `kv_rank` features a token (DeepSeek-V2, arXiv:2405.04434); `_dim` is of a head."""

    kv_rank: Positive
    nope_dim: Positive  # features of a query and key that do not rotate
    rope_dim: Positive  # those that do; of a key, the same in all heads
    v_dim: Positive
    q_rank: Positive | None = None  # null: queries are made of the layer's input at once


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward layers of which each token takes few (`compiler_trainer/models/experts.py`, `router.py`).

    Scores, normalized over the chosen experts or not, then scaled, weigh what an expert gives or is given.
    """

    count: Positive
    top_k: Positive
    width: Positive  # features inside one expert
    shared: Count = 0  # further experts, which all tokens take
    dense_layers: Count = 0  # layers before the first with experts
    every: Positive = 1  # of the layers from there on, every n-th has experts
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: Positive = 1  # of neighbours, among which `top_groups` are chosen first
    top_groups: Positive = 1
    normalize: bool = True
    scale: PositiveFloat = 1.0
    weigh: Literal["output", "input"] = "output"
    balance_loss: NonNegativeFloat = 0.0  # times this, uneven shares are added to the training loss: 1 if they are even
    bias_rate: NonNegativeFloat = 0.0  # how far a forward in training moves the correction of scores

    def are_in(self, layer: int) -> bool:
        """Whether the layer of that number, from 0, has experts."""
        return layer >= self.dense_layers and (layer + 1 - self.dense_layers) % self.every == 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder; the defaults are `llama_debug`, whose vocabulary is 256 bytes and the end of a document."""

    name: str = "llama_debug"
    dim: Positive = 256
    n_layers: Layers = 4
    n_heads: Positive = 8
    n_kv_heads: Positive = 4
    ffn_dim: Positive = 768
    vocab_size: Positive = 257
    norm_eps: Epsilon = 1e-5
    rope_theta: RopeBase = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    attention: Literal["causal", "documents"] = "causal"  # over the whole row, or within each document of it
    head_dim: Positive | None = None  # null: dim / n_heads
    qk_norm: Literal["none", "learned", "plain"] = "none"  # RMSNorm of each head's query and key, plain without weights
    nope_every: Positive | None = None  # every n-th layer knows no positions: neither rotation nor `qk_norm`
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None


@dataclass(frozen=True)
class LoraConfig:
    """LoRA (arXiv:2106.09685): low-rank terms of linear layers, as `peft` builds them; nothing else is trained.

    `targets` are names of layers, or `all-linear`; with none, those that peft knows for the kind of model.
    """

    rank: Positive = 8
    alpha: PositiveFloat = 16.0  # a term is scaled by alpha / rank
    dropout: OpenFraction = 0.0
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class FolderConfig:
    """`model=hf`: a causal language model as transformers writes it, with config.json, safetensors and a tokenizer.

    `path` is a folder, one in a store (s3://bucket/folder), or a model of the hub (organization/name, with @revision).
    With `documents`, positions start anew at each document of a row, and attention stays within it; with `causal` a
    row is one text.
    """

    path: str
    name: str = "hf"
    init: Literal["weights", "random"] = "weights"
    attention: Literal["documents", "causal"] = "documents"
    lora: LoraConfig | None = None


def kind_of_time(given: Any) -> Any:
    """What a time is given as."""
    return float | None if isinstance(given, int | float) else str | None


TimeLimit = Annotated[str | float | None, Chosen(kind_of_time, "seconds, or 2h30m | null")]


def kind_of_model(given: Any) -> Any:
    """What the options of `model` are: a module of one's own, a folder, or a decoder."""
    keys = given if isinstance(given, Mapping) else ()
    return Own if "_target_" in keys else FolderConfig if "path" in keys else ModelConfig


def is_call(given: Any) -> bool:
    """Whether options name what to call."""
    return isinstance(given.get("_target_"), str)


def is_none_or_call(given: Any) -> bool:
    """Whether options are none, or name what to call."""
    return not given or is_call(given)


@dataclass(frozen=True)
class DpoConfig:
    """What is minimized: by default cross-entropy of the next token; with `loss._target_` a function of (model, batch).

    `loss=dpo` is direct preference optimization (arXiv:2305.18290) of `data.pairs`. Its reference are the weights that
    training starts from.
    """

    name: Literal["dpo"]
    beta: PositiveFloat = 0.1  # what it costs to leave the reference
    label_smoothing: OpenFraction = 0.0  # the share of pairs that are taken to be labelled the wrong way


def kind_of_loss(given: Any) -> Any:
    """What the options of `loss` are: ours for preference pairs, or one's own."""
    return DpoConfig if isinstance(given, Mapping) and "name" in given else OwnLoss


Model = Annotated[ModelConfig | FolderConfig | Own, Chosen(kind_of_model)]
OwnLoss = Annotated[Own, Must("have a _target_, the dotted name of a function of (model, batch)", is_none_or_call)]
Loss = Annotated[DpoConfig | Own, Chosen(kind_of_loss)]
Called = Annotated[Own, Must("have a _target_, the dotted name of what to call", is_call)]
Target = Annotated[str, Must("be the dotted name of what to call", bool)]


@dataclass(frozen=True)
class SourceConfig:
    """Where documents come from. `files` are paths, folders and globs of .txt, .jsonl (.gz, .zst), .parquet and .arrow,
    on a disk or in a store, as s3://bucket/folder.

    A `.txt` is one document, or several between `document_separator`s; a record has its text, or the ids of its tokens,
    in `text_column`. A `.bin`, with Megatron's `.idx` or alone, and a `.npy` hold ids. With `custom`, rows are those of
    the dataset that `_target_` makes of its `arguments` (docs/guides/your-loop.md).
    """

    name: Literal["stdlib", "text", "synthetic", "hf_dataset", "tokens", "mixture", "custom"] = "text"
    files: tuple[str, ...] = ()
    tokens: str | None = None  # of name=tokens: a folder that `compiler-trainer tokenize` wrote
    document_separator: Text | None = None
    text_column: str = "text"
    path: str | None = None  # of hf_dataset: a folder, or the name of a dataset of the hub
    configuration: str | None = None  # of a dataset that has several
    split: str = "train"  # of a dataset
    documents: Positive = 2000  # of the synthetic corpus
    _target_: Target | None = None  # of custom: a dataset of one's own, whose items are rows
    arguments: dict[str, Any] = field(default_factory=dict)  # what it is called with


@dataclass(frozen=True)
class WeightedSource(SourceConfig):
    """One of several sources: of all rows trained on it gives `weight` over the sum of weights."""

    weight: PositiveFloat = 1.0


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """What to train on: one source, or `sources`; `tokenizer` is `bytes` or the path of a `tokenizer.json`, which
    transformers loads with the files beside it.

    A recipe for a vocabulary of its own leaves `tokenizer` empty: it has to be named.

    For `model=hf` it is that of its folder. With `chat`, records hold `messages`, or `prompt` and `completion`: the
    tokenizer's chat template writes them, and the loss counts what the assistant says.
    """

    name: Literal["stdlib", "text", "synthetic", "hf_dataset", "tokens", "mixture", "custom"] = "stdlib"
    sources: tuple[WeightedSource, ...] = ()
    validation: tuple[WeightedSource, ...] = ()  # what to evaluate on; nothing else is held out then
    tokenizer: str = "bytes"
    eos_token: Text | None = None  # the token that closes a document; null: the tokenizer's own eos_token
    add_bos_token: bool | None = None  # begin texts with the bos_token; null: as the tokenizer does
    chat: bool = False
    pairs: bool = False  # with `chat`: records hold `chosen` and `rejected` answers to a `prompt`, a row each
    packing: Literal["auto", "cut", "fit"] = "auto"  # documents end to end, cut; or whole ones, padded: with `chat`
    bad_records: Literal["stop", "skip"] = "stop"
    eval_fraction: OpenFraction = 0.05  # of each source's documents, held out where there is no validation set
    seed: Seed = 0
    cache: str | None = None  # of tokens and copies; null: compiler-trainer/tokens in $XDG_CACHE_HOME or ~/.cache
    cache_gib: PositiveFloat = 256.0  # above it the cache loses tokens unused for 30 days, copies unread for 10 minutes

    @property
    def packs(self) -> Literal["cut", "fit", "pairs", "short pairs"]:
        """How documents are packed: conversations whole, so that no answer is parted from its question."""
        if self.pairs:
            return "short pairs" if self.bad_records == "skip" else "pairs"
        return self.packing if self.packing != "auto" else "fit" if self.chat else "cut"

    @property
    def read(self) -> tuple[SourceConfig, ...]:
        """The sources that documents to train on are read from."""
        return self.sources or (self,)

    @property
    def listed(self) -> tuple[SourceConfig, ...]:
        """Every source that is stated."""
        return (self, *self.sources, *self.validation)

    @property
    def held_out(self) -> float:
        """The share of documents to train on that is held out."""
        return 0.0 if self.validation else self.eval_fraction


def kind_of_microbatches(given: Any) -> Any:
    """What a number of microbatches is given as."""
    return Literal["auto"] if isinstance(given, str) else Positive


Microbatches = Annotated[int, Chosen(kind_of_microbatches, "a whole number, at least 1 | auto")]
AUTOMATIC: Any = "auto"  # what `train.microbatches` is until it is planned


Length = Annotated[str, Must("be a number of steps, or epochs or tokens as 3epochs or 20Btokens", is_length)]


def kind_of_steps(given: Any) -> Any:
    """What a length of training is given as."""
    return Length if isinstance(given, str) else Positive


Steps = Annotated[int, Chosen(kind_of_steps, "a whole number, at least 1 | 3epochs | 20Btokens")]
LONGEST = 2**62  # steps that stand for epochs or tokens until the data are read


def lasting(cfg: Config, steps: int) -> Config:
    """`cfg` with so many steps."""
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=steps))


@dataclass(frozen=True)
class ReplicaCheckConfig:
    """Ranks that hold copies of parameters and moments compare them every `interval` steps and before each checkpoint.

    Where a bit differs `stop` ends the run, naming rank and tensor; `repair` copies what most ranks hold, if most do.
    """

    interval: Interval | None = 100  # null: they are never compared
    action: Literal["stop", "repair"] = "stop"  # where copies differ: silent data corruption


@dataclass(frozen=True)
class TrainConfig:
    """How much to train; `dtype` is that of the master weights.

    `microbatches` is the number of steps of gradient accumulation; with `auto` it is as small as memory allows.
    """

    steps: Steps = 80  # optimizer steps, or what epochs or tokens come to: 3epochs, 20Btokens
    seq_len: RowLength = 256  # tokens a row
    global_batch_size: Positive = 16  # sequences a step, all ranks together
    microbatches: Microbatches = 1  # parts of a step's rows, in turn: gradient accumulation; auto: planned
    seed: Seed = 0  # of initial weights and dropout
    deterministic: bool = False  # the same bits in every run, at some speed
    dtype: Dtype = "float32"  # of the master weights; mixed precision: passes.cast.param_dtype
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"  # at a NaN: end, omit the update, or go back and past it
    replica_check: ReplicaCheckConfig = field(default_factory=ReplicaCheckConfig)
    ema: OpenFraction | None = None  # keep averages of weights, of which a step leaves so much; null: none
    callbacks: tuple[Called, ...] = ()  # told of steps, evaluations, checkpoints and the end (docs/guides/your-loop.md)


@dataclass(frozen=True)
class GroupConfig:
    """Parameters that are updated otherwise: those of some kinds, and those named like some patterns."""

    kinds: tuple[Literal["vector", "embedding", "head"], ...] = ()  # of one dim or none; looked up; the last product
    names: tuple[str, ...] = ()  # patterns of names, e.g. `layers.*.norm.weight`
    lr: NonNegativeFloat = 1.0  # times optim.lr
    weight_decay: NonNegativeFloat | None = None  # null: optim.weight_decay
    optimizer: Literal["adamw"] | None = None  # with optim=muon: the other one


@dataclass(frozen=True)
class OptimConfig:
    """The update; what is left unset here is plain: no decay, no momentum, no clip (`max_norm` null).

    With `custom`, `_target_` makes the optimizer of its `arguments` (docs/guides/your-loop.md).
    """

    name: Literal["adamw", "adamw8bit", "adamwfp8", "muon", "sgd", "custom"] = "adamw"  # 8bit, fp8: formats of torchao
    lr: NonNegativeFloat = 1e-3  # the learning rate at its highest
    betas: tuple[OpenFraction, OpenFraction] = (0.9, 0.999)  # adamw's
    eps: Epsilon = 1e-8  # adamw's
    momentum: OpenFraction = 0.0  # sgd's and muon's
    weight_decay: NonNegativeFloat = 0.0  # decoupled, times the learning rate
    max_norm: PositiveFloat | None = None  # gradients are clipped to this norm; null: they are not
    state: Dtype | None = None  # of moments; null: that of the parameters
    block: Positive = 256  # entries that share a scale, where moments are in eight bits
    stochastic_rounding: bool = False  # of updated bf16 parameters
    groups: dict[str, GroupConfig] = field(default_factory=dict)  # by a name of one's own; the first that fits counts
    _target_: Target | None = None  # of custom: a class with `moments`, `scalars` and `update`
    arguments: dict[str, Any] = field(default_factory=dict)  # what it is called with


@dataclass(frozen=True)
class LrScheduleConfig:
    """Linear warm-up to `optim.lr`, then down to `min_ratio * optim.lr` in the last `decay_steps` of `train.steps`.

    Fractions are of `train.steps`, so that a run that is resumed for more or fewer steps keeps its shape. With
    `custom`, the rate is `optim.lr` times what the function `_target_` gives.
    """

    name: Literal["constant", "cosine", "linear", "wsd", "custom"] = "constant"  # wsd: warm-up, stable, decay
    warmup_steps: Count | None = None  # null: warmup_fraction of train.steps
    min_ratio: Fraction = 0.0  # of optim.lr, where the decay ends, one step after the last
    decay_steps: Count | None = None  # null: decay_fraction of train.steps
    warmup_fraction: Fraction = 0.0
    decay_fraction: Fraction | None = None  # null: all after the warm-up
    _target_: Target | None = None  # of custom: a function of (step, steps), steps counted from 1
    arguments: dict[str, Any] = field(default_factory=dict)  # what it is given beside, by name

    def warmup(self, steps: int) -> int:
        """Steps of warm-up in a run of so many."""
        return int(self.warmup_fraction * steps) if self.warmup_steps is None else self.warmup_steps

    def decay(self, steps: int) -> int | None:
        """Steps of decay in a run of so many; None: all after the warm-up."""
        if self.decay_steps is not None or self.decay_fraction is None:
            return self.decay_steps
        return int(self.decay_fraction * steps)


@dataclass(frozen=True)
class MeshConfig:
    """Ranks along each axis; -1: the ranks that the others leave. Several -1 are planned, `mesh=auto` plans all.

    `ep` counts no further ranks: among so many of `dp_shard` and `cp` (or of these and all of `tp`) experts are spread.
    """

    pp: AxisSize = 1
    dp_replicate: AxisSize = 1  # data parallelism that replicates parameters (DDP; with dp_shard HSDP)
    dp_shard: AxisSize = -1  # data parallelism that shards parameters (FSDP, ZeRO)
    cp: AxisSize = 1  # context parallelism: the sequence is sharded
    tp: AxisSize = 1  # tensor parallelism: weights are split
    ep: Positive = 1  # expert parallelism


AUTO = MeshConfig(dp_replicate=-1, dp_shard=-1, cp=-1, tp=-1)  # what `mesh=auto` stands for until a plan is made
PLANNED = ("dp_replicate", "dp_shard", "cp", "tp")


def open_axes(mesh: MeshConfig) -> list[str]:
    """The axes that take what others leave."""
    return [axis for axis in PLANNED if getattr(mesh, axis) == -1]


def is_open(cfg: Config) -> bool:
    """Whether something of how a job runs is to be planned: several axes of its mesh, or its microbatches."""
    return len(open_axes(cfg.mesh)) > 1 or cfg.train.microbatches == AUTOMATIC


def closed(cfg: Config) -> Config:
    """`cfg` with stand-ins for what is to be planned, so that all else can be checked."""
    mesh = MeshConfig() if len(open_axes(cfg.mesh)) > 1 else cfg.mesh
    microbatches = 1 if cfg.train.microbatches == AUTOMATIC else cfg.train.microbatches
    return dataclasses.replace(cfg, mesh=mesh, train=dataclasses.replace(cfg.train, microbatches=microbatches))


@dataclass(frozen=True)
class CastConfig:
    """Mixed precision: dtypes of parameters in use and of reduced gradients; null keeps the master weights' own.

    With `param_dtype=auto` that is bfloat16 on a GPU, and gradients are then reduced in float32, and null on a CPU.
    `ops` are patterns of operators and the least dtype they compute in, `modules` of modules and theirs.
    """

    param_dtype: Literal["auto", "float32", "bfloat16"] | None = "auto"
    reduce_dtype: Dtype | None = None
    output_dtype: Dtype | None = None  # of what the model hands to the loss
    ops: dict[str, Dtype] = field(default_factory=OPS.copy)
    modules: dict[str, Dtype] = field(default_factory=dict)
    float8: Literal["tensorwise", "rowwise"] | None = None  # how linear layers are scaled, if they are in float8
    float8_skip: tuple[str, ...] = ()  # modules that are not
    float8_min_size: Positive = 16  # of both dims of a weight
    float8_head: bool = False  # whether the last linear layer is


@dataclass(frozen=True)
class ShardConfig:
    """How parameters are sharded; `plan` maps a pattern of parameter names to {axis: dim}."""

    plan: dict[str, dict[str, int]] | None = None
    sequence_parallel: bool = True
    strict: bool = False
    min_shard_elements: Positive = 1  # a smaller parameter stays whole on dp_shard and cp


@dataclass(frozen=True)
class MoeConfig:
    """How rows get to experts that `mesh.ep` spreads over ranks (`passes/sharding/dispatch.py`).

    A `bounded` buffer has room for `capacity_factor` even shares; rows beyond that are dropped. Rows that are sent
    travel in `chunks`: one travels while another is computed.
    """

    dispatch: Literal["auto", "all_gather", "dropless", "bounded"] = "auto"
    capacity_factor: PositiveFloat = 1.25
    chunks: Positive = 1


@dataclass(frozen=True)
class ContextConfig:
    """How attention runs over a sequence that `mesh.cp` shards; auto: what sends least (`passes/context`).

    `load_balance` says which tokens a rank has: a run (none), a chunk from the front and one from the back (head_tail),
    or blocks of at most `block` tokens, shared out for each batch by the work that its documents make; auto: blocks
    where documents decide what attention sees (`passes/context/sequence_layout.py`). With `skip_steps`, steps of a ring
    at which no rank sees anything in a batch send nothing.
    """

    method: Literal["auto", "ring", "all_gather", "ulysses", "hybrid"] = "auto"
    load_balance: Literal["auto", "head_tail", "blocks", "none"] = "auto"
    block: Positive = 128
    skip_steps: bool = True


@dataclass(frozen=True)
class ChunkLossConfig:
    """In how many `chunks` of a rank's tokens head and loss are taken; null: one while logits are within `logits_mib`,
    else as many as keep those of a chunk within it.
    """

    chunks: Positive | None = None  # 1: logits are whole
    logits_mib: PositiveFloat = 1024.0


@dataclass(frozen=True)
class RematConfig:
    """What the backward recomputes (activation checkpointing).

    With `regather` parameters are gathered again for it (ZeRO-3, else ZeRO-2).

    `save` lists the operators whose results `selective` keeps; `layers` gives some layers another policy, `modules` and
    `ops` say otherwise of single values, all by patterns.
    """

    policy: Policy = "selective"
    regather: bool = True
    save: tuple[str, ...] = SAVE
    every_n: Positive = 2  # `every_n` recomputes every n-th layer
    budget_gib: PositiveFloat | None = None  # peak memory of a rank, state included
    headroom: OpenFraction = 0.04  # share of it left free: Inductor's buffers come out up to 3 % above the estimate
    layers: dict[str, OfLayer] = field(default_factory=dict)
    modules: dict[str, Action] = field(default_factory=dict)
    ops: dict[str, Action] = field(default_factory=dict)


@dataclass(frozen=True)
class CommunicationConfig:
    """How collectives are merged (0 MiB: none are), and how many layers early they start (0: the order stays).

    With `async_tp`, products run in pieces beside the steps of a ring instead of after a gather or before a reduction:
    all that can, or with `auto` those by which the step predicted on `cluster` is shorter.
    With `batch_overlap`, so many of a step's microbatches are computed in turns by one program: while one waits for
    other ranks, another is computed (two-batch overlap).
    """

    bucket_mib: NonNegativeFloat = 25.0
    prefetch: Count = 1
    async_tp: Literal["none", "auto", "all"] = "none"
    batch_overlap: Positive = 1  # microbatches in one program; `train.microbatches` is a multiple of it


@dataclass(frozen=True)
class SegmentConfig:
    """How the finished program is cut for compilation: where layers begin, and before a piece exceeds `max_nodes`."""

    max_nodes: Positive | None = 1000  # null: the whole program is compiled as one


@dataclass(frozen=True)
class AccumulateConfig:
    """What a step in microbatches does once, or for each: gather sharded parameters, reduce gradients.

    Once costs less communication and keeps weights, or gradients, whole in memory as long as a step; auto: once where
    `mesh.pp` is more than 1. Gradients are added up in `dtype` or their own, whichever is wider; null: in their own,
    which with `train.dtype=bfloat16` rounds away small terms of many microbatches.
    """

    gather: Literal["auto", "step", "microbatch"] = "auto"
    reduce: Literal["auto", "step", "microbatch"] = "auto"
    dtype: Dtype | None = "float32"


@dataclass(frozen=True)
class PipelineConfig:
    """How pipeline stages are cut and scheduled, where `mesh.pp` is more than 1.

    `schedule` is the name of one, or a file with a table. With `interleaved` a rank has `chunks` stages.
    """

    schedule: str = "1f1b"
    stages: tuple[int, ...] = ()  # how many layers each stage has; none: as even as can be
    chunks: Positive = 2  # stages of a rank, of an interleaved schedule


@dataclass(frozen=True)
class PassesConfig:
    """Options of each pass, and how much of its result is verified.

    With `fold_layers`, one layer stands for those that are like it while passes run.
    """

    cast: CastConfig = field(default_factory=CastConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    chunk_loss: ChunkLossConfig = field(default_factory=ChunkLossConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    accumulate: AccumulateConfig = field(default_factory=AccumulateConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    segment: SegmentConfig = field(default_factory=SegmentConfig)
    extra: tuple[Called, ...] = ()  # passes of one's own, each put where its stage is (docs/guides/write-a-pass.md)
    rules: tuple[str, ...] = ()  # modules to import, which add rules for operators (docs/guides/add-a-rule.md)
    fold_layers: bool = True
    verify: Literal["none", "spec", "numeric"] = "spec"


def kind_of_cudagraphs(given: Any) -> Any:
    """What `lower.cudagraphs` is given as."""
    return Literal["auto"] if isinstance(given, str) else bool


CudaGraphs = Annotated[bool, Chosen(kind_of_cudagraphs, "true or false | auto")]


@dataclass(frozen=True)
class LowerConfig:
    """What runs the final graph; with `cudagraphs` its launches are recorded once, on CUDA, and replayed.

    With `cudagraphs=true` a step of which something cannot be recorded is refused, with `auto` that is started as
    without, and the run says what it is.

    A start reads the programs that an earlier one made of the same captured graph, options and versions.
    With `fast_start` C++ kernels are built
    several at a time, in ways of PyTorch that may change with a version; without, Inductor builds them by itself.
    """

    backend: Literal["inductor", "eager"] = "inductor"
    cudagraphs: CudaGraphs = False
    programs: str | None = None  # a folder of `compiler-trainer compile`, whose program is run, and no other
    fast_start: bool = True


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint every `interval` steps and after the last; `resume` is a checkpoint folder, `latest` or `auto`.

    Each is copied to `store`, a folder of an object store (s3://bucket/runs), where a run on another machine finds it.

    `auto` is the latest one if there is any, else the beginning. What is kept are the newest `keep`, those of every
    `keep_every`-th step, and the `keep_best` of the lowest held-out loss.
    """

    interval: Interval | None = 500  # null: nothing is saved, not at the end either
    keep: Positive = 2
    keep_every: Interval | None = None
    keep_best: Count = 0
    dir: str | None = None  # null: checkpoints/ in the run folder
    store: str | None = None  # null: they are on the disk alone
    resume: str | None = None
    allow: tuple[str, ...] = ()  # options, or groups of them, that may differ from those of the run that is resumed
    frozen: bool = True  # whether parameters that are not trained are stored; else they are read where they came from

    @property
    def saves(self) -> bool:
        """Whether checkpoints are taken."""
        return self.interval is not None


@dataclass(frozen=True)
class EvalConfig:
    """Held-out loss over `batches` global batches every `interval` steps and at the end.

    There the model also adds `sample_tokens` to each of `prompts`, or, with `data.chat`, answers it.
    """

    interval: Interval | None = 50  # null: never, and data.eval_fraction may be 0
    batches: Positive | None = 4  # the same each time; null: every held-out row once
    patience: Positive | None = None  # early stopping: end after so many evaluations without a lower loss; null: never
    prompts: tuple[Text, ...] = ()  # samples while training, written to samples.jsonl; none: no samples
    sample_tokens: Positive = 64  # most that is added to one


@dataclass(frozen=True)
class RunConfig:
    """Where the run's files go, by default a new folder named by the local time, and what is written there.

    `profile` records steps 3 to 5: rank 0 as trace.json.gz, to be opened in Perfetto, and where each rank's time went.
    With `memory_snapshot` the GPU's allocations are memory_RANK.pickle. The step in which `time_limit` ends is the
    last, and a checkpoint is taken; reading data and compiling are part of the time.
    """

    dir: str = field(default_factory=lambda: datetime.now().strftime("runs/%Y-%m-%d_%H-%M-%S"))
    dump_graphs: bool = True
    profile: bool = False
    memory_snapshot: bool = False  # for pytorch.org/memory_viz, also of a run that is out of memory
    loggers: tuple[Called, ...] = ()  # beside metrics.jsonl and TensorBoard (docs/guides/your-loop.md)
    time_limit: TimeLimit = None  # seconds, or as `2h30m`
    pace_interval: Interval | None = 100  # every so many steps ranks compare how long they compute and wait
    timeout_s: PositiveFloat = 600.0  # a rank that does not move for so long while training ends the job
    dry: bool = False  # compile for the mesh and predict what `cluster` would make of it; nothing is run


Recompute = Literal["none", "selective", "attention", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class PlanConfig:
    """What `compiler-trainer plan` and `mesh=auto` may choose, and how thoroughly they look (docs/guides/plan.md).

    What is stated on the command line is kept. `recompute` lists what `passes.remat.policy` may become; where one of
    them does not fit, another may take some of the layers.
    """

    compile: Positive = 6  # the number of settings to compile: those that closed forms rank best
    recompute: tuple[Recompute, ...] = RECOMPUTE
    float8: bool = False  # whether products in float8 may be chosen, where others are in bfloat16
    processes: Positive | None = None  # that compile side by side; null: one a core
    suggest: bool = True  # whether a run says at its start that another mesh is predicted to be faster


@dataclass(frozen=True)
class Config:
    """All options of one run."""

    model: Model = field(default_factory=ModelConfig)
    loss: Loss = field(default_factory=dict)  # empty: next-token cross-entropy
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    passes: PassesConfig = field(default_factory=PassesConfig)
    lower: LowerConfig = field(default_factory=LowerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = AUTO_CLUSTER
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss is a function that is plugged in."""
        return bool(self.loss) and not isinstance(self.loss, DpoConfig)


PLAIN_HEADS = (None, "none", None)


def save(cfg: Config, path: Path, head: str = "") -> None:
    """Write `cfg` as YAML that `load` reads back, under a comment."""
    put(path, head + OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg))))


# Groups that every run has written; of one that is newer, a run that went before has the defaults.
WRITTEN = (
    "model", "loss", "data", "train", "optim", "lr_schedule", "mesh", "passes", "lower", "checkpoint", "eval", "run",
    "cluster", "plan",
)  # fmt: skip


def load(path: Path) -> Config:
    """The config saved at `path`; raises UserError naming the file and the option at fault."""
    options = yamls.load(path)
    try:
        cfg = understood(Config, options, str(path))
    except UserError as error:
        raise UserError(f"{path}: {error.where}", error.message) from error
    if missing := [group for group in WRITTEN if group not in options]:
        fix = f"if it was not cut short, write {missing[0]}: {{}} for the defaults"
        raise UserError(str(path), f"lacks {', '.join(missing)}, which a run writes; {fix}")
    return cfg
