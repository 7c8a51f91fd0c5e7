"""The conversion of our decoders to transformers: Llama, Qwen3, Mixtral, Qwen3-MoE and DeepSeek-V3.

    layers.3.attention.wq.weight          model.layers.3.self_attn.q_proj.weight
    layers.3.feed_forward.experts.w1, w3  model.layers.3.mlp.experts.gate_up_proj, one above the other

The options of a decoder decide its form: latent attention is DeepSeek-V3's, norms of queries and keys are Qwen3's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import ExpertsConfig, LatentConfig, ModelConfig
from compiler_trainer.models.folder import library
from compiler_trainer.models.skeleton import fill, skeleton
from compiler_trainer.models.transformers_private import as_stored

FORMS = "transformers' Llama, Qwen3, Mixtral, Qwen3-MoE or DeepSeek-V3"
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.wq.0": "self_attn.q_a_proj",
    "attention.wq.1": "self_attn.q_a_layernorm",
    "attention.wq.2": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.router": "mlp.gate",
    "feed_forward.experts": "mlp.experts",
    "feed_forward.shared.w1": "mlp.shared_experts.gate_proj",
    "feed_forward.shared.w2": "mlp.shared_experts.down_proj",
    "feed_forward.shared.w3": "mlp.shared_experts.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "norm": "model.norm",
    "output": "lm_head",
    "state_norm": "hnorm",
    "embedding_norm": "enorm",
    "projection": "eh_proj",
    "last_norm": "shared_head.norm",
}  # our module -> the module of transformers, the same in all forms
INNER_EPS = 1e-6  # of DeepSeek-V3's norms within attention, fixed in its code
OF_TRAINING = ("load", "auxiliary")  # buffers of a router that only load balancing uses


def form_of(cfg: ModelConfig) -> str:
    """Return the form that computes the same as this decoder; raise UserError naming the option that no form has."""
    form = "Llama" if cfg.experts is None else "Mixtral"
    if cfg.qk_norm == "learned":
        form = "Qwen3" if cfg.experts is None else "Qwen3Moe"
    if cfg.latent is not None:
        form = "DeepseekV3"
    if unlike := next(beyond(cfg, form), None):
        raise UserError(unlike, f"has no equivalent in the forms in which decoders are exported: {FORMS}")
    return form


def beyond(cfg: ModelConfig, form: str) -> Iterator[str]:
    """Yield the options of a decoder that a form does not have."""
    if cfg.nope_every is not None:
        yield "model.nope_every"
    if cfg.qk_norm == "plain" or cfg.latent is not None and cfg.qk_norm != "none":
        yield "model.qk_norm"
    if cfg.latent is not None and cfg.rope_scaling is not None:
        yield "model.rope_scaling"
    if cfg.latent is not None and cfg.norm_eps != INNER_EPS:
        yield "model.norm_eps"
    if cfg.experts is not None:
        yield from (f"model.experts.{name}" for name in beyond_experts(cfg.experts, form))


def beyond_experts(experts: ExpertsConfig, form: str) -> Iterator[str]:
    """Yield the options of experts that a form does not have."""
    if experts.weigh != "output":
        yield "weigh"
    if experts.score != ("sigmoid" if form == "DeepseekV3" else "softmax"):
        yield "score"
    if form == "DeepseekV3":
        yield from ["every"] * (experts.every > 1)
        return
    fixed = {"groups": 1, "shared": 0, "scale": 1.0, "bias_rate": 0.0}
    if form == "Mixtral":
        fixed |= {"normalize": True, "dense_layers": 0, "every": 1}
    yield from (name for name, value in fixed.items() if getattr(experts, name) != value)


def as_transformers(cfg: ModelConfig, module: nn.Module) -> Any:
    """Return transformers' model with a decoder's weights. Tensors with the same layout share their memory.

    It has no layers of multi-token prediction, which transformers keeps beside the model (`further_values`).
    """
    form, transformers, config = form_of(cfg), library(), config_of(cfg)
    model = skeleton(lambda: getattr(transformers, f"{form}ForCausalLM")(config))
    empty = {n: torch.empty(p.shape) for n, p in model.named_parameters() if not p.numel()}  # shared experts
    ours = {name: value for name, value in module.state_dict().items() if not name.startswith("mtp.")}
    return fill(model, [*empty.items(), *their_values(cfg, ours)])


def config_of(cfg: ModelConfig) -> Any:
    """Return transformers' config of a decoder."""
    form = form_of(cfg)
    return getattr(library(), f"{form}Config")(**sizes(cfg) | further_sizes(cfg, form))


