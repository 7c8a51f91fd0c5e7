"""All options of a run: one frozen dataclass for each group of options.

A class docstring and the comment after a field are the descriptions that `--help` and docs/reference/options.md show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from compiler_trainer.config.cluster import AUTO_CLUSTER, ClusterConfig
from compiler_trainer.config.earlier import load_options
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import load_yaml, write_atomically
from compiler_trainer.config.options import (  # noqa: F401  # build: re-exported
    AxisSize,
    Chosen,
    Count,
    Epsilon,
    Fraction,
    Interval,
    Layers,
    MoreThanOne,
    Must,
    NonNegativeFloat,
    OpenFraction,
    Own,
    Positive,
    PositiveFloat,
    RopeBase,
    RowLength,
    Seed,
    Text,
    build,
    is_length,
    one_of,
)
from passes.memory.policies import SAVE, Action, OfLayer, Policy
from passes.precision.sensitive import OPS

Dtype = Literal["float32", "bfloat16"]


REFERENCE = ("reference_chosen", "reference_rejected", "reference_unrelated")  # log-probabilities, entries of a batch
ANSWER_REFERENCE = ("reference_answer", "reference_unrelated")  # the same of single answers
PASSAGES = {"passages": ("positive",), "triplets": ("positive", "negative")}  # fields and entries of a kind of records
EIGHT_BITS: dict[str, Literal["int8", "float8"]] = {"adamw8bit": "int8", "adamwfp8": "float8"}


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary positions for longer sequences, as in Llama 3.1 (arXiv:2407.21783)."""

    factor: PositiveFloat  # divide low rotary frequencies by this
    low_freq_factor: PositiveFloat  # frequencies with fewer turns in the original context are fully scaled
    high_freq_factor: PositiveFloat  # frequencies with more turns in the original context stay
    original_max_position: Positive  # the original context, in tokens


@dataclass(frozen=True)
class LatentConfig:
    """The sizes of multi-head latent attention: keys and values are computed from few features.

    Source: DeepSeek-V2, arXiv:2405.04434.
    """

    kv_rank: Positive  # features of a token that its keys and values are computed from
    nope_dim: Positive  # features of a head's query and key without rotary positions
    rope_dim: Positive  # features with rotary positions; those of the key are shared by all heads
    v_dim: Positive  # features of a head's value
    q_rank: Positive | None = None  # features that queries are computed from; null: the layer's input itself


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: each token goes through a few of many feed-forward layers.

    The router's scores of the chosen experts, times `scale`, weight the outputs (or inputs) of these experts. The code
    is in `compiler_trainer/models/experts.py` and `router.py`.
    """

    count: Positive  # number of routed experts in a layer
    top_k: Positive  # experts that each token goes through
    width: Positive  # hidden features of one expert
    shared: Count = 0  # additional experts that every token goes through
    dense_layers: Count = 0  # number of first layers without experts
    every: Positive = 1  # after these, every n-th layer has experts
    score: Literal["softmax", "sigmoid"] = "softmax"  # function from router logits to scores
    groups: Positive = 1  # groups of neighbouring experts; a token first chooses `top_groups` of them
    top_groups: Positive = 1  # groups from which a token chooses its experts
    normalize: bool = True  # divide the scores of the chosen experts by their sum
    scale: PositiveFloat = 1.0  # factor of the scores
    weigh: Literal["output", "input"] = "output"  # multiply the experts' outputs, or their inputs, by the scores
    balance_loss: NonNegativeFloat = 0.0  # weight of the auxiliary loss against uneven load, which is 1 at even load
    bias_rate: NonNegativeFloat = 0.0  # step of the load-balancing bias on scores in each training forward; 0: no bias

    def are_in(self, layer: int) -> bool:
        """Return True if layer number `layer`, counted from 0, has experts."""
        return layer >= self.dense_layers and (layer + 1 - self.dense_layers) % self.every == 0


@dataclass(frozen=True)
class MtpConfig:
    """Multi-token prediction: further layers that predict the tokens after the next one, in training only.

    The loss gains `weight` times the mean of their losses (DeepSeek-V3, arXiv:2412.19437, section 2.2).
    """

    layers: Positive = 1  # number of layers; the k-th predicts the token k after the next one
    weight: PositiveFloat = 0.3  # weight of the mean of their losses; 0.3 and later 0.1 in DeepSeek-V3


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. The defaults are those of `llama_debug`; its vocabulary is 256 bytes and an end-of-document token."""

    name: str = "llama_debug"  # name of the shape, for reports
    dim: Positive = 256  # features of a token (hidden size)
    n_layers: Layers = 4  # number of layers
    n_heads: Positive = 8  # attention heads
    n_kv_heads: Positive = 4  # key-value heads; fewer than n_heads: grouped-query attention
    ffn_dim: Positive = 768  # hidden features of the feed-forward layers
    vocab_size: Positive = 257  # size of the vocabulary; at least the tokenizer's
    norm_eps: Epsilon = 1e-5  # epsilon of the norms (RMSNorm)
    rope_theta: RopeBase = 10_000.0  # base of the rotary positions (RoPE)
    rope_scaling: RopeScaling | None = None
    tied: bool = False  # use the token embedding as the output layer, too
    attention: Literal["causal", "documents"] = "causal"  # causal over the sequence, or within each of its documents
    head_dim: Positive | None = None  # features of a head; null: dim / n_heads
    qk_norm: Literal["none", "learned", "plain"] = "none"  # RMSNorm of each head's query and key; plain: no weights
    nope_every: Positive | None = None  # every n-th layer has neither rotary positions nor `qk_norm`; null: none
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    mtp: MtpConfig | None = None


@dataclass(frozen=True)
class LoraConfig:
    """The low-rank terms that are trained instead of the weights of linear layers (LoRA, arXiv:2106.09685; `peft`)."""

    rank: Positive = 8  # rank of the terms
    alpha: PositiveFloat = 16.0  # a term is multiplied by alpha / rank
    rslora: bool = False  # or by alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)
    dora: bool = False  # the term changes a weight's direction, and its length is trained, too (DoRA, arXiv:2402.09353)
    dropout: OpenFraction = 0.0  # dropout on the input of a term
    targets: tuple[str, ...] = ()  # names of layers, or all-linear; none: peft's usual layers for this kind of model


Quantization = Literal["nf4", "mxfp4", "nvfp4", "int8"]
Head = Literal["lm", "score", "none"]


