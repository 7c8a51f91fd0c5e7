"""FLOPs of a token, forward and backward, without recomputation: 6 N + 12 L H h T (PaLM, appendix B).

N leaves out embeddings, which are looked up and not multiplied (unless they are also the head), and experts that a
token does not go through. A frozen weight counts 4 times instead of 6, because it has no gradient. h is the mean size
of a head's key and value. In a layer of local attention T is at most the window; linear attention and convolutions have
no such term.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models.attention import head_dims
from compiler_trainer.models.llama import Llama
from compiler_trainer.models.quantized import quantized_in

SIZES = """num_experts_per_tok num_attention_heads num_hidden_layers head_dim qk_nope_head_dim qk_rope_head_dim
    v_head_dim sliding_window attention_chunk_size layer_types""".split()


def of_decoder(cfg: ModelConfig, module: Llama, seq_len: int) -> int:
    """Return the FLOPs per token of one of our decoders, for sequences of `seq_len` tokens."""
    parameters = module.active_parameters()
    looked_up, further = 0 if cfg.tied else parameters["tok_embeddings.weight"], cfg.mtp.layers if cfg.mtp else 0
    attention = 6 * (cfg.n_layers + further) * cfg.n_heads * sum(head_dims(cfg)) * seq_len
    return 6 * (sum(parameters.values()) - looked_up + further * cfg.vocab_size * cfg.dim) + attention


def of_folder(config: Any, module: nn.Module, seq_len: int) -> int:
    """Return the FLOPs per token of a model that transformers built from `config`; without attention: of weights."""
    sizes = sizes_of(config)
    return of_weights(module, sizes["num_experts_per_tok"] or 1) + of_attention(config, sizes, seq_len)


def forward_of_folder(config: Any, module: nn.Module, seq_len: int) -> int:
    """Return the FLOPs per token of the forward of such a model, all of whose weights are frozen."""
    sizes = sizes_of(config)
    return of_weights(module, sizes["num_experts_per_tok"] or 1) // 2 + of_attention(config, sizes, seq_len) // 3


def sizes_of(config: Any) -> dict[str, Any]:
    """Return the sizes that FLOPs depend on, None for those that a model does not have."""
    return {name: vars(config).get(config.attribute_map.get(name, name)) for name in SIZES}


def of_attention(config: Any, sizes: dict[str, Any], seq_len: int) -> int:
    """Return the FLOPs per token of the products of queries, keys and values; 0 without attention."""
    heads = sizes["num_attention_heads"]
    if not heads or not sizes["num_hidden_layers"]:
        return 0
    head_dim = sizes["head_dim"] or config.hidden_size // heads
    if sizes["qk_nope_head_dim"]:  # latent attention, whose `head_dim` is the rotated part alone
        head_dim = (sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"] + sizes["v_head_dim"]) / 2
    window = min(sizes["sliding_window"] or sizes["attention_chunk_size"] or seq_len, seq_len)
    keys = {"linear_attention": 0, "conv": 0, "moe": 0, "sliding_attention": window, "chunked_attention": window}
    layers = sizes["layer_types"] or sizes["num_hidden_layers"] * ["full_attention"]
    return int(12 * heads * head_dim * sum(keys.get(layer, seq_len) for layer in layers))


def of_weights(module: nn.Module, experts_taken: int = 1) -> int:
    """Return the FLOPs per token of the matmuls with weights. Other work depends on the model's code."""
    looked_up = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    linear = (m for m in module.modules() if isinstance(m, nn.Linear))
    multiplied = {id(p) for m in linear for name, p in m.named_parameters(recurse=False) if name == "weight"}
    quantized = quantized_in(module)
    codes = {id(p) for weight in quantized.values() for p in weight.parameters()}
    weights = [(name, weight.shape, 4) for name, weight in quantized.items()]
    for name, p in module.named_parameters():
        if id(p) not in looked_up - multiplied and id(p) not in codes:
            weights.append((name, tuple(p.shape), 6 if p.requires_grad else 4))
    total = 0
    for name, shape, times in weights:
        is_stack = ".experts." in name and len(shape) == 3
        total += times * (math.prod(shape) * experts_taken // shape[0] if is_stack else math.prod(shape))
    return total
