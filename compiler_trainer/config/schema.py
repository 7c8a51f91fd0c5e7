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
from compiler_trainer.config.cluster import ClusterConfig
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import put
from compiler_trainer.config.kinds import (
    AxisSize,
    Count,
    Epsilon,
    Fraction,
    Layers,
    NonNegativeFloat,
    OpenFraction,
    Positive,
    PositiveFloat,
    RopeBase,
    Seed,
)
from compiler_trainer.config.options import Chosen, Must, build, option_names
from passes.memory.remat import SAVE, Action, OfLayer, Policy
from passes.precision.cast import OPS

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
    """Terms of low rank, the only ones trained, beside linear layers (arXiv:2106.09685), as `peft` builds them.

    `targets` are names of layers, or `all-linear`; with none, those that peft knows for the kind of model.
    """

    rank: Positive = 8
    alpha: PositiveFloat = 16.0  # a term is scaled by alpha / rank
    dropout: OpenFraction = 0.0
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class FolderConfig:
    """A causal language model in a folder as transformers writes one: config.json, safetensors, tokenizer.json.

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


TimeLimit = Annotated[str | float | None, Chosen(kind_of_time)]
Own = dict[str, Any]  # `_target_`, the dotted name of what to call, and its arguments


def kind_of_model(given: Any) -> Any:
    """What the options of `model` are: a module of one's own, a folder, or a decoder."""
    keys = given if isinstance(given, Mapping) else ()
    return Own if "_target_" in keys else FolderConfig if "path" in keys else ModelConfig


def is_call(given: Any) -> bool:
    """Whether options name what to call."""
    return not given or isinstance(given.get("_target_"), str)


Model = Annotated[ModelConfig | FolderConfig | Own, Chosen(kind_of_model)]
Loss = Annotated[Own, Must("have a _target_, the dotted name of a function of (model, batch)", is_call)]


@dataclass(frozen=True)
class SourceConfig:
    """Where documents come from. `files` are paths, folders and globs of .txt, .jsonl (also .gz, .zst) and .parquet.

    A `.txt` is one document, or several between `document_separator`s; a record has its text in `text_column`.
    """

    name: Literal["stdlib", "text", "synthetic", "hf_dataset", "mixture"] = "text"
    files: tuple[str, ...] = ()
    document_separator: Annotated[str, Must("be at least a character", bool)] | None = None
    text_column: str = "text"
    path: str | None = None  # of hf_dataset: a folder, or the name of a dataset that is cached
    configuration: str | None = None  # of a dataset that has several
    split: str = "train"  # of a dataset
    documents: Positive = 2000  # of the synthetic corpus


@dataclass(frozen=True)
class WeightedSource(SourceConfig):
    """One of several sources: of all rows trained on it gives `weight` over the sum of weights."""

    weight: PositiveFloat = 1.0


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """What to train on: one source, or `sources`; `tokenizer` is `bytes` or the path of a `tokenizer.json`.

    For `model=hf` it is that of its folder. With `chat`, records hold `messages`, or `prompt` and `completion`: the
    tokenizer's chat template writes them, and the loss counts what the assistant says.
    """

    name: Literal["stdlib", "text", "synthetic", "hf_dataset", "mixture"] = "stdlib"
    sources: tuple[WeightedSource, ...] = ()
    tokenizer: str = "bytes"
    chat: bool = False
    packing: Literal["cut", "fit"] = "cut"  # documents end to end, cut into rows; or rows of whole documents, padded
    bad_records: Literal["stop", "skip"] = "stop"
    eval_fraction: OpenFraction = 0.05  # of each source's documents, held out
    seed: Seed = 0
    cache: str | None = None  # where tokens are kept; null: compiler-trainer/tokens in $XDG_CACHE_HOME or ~/.cache

    @property
    def read(self) -> tuple[SourceConfig, ...]:
        """The sources that documents are read from."""
        return self.sources or (self,)


@dataclass(frozen=True)
class TrainConfig:
    """How much to train; `dtype` is that of the master weights."""

    steps: Positive = 80
    seq_len: Annotated[int, Must("be at least 2, a token and the one it predicts", lambda n: n >= 2)] = 256
    global_batch_size: Positive = 16  # sequences a step, all ranks together
    microbatches: Positive = 1
    seed: Seed = 0
    deterministic: bool = False
    dtype: Dtype = "float32"
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"  # at a NaN: end, omit the update, or go back and past it


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
    """The update; what is left unset here is plain: no decay, no momentum, no clip (`max_norm` null)."""

    name: Literal["adamw", "adamw8bit", "adamwfp8", "muon", "sgd"] = "adamw"  # 8bit, fp8: moments in torchao's formats
    lr: NonNegativeFloat = 1e-3
    betas: tuple[OpenFraction, OpenFraction] = (0.9, 0.999)  # adamw's
    eps: Epsilon = 1e-8  # adamw's
    momentum: OpenFraction = 0.0  # sgd's and muon's
    weight_decay: NonNegativeFloat = 0.0
    max_norm: PositiveFloat | None = None
    state: Dtype | None = None  # of moments; null: that of the parameters
    block: Positive = 256  # entries that share a scale, where moments are in eight bits
    stochastic_rounding: bool = False  # of updated bf16 parameters
    groups: dict[str, GroupConfig] = field(default_factory=dict)  # by a name of one's own; the first that fits counts


@dataclass(frozen=True)
class LrScheduleConfig:
    """Linear warm-up to `optim.lr`, then down to `min_ratio * optim.lr` in the last `decay_steps` of `train.steps`."""

    name: Literal["constant", "cosine", "linear", "wsd"] = "constant"  # wsd falls as 1 - sqrt
    warmup_steps: Count = 0
    min_ratio: Fraction = 0.0
    decay_steps: Count | None = None  # null: all after the warm-up