@dataclass(frozen=True)
class FolderMtpConfig:
    """Multi-token prediction of a folder: train the layers of its files that predict the tokens after the next one.

    Without, they are copied to exports as they are. DeepSeek-V3 and GLM-4.5 have such layers (`num_mtp_layers` in
    config.json).
    """

    weight: PositiveFloat = 0.3  # weight of the mean of their losses; 0.3 and later 0.1 in DeepSeek-V3


@dataclass(frozen=True)
class FolderConfig:
    """A causal language model in transformers' format, with config.json, safetensors and a tokenizer (`model=hf`).

    With `attention=documents`, positions start again at each document of a sequence, and attention stays within it.
    With `causal`, a sequence is one text.
    """

    path: str  # a folder, also s3://bucket/folder, or a model of the hub: organization/name, with @revision
    name: str = "hf"  # name of the model, for reports
    init: Literal["weights", "random"] = "weights"  # load the folder's weights, or start from random ones
    attention: Literal["documents", "causal"] = "documents"  # causal within each document of a sequence, or over all
    lora: LoraConfig | None = None
    quantize: Quantization | None = None  # store linear layers under LoRA, and experts, in 4 or 8 bits (QLoRA)
    head: Head = "lm"  # logits of tokens; scores, one for each of data.labels, or one for a reward; or hidden states
    mtp: FolderMtpConfig | None = None


def kind_of_time(value: Any) -> Any:
    """Return the type that a time must have: number or text."""
    return float | None if isinstance(value, int | float) else str | None


TimeLimit = Annotated[str | float | None, Chosen(kind_of_time, "seconds, or 2h30m | null")]


def kind_of_model(value: Any) -> Any:
    """Return the type of the options of `model`: a module of the user's, a folder, or a decoder."""
    keys = value if isinstance(value, Mapping) else ()
    return Own if "_target_" in keys else FolderConfig if "path" in keys else ModelConfig


def is_call(value: Any) -> bool:
    """Return True if the options have a `_target_`."""
    return isinstance(value.get("_target_"), str)


def is_none_or_call(value: Any) -> bool:
    """Return True if the options are empty, or have a `_target_`."""
    return not value or is_call(value)


@dataclass(frozen=True)
class PreferenceConfig:
    """A loss of preference pairs (`data.pairs`); if it has a reference model, training starts from the same weights."""

    name: Literal["dpo", "ipo", "simpo", "orpo", "cpo", "kto"]  # the built-in preference loss
    beta: PositiveFloat = 0.1  # how strongly the model is held to the reference
    nll_weight: NonNegativeFloat = 0.0  # weight of the negative log-likelihood of the chosen answers, a mean of tokens
    has_reference: ClassVar[bool] = True
    answers: ClassVar[int] = 2  # documents of a sequence


@dataclass(frozen=True)
class DpoConfig(PreferenceConfig):
    """The training loss. By default it is the cross-entropy of the next token.

    `loss._target_` names another function of (model, batch). Losses with a `name` compare the answers of `data.pairs`;
    `loss=grpo` and `loss=gkd` train on sampled answers to `data.prompts`. `loss=dpo` is direct preference optimization
    (arXiv:2305.18290); the reference model of `dpo`, `ipo` and `kto` has the weights that training starts from.
    """

    name: Literal["dpo"]  # the built-in preference loss
    label_smoothing: OpenFraction = 0.0  # assumed share of pairs whose labels are swapped


@dataclass(frozen=True)
class IpoConfig(PreferenceConfig):
    """Identity preference optimization (arXiv:2310.12036): the margin of two answers has a target, 1 / (2 beta)."""

    name: Literal["ipo"]  # the built-in preference loss
    beta: PositiveFloat = 0.1  # how strongly the model is held to the reference (tau in the paper)


@dataclass(frozen=True)
class SimpoConfig(PreferenceConfig):
    """Simple preference optimization (arXiv:2405.14734): mean log-probabilities of tokens, without a reference."""

    name: Literal["simpo"]  # the built-in preference loss
    beta: PositiveFloat = 2.0  # factor of the mean log-probability of an answer's tokens
    gamma: NonNegativeFloat = 1.0  # target of the margin between two answers
    has_reference: ClassVar[bool] = False


@dataclass(frozen=True)
class OrpoConfig(PreferenceConfig):
    """Odds ratio preference optimization (arXiv:2403.07691): fine-tuning on chosen answers that avoids rejected ones.

    There is no reference, and training may start from a model without fine-tuning.
    """

    name: Literal["orpo"]  # the built-in preference loss
    beta: PositiveFloat = 0.1  # weight of the odds ratio (lambda in the paper)
    nll_weight: NonNegativeFloat = 1.0  # weight of the negative log-likelihood of the chosen answers, a mean of tokens
    has_reference: ClassVar[bool] = False


@dataclass(frozen=True)
class CpoConfig(PreferenceConfig):
    """Contrastive preference optimization (arXiv:2401.08417): DPO without a reference, and fine-tuning in one loss."""

    name: Literal["cpo"]  # the built-in preference loss
    beta: PositiveFloat = 0.1  # factor of the log-probability of an answer
    nll_weight: NonNegativeFloat = 1.0  # weight of the negative log-likelihood of the chosen answers, a mean of tokens
    has_reference: ClassVar[bool] = False


@dataclass(frozen=True)
class KtoConfig(PreferenceConfig):
    """Kahneman-Tversky optimization (arXiv:2402.01306): chosen answers are desirable, rejected ones are not.

    With `data.records=answers`, the `label` of a single answer tells if it is desirable. A further document of each
    sequence, its prompt with another record's (chosen) answer, measures the distance to the reference. It is cut at the
    end of the sequence.
    """

    name: Literal["kto"]  # the built-in preference loss
    desirable_weight: PositiveFloat = 1.0  # weight of desirable answers (lambda_D in the paper)
    undesirable_weight: PositiveFloat = 1.0  # weight of the others (lambda_U)
    answers: ClassVar[int] = 3


PREFERENCE_LOSSES: dict[str, type[PreferenceConfig]] = {
    "dpo": DpoConfig,
    "ipo": IpoConfig,
    "simpo": SimpoConfig,
    "orpo": OrpoConfig,
    "cpo": CpoConfig,
    "kto": KtoConfig,
}


def is_server(value: str) -> bool:
    """Return True for the address of a server: scheme, host and port, without a path."""
    parts = urlsplit(value)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path in ("", "/") and not parts.query


Server = Annotated[str, Must("be the address of a server without a path, as http://localhost:8000", is_server)]
GroupSize = Annotated[int, Must("be at least 2: an answer is compared with the others of its group", lambda n: n >= 2)]


