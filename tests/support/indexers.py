"""Small models of transformers whose indexers select the keys of each query, and rows of documents for them."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers.modeling_outputs import CausalLMOutput

from compiler_trainer.models import folder

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "experts_implementation": "batched_mm"}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
           "mlp_layer_types": ["dense", "dense"]}
INDEXER = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
DSA = LATENT | EXPERTS | INDEXER
COMPRESSED = {"head_dim": 8, "q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 8, "num_key_value_heads": 1, "sliding_window": 6, "hc_sinkhorn_iters": 2,
              "index_topk": 2, "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
              "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"], "moe_intermediate_size": 16,
              "n_routed_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
MODELS = {  # config and its fields
    "deepseek_v32": ("DeepseekV32Config", DSA),
    "glm_moe_dsa": ("GlmMoeDsaConfig", DSA | {"indexer_types": ["full", "shared"]}),
    "deepseek_v4": ("DeepseekV4Config", INDEXER | COMPRESSED),
    "hy_v4": ("HYV4Config", DSA | {"indexer_types": ["full", "shared"], "hc_mult": 2}),
    "axk2": ("AXK2Config", DSA | {"gated_norm_rank": 4}),
    "mistral_large4": ("MistralLarge4TextConfig", DSA | {"indexer_types": ["full", "shared"]}),
    "dots3_note": ("Dots3NoteTextConfig", DSA | {"layer_types": ["indexed_attention", "indexed_attention"]}),
    "minimax_m3_vl": ("MiniMaxM3VLTextConfig", {
        "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "dense_intermediate_size": 40, "shared_intermediate_size": 16, "mlp_layer_types": ["dense", "dense"],
        "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 3, "index_topk_blocks": 2,
        "layer_types": ["minimax_m3_sparse", "minimax_m3_sparse"]}),
    "glm5_next": ("Glm5NextTextConfig", DSA | {
        "qk_rope_head_dim": 0, "head_dim": 0, "layer_types": ["full_attention", "full_attention"], "index_kpool": 2,
        "indexer_types": ["full", "shared"], "hc_mult": 2, "linear_head_dim": 8, "linear_num_heads": 4}),
    "qwen4_exp": ("Qwen4ExpTextConfig", {
        "num_key_value_heads": 2, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 8,
        "layer_types": ["indexed_attention", "indexed_attention"], "indexer_n_heads": 8, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2}),
}  # fmt: skip


class Headed(nn.Module):
    """A text model of which transformers has no causal language model, with a head."""

    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__()
        self.config, self.model = config, transformers.AutoModel.from_config(config, dtype=torch.float32)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, **inputs):
        return CausalLMOutput(logits=self.lm_head(self.model(**inputs).last_hidden_state))


def config_of(name: str, **changes):
    kind, fields = MODELS[name]
    return getattr(transformers, kind)(**SIZES | fields | changes)


def model_of(name: str, **changes) -> nn.Module:
    """Return the model in fp64, with the same weights at each call."""
    torch.manual_seed(0)
    config = config_of(name, **changes)
    is_known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32) if is_known else Headed(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().train()


def rows(lengths: list[list[int]], n: int = 3) -> list[dict[str, Tensor]]:
    """Return batches of rows of documents of these lengths, whose last token has no label."""
    generator = torch.Generator().manual_seed(1)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])

    def one() -> dict[str, Tensor]:
        tokens = torch.randint(3, SIZES["vocab_size"], positions.shape, generator=generator)
        labels = tokens.roll(-1, 1).masked_fill(positions.roll(-1, 1) == 0, -100)
        return {"tokens": tokens, "labels": labels, "positions": positions, "documents": documents}

    return [one() for _ in range(n)]


class Wide(TorchFunctionMode):
    """Compute in fp64 if a model casts to fp32, so that values can be compared to 1e-10."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def loss_of(way: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy, all in fp64."""
    with Wide():
        return folder.loss_of(way, model, batch)
