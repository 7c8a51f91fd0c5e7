"""Decoders of `transformers` and litgpt."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nightly.models.case import Batch, Case, Entry, batches
from tests.nightly.models.zoo.transformer import GROUPED, SIZES, TOKENS, VOCAB, WIDTH, entry, tokens

OLD: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKENS}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT: dict[str, Any] = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
"v_head_dim": 6}


def litgpt_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the logits at every position."""
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def litgpt(**sizes: Any) -> Case:
    """Build a GPT of litgpt from config fields."""
    module = import_module("litgpt.model")
    torch.manual_seed(0)
    common = {"block_size": 16, "padded_vocab_size": VOCAB, "vocab_size": VOCAB}
    common |= {"n_layer": 2, "n_head": 4, "n_embd": WIDTH}
    return Case(module.GPT(module.Config(**(common | sizes))), litgpt_loss, batches(tokens))


def litgpt_entry(name: str, **sizes: Any) -> Entry:
    """A model of litgpt."""
    return Entry(name, "litgpt", partial(litgpt, **sizes), sequence=True)


MODELS = [
    entry("bloom", "BloomForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, n_layer=2, n_head=4, **TOKENS),
    entry("deepseek_v3", "DeepseekV3ForCausalLM", **SIZES, **LATENT, **TOKENS, n_routed_experts=4, n_group=2,
          topk_group=1, num_experts_per_tok=2, moe_intermediate_size=20, first_k_dense_replace=1, n_shared_experts=1),
    entry("falcon", "FalconForCausalLM", **SIZES, **TOKENS, new_decoder_architecture=False, multi_query=True),
    entry("gemma2", "Gemma2ForCausalLM", **GROUPED, **TOKENS, head_dim=6, sliding_window=5),
    entry("gpt2", "GPT2LMHeadModel", **OLD),
    entry("gpt_neox", "GPTNeoXForCausalLM", **SIZES, **TOKENS),
    entry("gpt_oss", "GptOssForCausalLM", **GROUPED, **TOKENS, head_dim=6, num_local_experts=4, num_experts_per_tok=2,
          sliding_window=5),
    entry("gptj", "GPTJForCausalLM", **OLD, rotary_dim=4),
    entry("llama", "LlamaForCausalLM", **GROUPED, **TOKENS),
    entry("mixtral", "MixtralForCausalLM", **GROUPED, **TOKENS, num_local_experts=4, num_experts_per_tok=2),
    entry("mpt", "MptForCausalLM", vocab_size=VOCAB, d_model=WIDTH, n_layers=2, n_heads=4, max_seq_len=64),
    entry("opt", "OPTForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, ffn_dim=40, num_hidden_layers=2,
          num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=WIDTH, **TOKENS),
    entry("phi3", "Phi3ForCausalLM", **GROUPED, **TOKENS),
    entry("qwen3_moe", "Qwen3MoeForCausalLM", **GROUPED, **EXPERTS, **TOKENS, head_dim=6),
    litgpt_entry("litgpt_pythia", rotary_percentage=0.5),
    litgpt_entry("litgpt_gemma", n_query_groups=1, norm_class_name="RMSNorm", mlp_class_name="GemmaMLP", bias=False,
                 intermediate_size=40, parallel_residual=False, rotary_percentage=1.0, scale_embeddings=True,
                 post_attention_norm=True, post_mlp_norm=True, attention_logit_softcapping=50.0, sliding_window_size=5),
    litgpt_entry("litgpt_mixtral", n_query_groups=2, norm_class_name="RMSNorm", mlp_class_name="LLaMAMoE", bias=False,
                 intermediate_size=40, parallel_residual=False, rotary_percentage=1.0, n_expert=4,
                 n_expert_per_token=2),
]  # fmt: skip