@dataclass(frozen=True)
class RolloutConfig:
    """A loss of answers to `data.prompts`, which the model or a server draws before a step."""

    name: Literal["grpo", "gkd"]  # the built-in loss
    group_size: Positive = 1  # answers to each prompt, a divisor of train.global_batch_size
    answer_tokens: Positive = 128  # most tokens of an answer
    temperature: PositiveFloat = 1.0  # logits are divided by it, in sampling and in the loss
    steps_per_rollout: Positive = 1  # answers are drawn for so many steps at once, with the weights before the first
    server: Server | None = None  # address of a vLLM or SGLang server that draws the answers; null: this process

    @property
    def entries(self) -> tuple[str, ...]:
        """The entries of a batch with log-probabilities of tokens, fp32 [B, T]."""
        return ()


@dataclass(frozen=True)
class GrpoConfig(RolloutConfig):
    """Group relative policy optimization of answers to `data.prompts` by `rewards` (GRPO, arXiv:2402.03300).

    Before a step, the model draws `group_size` answers to each of its prompts. The advantage of an answer is its reward
    minus the mean of its group. The terms of tokens are clipped as in PPO; the other options are those of later papers.
    """

    name: Literal["grpo"]  # the built-in loss of sampled answers
    group_size: GroupSize = 8  # answers to each prompt, a divisor of train.global_batch_size
    epsilon: PositiveFloat = 0.2  # ratios below 1 - epsilon are clipped
    epsilon_high: PositiveFloat | None = None  # ratios above 1 + epsilon_high are clipped, 0.28 in DAPO; null: epsilon
    importance: Literal["token", "sequence"] = "token"  # ratios of tokens, or of sequences (GSPO, arXiv:2507.18071)
    aggregation: Literal["sequence", "token", "constant"] = "sequence"  # GRPO, DAPO (2503.14476), Dr. GRPO (2503.20783)
    scale_rewards: bool = True  # divide advantages by the standard deviation of their group; false in Dr. GRPO
    beta: NonNegativeFloat = 0.0  # weight of the KL divergence to the weights that training starts from
    cap: PositiveFloat | None = 2.0  # most weight of a token by truncated importance sampling; null: weigh none

    @property
    def entries(self) -> tuple[str, ...]:
        """The entries of a batch with log-probabilities of tokens, fp32 [B, T]."""
        return "sampled", *["old"] * (self.steps_per_rollout > 1), *["reference"] * (self.beta > 0)


@dataclass(frozen=True)
class HeadLossConfig:
    """A loss of outputs other than next tokens, for which `model.head` has to be `head`."""

    name: Literal["reward", "classify", "embed"]  # the built-in loss
    head: ClassVar[Head] = "score"
    records: ClassVar[tuple[str, ...]] = ("documents",)  # of the data


@dataclass(frozen=True)
class RewardConfig(HeadLossConfig):
    """A reward model of preference pairs (Bradley-Terry): the chosen answer should have the higher score.

    Source: InstructGPT, equation 1 of arXiv:2203.02155. An answer's score is that of its last token. With
    `data.margins`, scores should differ by more than a pair's margin (Llama 2, equation 2 of arXiv:2307.09288).
    """

    name: Literal["reward"]  # the built-in loss
    center: NonNegativeFloat = 0.0  # weight of the squared sum of a pair's scores, 0.01 in arXiv:2312.09244


@dataclass(frozen=True)
class ClassifyConfig(HeadLossConfig):
    """The cross-entropy of the classes of texts (`data.records=classes`), each from the scores of its last token."""

    name: Literal["classify"]  # the built-in loss
    records: ClassVar[tuple[str, ...]] = ("classes",)


@dataclass(frozen=True)
class EmbedConfig(HeadLossConfig):
    """A contrastive loss of embeddings (InfoNCE): a query should be nearer to its own passage than to those of others.

    Sources: equation 4 of arXiv:1807.03748; with `data.records=triplets` equation 5 of arXiv:2104.08821. The other
    passages are those of the global batch, on all ranks, but for passages equal to the query's own. Similarity is the
    cosine over `temperature`.
    """

    name: Literal["embed"]  # the built-in loss
    pooling: Literal["mean", "last"] = "mean"  # the embedding is the mean of a text's hidden states, or its last one
    temperature: PositiveFloat = 0.05  # similarities are divided by it
    head: ClassVar[Head] = "none"
    records: ClassVar[tuple[str, ...]] = ("passages", "triplets")


@dataclass(frozen=True)
class DistillConfig:
    """Distillation (arXiv:1503.02531): the divergence between the next-token distributions of a teacher and the model.

    The loss is (1 - ce_weight) * temperature^2 * divergence + ce_weight * cross-entropy, a mean of
    tokens with labels. The teacher has the model's tokenizer. It is sharded like the model, and is in no checkpoint.
    """

    name: Literal["distill"]  # the built-in loss
    teacher: str = ""  # the teacher's folder, also s3://bucket/folder, or a model of the hub, as model.path
    divergence: Literal["forward", "reverse"] = "forward"  # KL(teacher || model), or KL(model || teacher)
    temperature: PositiveFloat = 1.0  # logits of both are divided by it
    ce_weight: OpenFraction = 0.0  # share of the cross-entropy of the labels in the loss


@dataclass(frozen=True)
class GkdConfig(RolloutConfig):
    """On-policy distillation: the divergence from a teacher on answers that the model draws (GKD, arXiv:2306.13649).

    The loss is temperature^2 * divergence, a mean of the answers' tokens; draws have no gradient (equation 3 with
    lambda = 1). The teacher is as that of `loss=distill`.
    """

    name: Literal["gkd"]  # the built-in loss
    teacher: str = ""  # the teacher's folder, also s3://bucket/folder, or a model of the hub, as model.path
    divergence: Literal["forward", "reverse"] = "reverse"  # KL(teacher || model), or KL(model || teacher)
    ce_weight: ClassVar[float] = 0.0


DistillationConfig = DistillConfig | GkdConfig  # losses with a teacher
LOSSES: dict[str, type[PreferenceConfig | RolloutConfig | DistillConfig | HeadLossConfig]] = {
    **PREFERENCE_LOSSES,
    "grpo": GrpoConfig,
    "gkd": GkdConfig,
    "distill": DistillConfig,
    "reward": RewardConfig,
    "classify": ClassifyConfig,
    "embed": EmbedConfig,
}


def kind_of_loss(value: Any) -> Any:
    """Return the type of the options of `loss`: a built-in loss, or the user's own."""
    if not isinstance(value, Mapping) or "name" not in value:
        return OwnLoss
    return LOSSES[one_of(tuple(LOSSES), value["name"], "loss.name")]