@dataclass(frozen=True)
class MeshConfig:
    """Ranks along each axis; at most one axis is -1, the ranks that the others leave. `mesh=auto` plans them.

    `ep` counts no further ranks: among so many of `dp_shard` and `cp` (or of these and all of `tp`) experts are spread.
    """

    pp: AxisSize = 1
    dp_replicate: AxisSize = 1
    dp_shard: AxisSize = -1
    cp: AxisSize = 1
    tp: AxisSize = 1
    ep: Positive = 1


AUTO = MeshConfig(dp_replicate=-1, dp_shard=-1, cp=-1, tp=-1)  # what `mesh=auto` stands for until a plan is made


@dataclass(frozen=True)
class CastConfig:
    """Dtype in which parameters are used and gradients are reduced; null keeps the master weights' own.

    `ops` are patterns of operators and the least dtype they compute in, `modules` of modules and theirs.
    """

    param_dtype: Dtype | None = None
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
    or blocks of at most `block` tokens, dealt for each batch by the work that its documents make; auto: blocks where
    documents decide what attention sees (`passes/context/lay_out.py`). With `skip_steps`, steps of a ring at which no
    rank sees anything in a batch send nothing.
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
    """What the backward recomputes; `regather` gathers parameters again for it (ZeRO-3, else ZeRO-2).

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
class ScheduleConfig:
    """How collectives are merged (0 MiB: none are), and how many layers ahead they start (0: the order stays)."""

    bucket_mib: NonNegativeFloat = 25.0
    ahead: Count = 1


@dataclass(frozen=True)
class SegmentConfig:
    """How the finished program is cut for compilation: where layers begin, and before a piece exceeds `max_nodes`.

    Not `enabled`, the whole program is compiled as one.
    """

    enabled: bool = True
    max_nodes: Positive = 1000


@dataclass(frozen=True)
class PassesConfig:
    """Options of each pass, and how much of its result is verified.

    With `roll`, one layer stands for those that are like it while passes run.
    """

    cast: CastConfig = field(default_factory=CastConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    chunk_loss: ChunkLossConfig = field(default_factory=ChunkLossConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    segment: SegmentConfig = field(default_factory=SegmentConfig)
    roll: bool = True
    verify: Literal["off", "spec", "numeric"] = "spec"


@dataclass(frozen=True)
class LowerConfig:
    """What runs the final graph; with `cudagraphs` its launches are recorded once, on CUDA, and replayed."""

    backend: Literal["inductor", "eager"] = "inductor"
    cudagraphs: bool = False


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint every `interval` steps and after the last; `resume` is a checkpoint folder, `latest` or `auto`.

    `auto` is the latest one if there is any, else the beginning. What is kept are the newest `keep`, those of every
    `keep_every`-th step, and the `keep_best` of the lowest held-out loss.
    """

    enabled: bool = True
    interval: Positive = 500
    keep: Positive = 2
    keep_every: Count = 0  # 0: none
    keep_best: Count = 0
    dir: str | None = None  # null: checkpoints/ in the run folder
    resume: str | None = None
    allow: tuple[str, ...] = ()  # options, or groups of them, that may differ from those of the run that is resumed
    frozen: bool = True  # whether parameters that are not trained are stored; else they are read where they came from


@dataclass(frozen=True)
class EvalConfig:
    """Held-out loss over `batches` global batches every `interval` steps; 0 never evaluates."""

    interval: Count = 50
    batches: Positive = 4


@dataclass(frozen=True)
class RunConfig:
    """Where the run's files go, by default a new folder named by the local time, and what is written there.

    `profile` records steps 3 to 5 of rank 0 as trace.json.gz, to be opened in Perfetto. The step in which `time_limit`
    ends is the last, and a checkpoint is taken; reading data and compiling are part of the time.
    """

    dir: str = field(default_factory=lambda: datetime.now().strftime("runs/%Y-%m-%d_%H-%M-%S"))
    dump_graphs: bool = True
    profile: bool = False
    time_limit: TimeLimit = None  # seconds, or as `2h30m`
    pace_interval: Count = 100  # every so many steps ranks compare how long they compute and wait; 0: never
    timeout_s: PositiveFloat = 600.0  # a rank that does not move for so long while training ends the job
    dry: bool = False  # compile for the mesh and predict what `cluster` would make of it; nothing is run


Recompute = Literal["none", "selective", "attention", "every_second", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class PlanConfig:
    """What `compiler-trainer plan` and `mesh=auto` may choose, and how thoroughly they look (docs/21-plan.md).

    What is stated on the command line is kept. `recompute` lists what `passes.remat.policy` may become (every_second
    is every_n with 2); where one of them does not fit, another may take some of the layers.
    """

    compile: Positive = 12  # of the best by closed forms so many are compiled
    recompute: tuple[Recompute, ...] = RECOMPUTE
    bfloat16: bool = True  # whether to compute in bfloat16 may be chosen, where passes.cast.param_dtype is null
    float8: bool = False  # whether products in float8 may be
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
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)


PLAIN_HEADS = (None, "none", None)


def save(cfg: Config, path: Path) -> None:
    """Write `cfg` as YAML that `load` reads back."""
    put(path, OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg))))


def load(path: Path) -> Config:
    """The config saved at `path`; raises UserError naming the file and the option at fault."""
    options = yamls.load(path)
    try:
        cfg = build(Config, options)
    except UserError as error:
        raise UserError(f"{path}: {error.where}", error.message) from error
    if missing := [group for group in option_names(Config) if group not in options]:
        fix = f"if it was not cut short, write {missing[0]}: {{}} for the defaults"
        raise UserError(str(path), f"lacks {', '.join(missing)}, which a run writes; {fix}")
    return cfg
