"""The architectures that are written as GGUF: llama.cpp's names, its options, and the options it does not have.

    config.json: model_type gemma3_text, hidden_size 640     gemma3.embedding_length = 640

llama.cpp computes an architecture in one way, and its options do not say all of it: a config with another value than
that is refused. The conventions are those of llama.cpp's convert_hf_to_gguf.py (2026).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from compiler_trainer.config.errors import UserError

Config = dict[str, Any]  # a config.json of transformers
ROPE = frozenset(("rope_type", "rope_theta", "partial_rotary_factor"))
ROPE_OPTIONS = {
    "default": frozenset[str](),
    "linear": frozenset(("factor",)),
    "yarn": frozenset(("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")),
    "llama3": frozenset(("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")),
    "longrope": frozenset(
        ("factor", "original_max_position_embeddings", "long_factor", "short_factor", "attention_factor")
    ),
}  # the options of each kind of rotary embedding that GGUF has
SCALED = ("default", "linear", "yarn")


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    `rotates_neighbours`: rotary embedding takes features 2i and 2i+1 as a pair, where transformers takes i and i + d/2.
    `norm_offset` is added to the weights of norms. Each `full_every`-th layer attends to all tokens, the others within
    a window; 0 if there are no windows. `fixed` are options of a config that must have this value.
    `is_read`: transformers reads such files.
    """

    name: str
    rope_types: tuple[str, ...] = SCALED
    rotates_neighbours: bool = False
    norm_offset: float = 0.0
    full_every: int = 0
    has_bias: bool = False
    fixed: Config = field(default_factory=lambda: {"hidden_act": "silu"})
    is_read: bool = True


GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": None}
LLAMA = Architecture("llama", (*SCALED, "llama3"), rotates_neighbours=True, has_bias=True)
ARCHITECTURES = {
    "gemma2": Architecture("gemma2", ("default",), norm_offset=1.0, full_every=2, fixed=GEMMA),
    "gemma3_text": Architecture(
        "gemma3",
        ("default", "linear"),
        norm_offset=1.0,
        full_every=6,
        fixed=GEMMA | {"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        full_every=2,
        has_bias=True,
        fixed={"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        is_read=False,
    ),
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": Architecture("llama", LLAMA.rope_types, rotates_neighbours=True, is_read=False),
    "phi3": Architecture("phi3", ("default", "longrope")),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture(
        "qwen3moe",
        fixed={"hidden_act": "silu", "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
}  # by transformers' model_type


def architecture_of(place: str, config: Config) -> Architecture:
    """Return the architecture of a config; raise UserError for one that GGUF, llama.cpp or this table does not have.

    `place` names the model for errors.
    """
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        problem = f"is of type {kind}, and GGUF is written for {', '.join(ARCHITECTURES)}"
        raise UserError(place, f"{problem}; export a folder, and convert it with llama.cpp's convert_hf_to_gguf.py")
    architecture = ARCHITECTURES[kind]
    if unlike := next(beyond(config, architecture), None):
        problem = f"has {unlike} in its config, and llama.cpp computes {kind} in another way"
        raise UserError(place, f"{problem}; export a folder")
    return architecture


def is_read(model_type: str) -> bool:
    """Return True if transformers (5.23) reads GGUF files of a model type that this table has."""
    return model_type in ARCHITECTURES and ARCHITECTURES[model_type].is_read


def beyond(config: Config, architecture: Architecture) -> Iterator[str]:
    """Yield the options of a config, as name=value, with which llama.cpp would compute something else."""
    by_layers = config["rope_parameters"]
    for rope in by_layers.values() if "full_attention" in by_layers else [by_layers]:
        kind, is_full = rope.get("rope_type", "default"), rope is full_rope(config)
        if kind not in (architecture.rope_types if is_full else ("default",)):  # windows are never stretched
            yield f"rope_type={kind}"
        else:
            yield from (f"{name}={rope[name]}" for name in sorted(rope.keys() - ROPE - ROPE_OPTIONS[kind]))
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and architecture.name != "phi3":
            yield f"partial_rotary_factor={rope['partial_rotary_factor']}"
    yield from (
        f"{name}={config[name]}" for name, value in architecture.fixed.items() if config.get(name, value) != value
    )
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name) and not architecture.has_bias:
            yield f"{name}=true"
    if architecture.full_every and config["layer_types"] != layer_types(config, architecture.full_every):
        yield f"layer_types={','.join(config['layer_types'])}"
    if architecture.name.startswith("gemma") and config["query_pre_attn_scalar"] != attention_scalar(config):
        yield f"query_pre_attn_scalar={config['query_pre_attn_scalar']}"


def layer_types(config: Config, full_every: int) -> list[str]:
    """Return transformers' names for layers of which each `full_every`-th has no window."""
    layers = range(1, config["num_hidden_layers"] + 1)
    return ["sliding_attention" if layer % full_every else "full_attention" for layer in layers]


def attention_scalar(config: Config) -> float:
    """Return the number by whose root llama.cpp divides Gemma's scores: another one for the models of 27B."""
    is_27b = config["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    return config["hidden_size"] // config["num_attention_heads"] if is_27b else head_dim(config)


def head_dim(config: Config) -> int:
    """Return the features of a head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def full_rope(config: Config) -> Config:
    """Return the options of the rotary embedding of layers without a window."""
    rope = config["rope_parameters"]
    return rope.get("full_attention", rope)


def rotated(config: Config) -> int:
    """Return the features of a head that are rotated."""
    return int(head_dim(config) * full_rope(config).get("partial_rotary_factor", 1.0))


def options(config: Config, architecture: Architecture) -> Config:
    """Return llama.cpp's options of a model: name of the method add_NAME of gguf's writer -> value."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    result = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": layers,
        "feed_forward_length": config["intermediate_size"],
        "head_count": config["num_attention_heads"],
        "head_count_kv": config["num_key_value_heads"],
        "key_length": head_dim(config),
        "value_length": head_dim(config),
        "layer_norm_rms_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        **rope_options(config),
        **expert_options(config),
    }
    if architecture.full_every:
        result |= {"sliding_window": window}
    elif config["model_type"] == "phi3":
        result |= {"sliding_window": window or 0}
    elif window:
        result["context_length"] = min(window, result["context_length"])  # llama.cpp has no window here
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name):
            result[name] = config[name]
    return result


def expert_options(config: Config) -> Config:
    """Return the options of a mixture; none for other models."""
    if "num_local_experts" not in config:
        return {}
    result = {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
    if config["model_type"] == "gpt_oss":
        result["expert_feed_forward_length"] = config["intermediate_size"]
    elif "moe_intermediate_size" in config:
        result["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return result


def rope_options(config: Config) -> Config:
    """Return the options of the rotary embedding; those of `llama3` are a tensor, `rope_factors`."""
    rope, types = full_rope(config), import_module("gguf").RopeScalingType
    result: Config = {"rope_dimension_count": rotated(config), "rope_freq_base": rope["rope_theta"]}
    if window_rope := config["rope_parameters"].get("sliding_attention"):
        result["rope_freq_base_swa"] = window_rope["rope_theta"]
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        result |= {"rope_scaling_type": types(kind), "rope_scaling_factor": rope["factor"]}
    if kind == "yarn":
        result["rope_scaling_orig_ctx_len"] = rope["original_max_position_embeddings"]
        result |= {f"rope_scaling_yarn_{name}": rope[name] for name in ("beta_fast", "beta_slow") if name in rope}
    if kind == "longrope":
        result["rope_scaling_orig_ctx_len"] = original_length(config)
        result["rope_scaling_attn_factors"] = longrope_scale(config)
    return result


def original_length(config: Config) -> int:
    """Return the length in tokens that a model was trained on before its rotary embedding was stretched."""
    return full_rope(config).get("original_max_position_embeddings") or config["original_max_position_embeddings"]


def longrope_scale(config: Config) -> float:
    """Return the factor on the rotated features in LongRoPE (arXiv 2402.13753), as transformers computes it."""
    if factor := full_rope(config).get("attention_factor"):
        return factor
    stretch = config["max_position_embeddings"] / original_length(config)
    return math.sqrt(1 + math.log(stretch) / math.log(original_length(config))) if stretch > 1 else 1.0