Model = Annotated[ModelConfig | FolderConfig | Own, Chosen(kind_of_model)]
OwnLoss = Annotated[Own, Must("have a _target_, the dotted name of a function of (model, batch)", is_none_or_call)]
Loss = Annotated[
    PreferenceConfig | GrpoConfig | GkdConfig | DistillConfig | HeadLossConfig | Own, Chosen(kind_of_loss)
]
Called = Annotated[Own, Must("have a _target_, the dotted name of a class or function", is_call)]
Target = Annotated[str, Must("be the dotted name of a class or function", bool)]


Records = Literal["documents", "classes", "passages", "triplets", "answers"]
DataKind = Literal["stdlib", "text", "synthetic", "hf_dataset", "tokens", "mixture", "prompts", "custom"]


@dataclass(frozen=True)
class SourceConfig:
    """A source of documents: files, a dataset, token ids, or the user's own dataset.

    `files` are .txt, .jsonl, .csv and .tsv (also .gz or .zst), .json, .parquet, .arrow and .feather, on disk or in a
    store. A .txt file is one document, or several between `document_separator`s. A record has its text, or its token
    ids, in `text_column`. A .bin file, with Megatron's .idx or alone, and a .npy file hold token ids. With `custom`,
    samples are the items of the dataset that `_target_` makes from `arguments` (docs/guides/your-loop.md).
    """

    name: DataKind = "text"  # kind of source
    files: tuple[str, ...] = ()  # with data=text: files, folders and globs, on disk or in a store (s3://bucket/folder)
    tokens: str | None = None  # with data=tokens: a folder that `compiler-trainer tokenize` wrote
    document_separator: Text | None = None  # text between the documents of a .txt file; null: a file is one document
    text_column: str = "text"  # field of a record with its text, or with its token ids
    path: str | None = None  # with data=hf_dataset: a folder, or the name of a dataset on the hub
    configuration: str | None = None  # configuration of the dataset, if it has several
    split: str = "train"  # split of the dataset, or a part of it, as train[:10%]
    documents: Positive = 2000  # number of documents of data=synthetic
    _target_: Target | None = None  # with data=custom: your dataset, whose items are samples
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments of `_target_`


@dataclass(frozen=True)
class WeightedSource(SourceConfig):
    """One of several sources: its share of all trained sequences is `weight` over the sum of all weights."""

    weight: PositiveFloat = 1.0  # share of the source, relative to the other weights


STREAM_WINDOW = 2**23  # tokens


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The training data: one source, or several `sources` (docs/guides/your-data.md).

    A `data.tokenizer` file is loaded by transformers, with the files next to it. With `model=hf` the tokenizer is the
    one of the model's folder. Recipes for another vocabulary leave `data.tokenizer` empty, so you must set it.

    With `data.chat`, records hold `messages` (OpenAI), `conversations` (ShareGPT), `prompt` and `completion`, or
    `instruction`, `input` and `output` (Alpaca); the fields of a record tell its format. The tokenizer's chat template
    turns them into text. With `images_per_row`, a message may have parts with images (docs/guides/images.md).
    """

    name: DataKind = "stdlib"
    prompts: tuple[str, ...] = ()  # with data=prompts: .jsonl files of records with a `prompt`, a text or messages
    sources: tuple[WeightedSource, ...] = ()  # with data=mixture: several sources, each with a weight
    validation: tuple[WeightedSource, ...] = ()  # validation data; if empty, `eval_fraction` of the training data
    tokenizer: str = "bytes"  # `bytes`, or the path of a tokenizer.json
    eos_token: Text | None = None  # token at the end of a document; null: the tokenizer's own eos_token
    add_bos_token: bool | None = None  # start each text with the bos_token; null: as the tokenizer does
    chat: bool = False  # records are conversations; only the assistant's answers count in the loss
    pairs: bool = False  # with `chat`: a record has a `prompt`, a `chosen` and a `rejected` answer, all in one sequence
    margins: bool = False  # with `pairs`: a record has a `margin`, by which its answers' scores should differ
    records: Records = "documents"  # or: texts with a `label`; queries with one or two passages; answers with a `label`
    labels: tuple[str, ...] = ()  # with records=classes: the names of the classes
    images_per_row: Count = 0  # with `chat`: images of a sequence; train the folder's vision-language model on them
    image_size: tuple[Positive, Positive] | None = None  # resize images to (height, width) first; null: do not
    image_tokens_per_row: Positive | None = None  # of a sequence, if images have any sizes; null: those of `image_size`
    train_on: Literal["all", "last"] = "all"  # with `chat`: count all answers of a conversation, or only the last one
    packing: Literal["auto", "cut", "fit"] = "auto"  # cut documents to length, or fit whole ones; auto: fit if chat
    bad_records: Literal["stop", "skip"] = "stop"  # stop at a record that cannot be used, or skip it
    eval_fraction: OpenFraction = 0.05  # share of each source's documents for validation, if `validation` is empty
    seed: Seed = 0  # seed of the order of the data
    stream: bool = False  # read files while training, without storing their tokens
    stream_window: Positive = STREAM_WINDOW  # with `stream`: tokens that are read, shuffled and packed together
    cache: str | None = None  # tokens and copies; null: compiler-trainer/tokens in $XDG_CACHE_HOME or ~/.cache
    cache_gib: PositiveFloat = 256.0  # above it, tokens unused for 30 days and copies unread for 10 minutes are deleted

    @property
    def packs(self) -> str:
        """The packing of documents. Conversations stay whole, so that no answer is separated from its question."""
        if self.pairs or self.records != "documents":
            return f"{'short ' * (self.bad_records == 'skip')}{'pairs' if self.pairs else self.records}"
        return self.packing if self.packing != "auto" else "fit" if self.chat else "cut"

    @property
    def has_values(self) -> bool:
        """True if a document has a number: its class, its pair's margin, or 1 for a desirable answer, otherwise 0."""
        return self.margins or self.records in ("classes", "answers")

    @property
    def has_groups(self) -> bool:
        """True if each sequence has the documents of one record, as those of pairs have."""
        return self.pairs or self.records in ("passages", "triplets", "answers")

    @property
    def has_counted(self) -> bool:
        """True if only some tokens of a document are labels."""
        return self.chat or self.records != "documents"

    @property
    def read(self) -> tuple[SourceConfig, ...]:
        """The sources of training documents."""
        return self.sources or (self,)

    @property
    def listed(self) -> tuple[SourceConfig, ...]:
        """All sources in the options: the main one, `sources` and `validation`."""
        return (self, *self.sources, *self.validation)

    @property
    def held_out(self) -> float:
        """The share of training documents that is used for validation instead."""
        return 0.0 if self.validation else self.eval_fraction


