"""Small configs of the causal language models that the installed transformers has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import transformers

from compiler_trainer.models.shrunk import shrunk

YEAR = re.compile(r"Copyright (?:\(c\) )?(\d{4})")
FIELDS: dict[str, dict[str, Any]] = {  # what the defaults of a type lack, or state for large sizes alone
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_hidden_layers": 2},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * 2, "local_attn_chunk_length": 13, "is_decoder": True},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
SMALL_FIELDS = {"dots3_note_text": {"head_dim": 20}}  # qk_nope_head_dim + qk_rope_head_dim of its layers with a window


def architectures() -> list[str]:
    """Return the types of the causal language models of transformers that take tokens alone, the newest first.

    A model that takes more than tokens has a text model, which is a type of its own.
    """
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    configs = {kind: default(kind) for kind in kinds if not kind.endswith("_assistant")}  # drafts of another model
    alone = [kind for kind, config in configs.items() if not any(part.get("model_type") for part in parts(config))]
    return sorted(alone, key=lambda kind: (-year(kind), kind))


def default(kind: str) -> Any:
    """Return the config that a type of model has by default."""
    return transformers.AutoConfig.for_model(kind, **FIELDS.get(kind, {}))


def parts(config: Any) -> list[dict[str, Any]]:
    """Return the fields of the configs within a config."""
    return [value for value in config.to_dict().values() if isinstance(value, dict)]


def year(kind: str) -> int:
    """Return the year of the copyright in the source of a type's config or model; 0 if none is stated."""
    sources = Path(inspect.getfile(type(default(kind)))).parent.glob("*.py")
    return max((int(found) for file in sources for found in YEAR.findall(file.read_text()[:2000])), default=0)


def tiny(kind: str) -> Any:
    """Return a small config of a type of model, without dropout."""
    config = shrunk(default(kind))
    for name, value in SMALL_FIELDS.get(kind, {}).items():
        setattr(config, name, value)
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config