def sizes(cfg: ModelConfig) -> dict[str, Any]:
    """Return the config options that all forms have."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if (scaling := cfg.rope_scaling) is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.dim,
        "intermediate_size": cfg.ffn_dim,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim or cfg.dim // cfg.n_heads,
        "rms_norm_eps": cfg.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": cfg.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def further_sizes(cfg: ModelConfig, form: str) -> dict[str, Any]:
    """Return the config options that only this form has, or has in another way."""
    options: dict[str, Any] = {}
    dense = [n for n in range(cfg.n_layers) if cfg.experts is None or not cfg.experts.are_in(n)]
    if (latent := cfg.latent) is not None:
        options |= {
            "num_key_value_heads": cfg.n_heads,
            "head_dim": latent.rope_dim,
            "q_lora_rank": latent.q_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim,
            "v_head_dim": latent.v_dim,
            "first_k_dense_replace": len(dense),
            "num_mtp_layers": cfg.mtp.layers if has_form_of_further(cfg) and cfg.mtp else 0,
        }
    if (experts := cfg.experts) is None:
        return options
    options["num_experts_per_tok"] = experts.top_k
    if form == "Mixtral":
        return options | {"num_local_experts": experts.count, "intermediate_size": experts.width}
    options |= {"moe_intermediate_size": experts.width, "norm_topk_prob": experts.normalize}
    if form == "Qwen3Moe":
        return options | {"num_experts": experts.count, "mlp_only_layers": dense}
    groups = {"n_group": experts.groups, "topk_group": experts.top_groups}
    counts = {"n_routed_experts": experts.count, "n_shared_experts": experts.shared}
    return options | groups | counts | {"routed_scaling_factor": experts.scale}


def has_form_of_further(cfg: ModelConfig) -> bool:
    """Return True if transformers has layers of multi-token prediction like those of this decoder.

    They are those of DeepSeek-V3, always with experts.
    """
    return cfg.mtp is not None and cfg.experts is not None and form_of(cfg) == "DeepseekV3"


def further_values(cfg: ModelConfig, module: nn.Module, theirs: Any) -> dict[str, Tensor]:
    """Return the layers of multi-token prediction as files of DeepSeek-V3 have them: as layers after the last one.

    `theirs` is transformers' model.
    """
    if not has_form_of_further(cfg):
        return {}
    assert cfg.mtp is not None and cfg.experts is not None
    ours = {as_layer(cfg, name): value for name, value in module.state_dict().items() if name.startswith("mtp.")}
    layers = range(cfg.n_layers, cfg.n_layers + cfg.mtp.layers)
    zeros = {f"model.layers.{i}.mlp.gate.e_score_correction_bias": torch.zeros(cfg.experts.count) for i in layers}
    return as_stored(theirs, zeros | dict(their_values(cfg, ours)))


def as_layer(cfg: ModelConfig, name: str) -> str:
    """Return the name of a further layer's parameter as one of a layer: `mtp.0.block.x` -> `layers.27.x`."""
    _, number, part = name.split(".", 2)
    last = part.replace("norm.", "last_norm.", 1) if part.startswith("norm.") else part.removeprefix("block.")
    return f"layers.{cfg.n_layers + int(number)}.{last}"


def their_values(cfg: ModelConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values in transformers' layout."""
    for name, value in ours.items():
        owner, _, leaf = name.rpartition(".")
        if leaf in OF_TRAINING and owner.endswith(".router"):
            continue
        if owner.endswith(".experts"):
            if leaf != "w3":  # w3 is stored with w1
                gates = torch.cat([value, ours[f"{owner}.w3"]], -1) if leaf == "w1" else value
                yield f"{their_name(owner)}.{'gate_up' if leaf == 'w1' else 'down'}_proj", gates.mT.contiguous()
        elif leaf == "correction":
            yield f"{their_name(owner)}.e_score_correction_bias", value
        else:
            latent = cfg.latent if owner.startswith("layers.") else None
            yield f"{their_name(owner)}.{leaf}", value if latent is None else in_pairs(cfg, latent, owner, value)


def their_name(owner: str) -> str:
    """Return a module's name in transformers: `layers.3.attention.wq` -> `model.layers.3.self_attn.q_proj`."""
    if not owner.startswith("layers."):
        return NAMES[owner]
    _, number, part = owner.split(".", 2)
    return f"model.layers.{number}.{NAMES[part]}"


def in_pairs(cfg: ModelConfig, latent: LatentConfig, owner: str, weight: Tensor) -> Tensor:
    """Return a weight with its rotary features in DeepSeek's order, in which 2i and 2i + 1 rotate together."""
    queries = "attention.wq" if latent.q_rank is None else "attention.wq.2"
    if not owner.endswith((queries, "attention.wkv_a")):
        return weight
    heads = cfg.n_heads if owner.endswith(queries) else 1
    of_head = weight.unflatten(0, (heads, -1))
    still, turning = of_head.split([of_head.shape[1] - latent.rope_dim, latent.rope_dim], 1)
    turning = turning.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([still, turning], 1).flatten(0, 1)