def kind_of_microbatches(value: Any) -> Any:
    """Return the type that `train.microbatches` must have."""
    return Literal["auto"] if isinstance(value, str) else Positive


Microbatches = Annotated[int, Chosen(kind_of_microbatches, "a whole number, at least 1 | auto")]
AUTOMATIC: Any = "auto"  # value of `train.microbatches` until it is planned


Length = Annotated[str, Must("be a number of steps, or epochs or tokens as 3epochs or 20Btokens", is_length)]


def kind_of_steps(value: Any) -> Any:
    """Return the type that `train.steps` must have."""
    return Length if isinstance(value, str) else Positive


Steps = Annotated[int, Chosen(kind_of_steps, "a whole number, at least 1 | 3epochs | 20Btokens")]
LONGEST = 2**62  # placeholder for a length in epochs or tokens until the data are read


def with_steps(cfg: Config, steps: int) -> Config:
    """Return `cfg` with `steps` as its number of steps."""
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=steps))


@dataclass(frozen=True)
class ReplicaCheckConfig:
    """A check for silent data corruption: ranks compare their copies of parameters and moments.

    They do so every `interval` steps and before each checkpoint and snapshot. If a bit differs, `stop` ends the run and
    names rank and tensor; `repair` copies the value that most ranks hold, if there is a majority; `leave_out` lets an
    elastic job go on without the other ranks, from the last snapshot.
    """

    interval: Interval | None = 100  # steps between comparisons; null: never
    action: Literal["stop", "repair", "leave_out"] = "stop"  # reaction to copies that differ


@dataclass(frozen=True)
class TrainConfig:
    """The length, batch and precision of training.

    The sequences of a step may be computed in several `microbatches`, one after the other, which needs less memory
    (gradient accumulation).
    """

    steps: Steps = 80  # optimizer steps, or a length in epochs or tokens: 3epochs, 20Btokens
    seq_len: RowLength = 256  # tokens per sequence
    global_batch_size: Positive = 16  # sequences per step, over all ranks
    microbatches: Microbatches = 1  # gradient accumulation: parts of a step's sequences; auto: as few as fit in memory
    batch_per_rank: Positive | None = None  # sequences of a rank in a microbatch, instead of `microbatches`
    seed: Seed = 0  # seed of initial weights and dropout
    deterministic: bool = False  # give the same bits in every run, at some loss of speed
    dtype: Dtype = "float32"  # dtype of the master weights; of compute: precision
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"  # at NaN: end, skip the update, or reload and skip the data
    replica_check: ReplicaCheckConfig = field(default_factory=ReplicaCheckConfig)
    ema: OpenFraction | None = None  # decay of an exponential moving average of the weights, as 0.999; null: no average
    callbacks: tuple[Called, ...] = ()  # run at steps, evaluations, checkpoints and the end (docs/guides/your-loop.md)


@dataclass(frozen=True)
class GroupConfig:
    """A parameter group: parameters of some kinds, or with names that match a pattern, and how they are updated."""

    kinds: tuple[Literal["vector", "embedding", "head", "router", "other"], ...] = ()  # docs/guides/optimizers.md
    names: tuple[str, ...] = ()  # patterns of parameter names, as `layers.*.norm.weight`
    lr: NonNegativeFloat = 1.0  # factor of optim.lr
    weight_decay: NonNegativeFloat | None = None  # null: optim.weight_decay
    optimizer: Literal["adamw", "muon"] | None = None  # with optim=muon: null is Muon for matrices, AdamW for the rest


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer. Options that neither conf/optim nor you set are off: weight decay, momentum, gradient clipping.

    With `custom`, `_target_` makes the optimizer from `arguments` (docs/guides/your-loop.md).
    """

    name: Literal["adamw", "adamw8bit", "adamwfp8", "muon", "sgd", "custom"] = "adamw"  # 8bit, fp8: formats of torchao
    lr: NonNegativeFloat = 1e-3  # peak learning rate
    betas: tuple[OpenFraction, OpenFraction] = (0.9, 0.999)  # AdamW's beta1 and beta2
    eps: Epsilon = 1e-8  # AdamW's epsilon
    momentum: OpenFraction = 0.0  # momentum of SGD and Muon
    weight_decay: NonNegativeFloat = 0.0  # decoupled weight decay, multiplied by the learning rate
    max_norm: PositiveFloat | None = None  # clip gradients to this norm; null: no clipping
    state: Dtype | None = None  # dtype of moments; null: the parameters' dtype
    block: Positive = 256  # entries of an 8-bit moment that share a scale
    stochastic_rounding: bool = False  # stochastic rounding of updated bf16 parameters
    groups: dict[str, GroupConfig] = field(default_factory=dict)  # parameter groups by name; the first match counts
    _target_: Target | None = None  # with optim=custom: a class with `moments`, `scalars` and `update`
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments of `_target_`


@dataclass(frozen=True)
class LrScheduleConfig:
    """The learning rate: linear warm-up to `optim.lr`, then decay to `min_ratio * optim.lr` at the end.

    The decay is in the last `decay_steps` of `train.steps`. Fractions are of `train.steps`, so a run that is resumed
    for more or fewer steps keeps the shape. With `custom`, the learning rate is `optim.lr` times the result of the
    function `_target_`.
    """

    name: Literal["constant", "cosine", "linear", "wsd", "custom"] = "constant"  # wsd: warm-up, stable, decay
    warmup_steps: Count | None = None  # steps of the warm-up; null: warmup_ratio of train.steps
    min_ratio: Fraction = 0.0  # learning rate at the end of the decay (one step after the last), as a share of optim.lr
    decay_steps: Count | None = None  # steps of the decay; null: decay_ratio of train.steps
    warmup_ratio: Fraction = 0.0  # warm-up as a share of train.steps
    decay_ratio: Fraction | None = None  # decay as a share of train.steps; null: all steps after the warm-up
    _target_: Target | None = None  # with lr_schedule=custom: a function of (step, steps); step counts from 1
    arguments: dict[str, Any] = field(default_factory=dict)  # further arguments of `_target_`, by name

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of `steps` steps."""
        return int(self.warmup_ratio * steps) if self.warmup_steps is None else self.warmup_steps

    def decay(self, steps: int) -> int | None:
        """Return the number of decay steps in a run of `steps` steps; None: all after the warm-up."""
        if self.decay_steps is not None or self.decay_ratio is None:
            return self.decay_steps
        return int(self.decay_ratio * steps)


@dataclass(frozen=True)
class MeshConfig:
    """The number of ranks along each axis; -1: all ranks that the other axes leave.

    If several axes are -1, they are planned. `mesh=auto` plans them all.
    """

    pp: AxisSize = 1  # pipeline parallelism: each rank has some of the layers
    dp_replicate: AxisSize = 1  # data parallelism with replicated parameters (DDP; with dp_shard HSDP)
    dp_shard: AxisSize = -1  # data parallelism with sharded parameters (FSDP, ZeRO)
    cp: AxisSize = 1  # context parallelism: the sequence is sharded
    tp: AxisSize = 1  # tensor parallelism: weights are split
    ep: Positive = 1  # expert parallelism over ranks of dp_shard and cp, or all of dp_shard, cp and tp; adds no ranks


AUTO = MeshConfig(dp_replicate=-1, dp_shard=-1, cp=-1, tp=-1)  # value of `mesh=auto` until a plan is made
PLANNED = ("dp_replicate", "dp_shard", "cp", "tp")


def open_axes(mesh: MeshConfig) -> list[str]:
    """Return the axes that are -1 and can be planned."""
    return [axis for axis in PLANNED if getattr(mesh, axis) == -1]


def is_open(cfg: Config) -> bool:
    """Return True if the mesh (several axes of -1) or the number of microbatches has to be planned."""
    return len(open_axes(cfg.mesh)) > 1 or cfg.train.microbatches == AUTOMATIC


def with_placeholders(cfg: Config) -> Config:
    """Return `cfg` with placeholders for planned options, so that all other options can be checked."""
    mesh = MeshConfig() if len(open_axes(cfg.mesh)) > 1 else cfg.mesh
    microbatches = 1 if cfg.train.microbatches == AUTOMATIC else cfg.train.microbatches
    return dataclasses.replace(cfg, mesh=mesh, train=dataclasses.replace(cfg.train, microbatches=microbatches))


@dataclass(frozen=True)
class CastConfig:
    """The dtypes of parameters in compute and of reduced gradients (mixed precision); null: the master weights' dtype.

    `param_dtype=auto` is null on a CPU, and bfloat16 on a GPU, with gradients reduced in float32. Keys of `ops` and
    `modules` are patterns of names.
    """

    param_dtype: Literal["auto", "float32", "bfloat16"] | None = "auto"  # dtype of parameters in compute
    reduce_dtype: Dtype | None = None  # dtype of gradient reductions
    output_dtype: Dtype | None = None  # dtype of the model's output, the loss's input
    ops: dict[str, Dtype] = field(default_factory=OPS.copy)  # least dtype of operators
    modules: dict[str, Dtype] = field(default_factory=dict)  # dtype of modules
    float8: Literal["tensorwise", "rowwise"] | None = None  # scaling of float8 linear layers; null: no float8
    float8_skip: tuple[str, ...] = ()  # patterns of modules without float8
    float8_min_size: Positive = 16  # float8 only for weights whose dims are both at least this
    float8_head: bool = False  # float8 for the last linear layer, too


@dataclass(frozen=True)
class ShardConfig:
    """The sharding of parameters and activations."""

    plan: dict[str, dict[str, int]] | None = None  # overrides by pattern of parameter names: {axis: dim}
    sequence_parallel: bool = True  # shard activations along the sequence between tensor-parallel layers
    strict: bool = False  # refuse operators without a sharding rule, instead of gathering their operands
    min_shard_elements: Positive = 1  # smaller parameters are not sharded over dp_shard and cp
    tower: Literal["weights", "data"] = "weights"  # what ranks of tp share of a vision tower: its weights, or images


@dataclass(frozen=True)
class MoeConfig:
    """The exchange of tokens with experts that `mesh.ep` spreads over ranks (docs/guides/experts.md).

    A `bounded` buffer has room for `capacity_factor` times an even share of the tokens; tokens beyond that are dropped.
    With several `chunks`, one chunk travels while another is computed.
    """

    dispatch: Literal["auto", "all_gather", "dropless", "bounded"] = "auto"  # how ranks exchange tokens and results
    capacity_factor: PositiveFloat = 1.25  # with dispatch=bounded: size of a buffer, in even shares
    chunks: Positive = 1  # parts in which tokens are sent


@dataclass(frozen=True)
class ContextConfig:
    """Attention over a sequence that `mesh.cp` shards (docs/guides/long-sequences.md).

    `method=auto` takes the method with the least communication cost. `load_balance` decides which tokens a rank holds:
    a contiguous run (none), a chunk from the front and one from the back (head_tail), or blocks of at most `block`
    tokens, assigned for each batch by the work in its documents (blocks); auto: blocks if attention stays within
    documents (`passes/context/sequence_layout.py`).
    """

    method: Literal["auto", "ring", "all_gather", "ulysses", "hybrid"] = "auto"  # how ranks exchange keys and values
    load_balance: Literal["auto", "head_tail", "blocks", "none"] = "auto"  # which tokens a rank holds
    block: Positive = 128  # most tokens of a block, with load_balance=blocks
    skip_steps: bool = True  # send nothing in ring steps in which no rank attends to anything


@dataclass(frozen=True)
class ChunkLossConfig:
    """The head and the loss are computed in chunks of a rank's tokens, so that logits take less memory."""

    chunks: Positive | None = None  # number of chunks; null: as many as keep the logits of a chunk within logits_mib
    logits_mib: PositiveFloat = 1024.0  # most memory for the logits of a chunk, with chunks=null


@dataclass(frozen=True)
class RematConfig:
    """The recomputation in the backward pass (activation checkpointing; docs/guides/out-of-memory.md).

    Keys of `layers`, `modules` and `ops` are patterns of names; `layers` gives some layers another policy, `modules`
    and `ops` decide on single values.
    """

    policy: Policy = "selective"  # results kept for the backward
    regather: bool = True  # gather parameters again for the backward (ZeRO-3) instead of keeping them (ZeRO-2)
    save: tuple[str, ...] = SAVE  # operators whose results are kept with policy=selective
    every_n: Positive = 2  # with policy=every_n: recompute every n-th layer
    budget_gib: PositiveFloat | None = None  # with policy=budget: peak memory of a rank; null: that of a GPU of cluster
    headroom: OpenFraction = 0.04  # share of the budget left free: Inductor's buffers exceed the estimate by up to 3 %
    layers: dict[str, OfLayer] = field(default_factory=dict)  # policy by pattern of layers
    modules: dict[str, Action] = field(default_factory=dict)  # action by pattern of modules
    ops: dict[str, Action] = field(default_factory=dict)  # action by pattern of operators


@dataclass(frozen=True)
class CommunicationConfig:
    """The merging of collectives, and their overlap with compute.

    `async_tp` computes matmuls in pieces that overlap the steps of a ring, instead of after an all-gather or before a
    reduction: `all` does so wherever possible, `auto` only if the step predicted on `cluster` gets shorter.
    `batch_overlap` computes several microbatches in turns in one program: while one waits for other ranks, another
    computes (two-batch overlap).
    """

    bucket_mib: NonNegativeFloat = 25.0  # merge collectives up to this size; 0: merge none
    prefetch: Count = 1  # start collectives this many layers early; 0: keep their order
    async_tp: Literal["none", "auto", "all"] = "none"  # overlap matmuls with tensor-parallel collectives
    batch_overlap: Positive = 1  # microbatches per program; a divisor of train.microbatches


@dataclass(frozen=True)
class SegmentConfig:
    """The cuts in the finished program for compilation: at layer boundaries, and before a piece exceeds `max_nodes`."""

    max_nodes: Positive | None = 1000  # most nodes of a piece; null: compile the whole program at once


@dataclass(frozen=True)
class AccumulateConfig:
    """The work that a step with several microbatches does once per step, or once per microbatch.

    Once per step needs less communication, but keeps full weights, or full gradients, in memory for the whole step.
    auto: once per step if `mesh.pp` is more than 1. Gradients are added up in `dtype` or in their own, whichever is
    wider; null: in their own, which with `train.dtype=bfloat16` rounds away small terms of many microbatches.
    """

    gather: Literal["auto", "step", "microbatch"] = "auto"  # gather sharded parameters once per step, or microbatch
    reduce: Literal["auto", "step", "microbatch"] = "auto"  # reduce gradients once per step, or microbatch
    dtype: Dtype | None = "float32"  # least dtype of accumulated gradients; null: their own


@dataclass(frozen=True)
class PipelineConfig:
    """The stages of a pipeline and their schedule, if `mesh.pp` is more than 1 (docs/guides/pipeline.md)."""

    schedule: str = "1f1b"  # gpipe, 1f1b, interleaved, zero_bubble, zbv, auto, or a file
    stages: tuple[int, ...] = ()  # number of layers of each stage; empty: as even as possible
    chunks: Positive = 2  # with schedule=interleaved: stages per rank


@dataclass(frozen=True)
class PassesConfig:
    """The compiler passes, and the verification of their results."""

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
    extra: tuple[Called, ...] = ()  # your own passes, inserted by stage (docs/guides/write-a-pass.md)
    rules: tuple[str, ...] = ()  # modules to import that add rules for operators (docs/guides/add-a-rule.md)
    fold_layers: bool = True  # run the passes on one of several equal layers, and copy the result
    verify: Literal["none", "spec", "numeric"] = "spec"  # check after each pass; numeric also runs the program


def kind_of_cudagraphs(value: Any) -> Any:
    """Return the type that `lower.cudagraphs` must have."""
    return Literal["auto"] if isinstance(value, str) else bool


CudaGraphs = Annotated[bool, Chosen(kind_of_cudagraphs, "true or false | auto")]


@dataclass(frozen=True)
class LowerConfig:
    """The compilation and execution of the final graph.

    With `cudagraphs`, the launches of a step are recorded once, on CUDA, and replayed: `true` refuses a step that
    cannot be recorded, `auto` runs it without and logs the reason. A start reuses the programs that an earlier start
    compiled for the same captured graph, options and versions. `fast_start` uses PyTorch internals that may change with
    its version.
    """

    backend: Literal["inductor", "eager"] = "inductor"  # compile with Inductor, or run each operator by itself
    cudagraphs: CudaGraphs = False  # record the launches of a step and replay them
    programs: str | None = None  # a folder from `compiler-trainer compile`: run its program, and no other
    fast_start: bool = True  # build several C++ kernels at a time, instead of leaving them to Inductor


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint every `interval` steps and after the last.

    `resume=auto` starts from the latest checkpoint, or from the beginning if there is none. Each checkpoint is copied
    to `store`, where a run on another machine finds it.
    """

    interval: Interval | None = 500  # steps between checkpoints; null: none are written, not at the end either
    keep: Positive = 2  # keep this many of the newest checkpoints
    keep_every: Interval | None = None  # also keep the checkpoint of every n-th step; null: no more
    keep_best: Count = 0  # also keep this many checkpoints with the lowest validation loss
    dir: str | None = None  # folder of checkpoints; null: checkpoints/ in the run folder
    store: str | None = None  # folder of an object store to copy them to (s3://bucket/runs); null: no copies
    resume: str | None = None  # start from a checkpoint: a folder, latest, or auto; null: start from the beginning
    allow: tuple[str, ...] = ()  # options, or groups, that may differ from those of the resumed run
    frozen: bool = True  # also store parameters that no step changes; false: read them from their origin again

    @property
    def saves(self) -> bool:
        """Return True if the run writes checkpoints."""
        return self.interval is not None


@dataclass(frozen=True)
class EvalConfig:
    """The validation loss over `batches` global batches, every `interval` steps and at the end.

    At each evaluation the model also continues each of `prompts`, or answers it with `data.chat`.
    """

    interval: Interval | None = 50  # steps between evaluations; null: never (data.eval_fraction may be 0)
    batches: Positive | None = 4  # batches, the same each time, no sample twice; null: all validation data once
    patience: Positive | None = None  # early stopping: end after n evaluations without a lower loss; null: never
    prompts: tuple[Text, ...] = ()  # samples while training: texts to continue, written to samples.jsonl
    sample_tokens: Positive = 64  # most tokens added to a prompt


ExitCode = Annotated[int, Must("be from 0 to 255", lambda n: 0 <= n <= 255)]
Port = Annotated[int, Must("be from 1 to 65535", lambda n: 1 <= n <= 65535)]
StopSignal = Literal["TERM", "INT", "USR1", "USR2", "HUP"]


@dataclass(frozen=True)
class ExitCodes:
    """The exit codes by which an engine decides whether to start a run again; 0 is finished, 1 any other error.

    Errors that are found before the options are composed end with 2.
    """

    stopped: ExitCode = 3  # ended early, and saved: the same command continues
    repeating: ExitCode = 2  # would fail again: bad options, damaged files, too little memory, a NaN


@dataclass(frozen=True)
class RunConfig:
    """The run folder, the files written there, and the end of a run.

    `profile` writes trace.json.gz of rank 0, for Perfetto, and a summary of each rank's time. `memory_snapshot` writes
    memory_RANK.pickle. When `time_limit` is over, the run finishes its step, writes a checkpoint and ends; reading data
    and compiling count.
    """

    dir: str = field(default_factory=lambda: datetime.now().strftime("runs/%Y-%m-%d_%H-%M-%S"))  # the run folder
    dump_graphs: bool = True  # write the graph after each pass to graphs/
    profile: bool = False  # profile steps 3 to 5
    memory_snapshot: bool = False  # record GPU allocations for pytorch.org/memory_viz, also of a run out of memory
    loggers: tuple[Called, ...] = ()  # beside metrics.jsonl and TensorBoard: wandb, mlflow, or your own class
    time_limit: TimeLimit = None  # end after this time, with a checkpoint
    stop_signals: tuple[StopSignal, ...] = ("TERM", "INT", "USR1")  # end after the current step, with a checkpoint
    exit_codes: ExitCodes = field(default_factory=ExitCodes)
    pace_interval: Interval | None = 100  # ranks compare compute and waiting times every n steps; null: never
    elastic: bool = False  # go on with the other ranks if one is killed (compiler-trainer launch)
    snapshot_interval: Interval = 10  # steps between copies of the state in memory, for `elastic`
    compile_ahead: bool = True  # compile for one rank fewer in idle time, for `elastic`
    most_slowdown: MoreThanOne | None = None  # leave out a rank that is so many times slower, for `elastic`
    timeout_s: PositiveFloat = 600.0  # end the job if a rank makes no progress for this many seconds while training
    status_port: Port | None = None  # serve /healthz and /metrics (Prometheus) on rank 0
    status_host: str = "127.0.0.1"  # the address on which it serves them; 0.0.0.0 for all of the machine
    dry: bool = False  # compile for the mesh and predict the step on `cluster`; train nothing


Recompute = Literal["none", "selective", "attention", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class PlanConfig:
    """The choices of `compiler-trainer plan` and `mesh=auto`, and the number of settings that they compile.

    See docs/guides/plan.md. Options on the command line are kept. `recompute` lists the values that
    `passes.remat.policy` may take; if one of them does not fit in memory, another may replace it in some of the layers.
    """

    compile: Positive = 6  # number of settings to compile: the best by closed-form estimates
    recompute: tuple[Recompute, ...] = RECOMPUTE  # policies of recomputation to consider
    float8: bool = False  # consider float8 for linear layers that compute in bfloat16 otherwise
    processes: Positive | None = None  # processes that compile in parallel; null: one per core
    suggest: bool = True  # log at the start of a run if another mesh is predicted to be faster


@dataclass(frozen=True)
class Config:
    """All options of one run."""

    model: Model = field(default_factory=ModelConfig)
    loss: Loss = field(default_factory=dict)  # empty: next-token cross-entropy
    rewards: tuple[Target, ...] = ()  # with loss=grpo: functions of (records, answers) to numbers, which are added
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
        """Return True if the loss is a function of the user's."""
        return isinstance(self.loss, Mapping) and bool(self.loss)

    @property
    def has_preference_loss(self) -> bool:
        """Return True if the loss is a built-in one of preference pairs."""
        return isinstance(self.loss, PreferenceConfig)

    @property
    def loss_name(self) -> str:
        """The name of the loss."""
        return "cross_entropy" if isinstance(self.loss, Mapping) else self.loss.name

    @property
    def compares_pairs(self) -> bool:
        """Return True if the loss is a built-in one that needs `data.pairs`."""
        return isinstance(self.loss, PreferenceConfig | RewardConfig)

    @property
    def records(self) -> tuple[str, ...]:
        """The kinds of records (`data.records`) that the loss can take."""
        if isinstance(self.loss, HeadLossConfig):
            return self.loss.records
        return ("documents", "answers") if isinstance(self.loss, KtoConfig) else ("documents",)

    @property
    def head(self) -> str:
        """The head of the model: that of a folder, and `lm` for other models."""
        return self.model.head if isinstance(self.model, FolderConfig) else "lm"

    @property
    def sees(self) -> bool:
        """True if a vision-language model is trained on images."""
        return self.data.images_per_row > 0

    @property
    def takes_images(self) -> bool:
        """True if the model, the data and the loss can have images."""
        is_chat = self.data.chat and not self.data.pairs and self.data.packing != "cut"
        sources = {source.name for source in (*self.data.read, *self.data.validation)}
        has_records = is_chat and sources <= {"text", "hf_dataset"}
        return self.head == "lm" and isinstance(self.model, FolderConfig) and has_records and not self.loss

    @property
    def has_rollouts(self) -> bool:
        """Return True if the loss is of answers that the model draws while it trains."""
        return isinstance(self.loss, RolloutConfig)

    @property
    def steps_per_rollout(self) -> int:
        """The number of steps that only a run as a whole can take: those that share a rollout, otherwise 1."""
        return self.loss.steps_per_rollout if isinstance(self.loss, RolloutConfig) else 1

    @property
    def reference_entries(self) -> tuple[str, ...]:
        """Return the entries of a batch with log-probabilities of a reference; none if the loss needs no reference."""
        if not isinstance(self.loss, PreferenceConfig) or not self.loss.has_reference:
            return ()
        if self.data.records == "answers":
            return ANSWER_REFERENCE
        return REFERENCE[: self.loss.answers]


PLAIN_HEADS = (None, "none", None)


def save(cfg: Config, path: Path, head: str = "") -> None:
    """Write `cfg` to `path` as YAML that `load` reads back, after the comment `head`."""
    write_atomically(path, head + as_yaml(cfg))


def as_yaml(cfg: Config) -> str:
    """Return all options as YAML."""
    options = dataclasses.asdict(cfg)
    if cfg.cluster.name == AUTO_CLUSTER.name:  # its figures are those of no machine
        options["cluster"] = {"name": cfg.cluster.name, "gpus": cfg.cluster.gpus}
    return OmegaConf.to_yaml(OmegaConf.create(options))


# The groups that every run writes. Groups added later may be missing in files of earlier runs: they have the defaults.
WRITTEN = (
    "model", "loss", "data", "train", "optim", "lr_schedule", "mesh", "passes", "lower", "checkpoint", "eval", "run",
    "cluster", "plan",
)  # fmt: skip


def load(path: Path) -> Config:
    """Return the config saved at `path`; raise UserError naming the file and the option at fault."""
    options = load_yaml(path)
    try:
        cfg = load_options(Config, options, str(path))
    except UserError as error:
        raise UserError(f"{path}: {error.place}", error.message) from error
    if missing := [group for group in WRITTEN if group not in options]:
        fix = f"if it was not cut short, write {missing[0]}: {{}} for the defaults"
        raise UserError(str(path), f"lacks {', '.join(missing)}, which a run writes; {fix}")
    return cfg
