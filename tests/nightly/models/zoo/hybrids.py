"""State-space models, linear attention and recurrences of `transformers`."""

from __future__ import annotations

from typing import Any

from tests.nightly.models.zoo.transformer import GROUPED, TOKENS, VOCAB, WIDTH, entry

STATE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, **TOKENS}
LINEAR: dict[str, Any] = {"linear_key_head_dim": 6, "linear_value_head_dim": 6, "linear_num_key_heads": 2,
"linear_num_value_heads": 4}

MODELS = [
    entry("jamba", "JambaForCausalLM", **GROUPED, **TOKENS, attn_layer_period=2, attn_layer_offset=1, num_experts=2,
          mamba_d_state=6, mamba_dt_rank=3, use_mamba_kernels=False),
    entry("lfm2", "Lfm2ForCausalLM", **GROUPED, **TOKENS, layer_types=["conv", "full_attention"], block_multiple_of=8),
    entry("mamba", "MambaForCausalLM", **STATE, state_size=6, time_step_rank=3, intermediate_size=48),
    entry("mamba2", "Mamba2ForCausalLM", **STATE, num_heads=4, head_dim=12, state_size=6, n_groups=2, chunk_size=8),
    entry("qwen3_next", "Qwen3NextForCausalLM", **GROUPED, **LINEAR, **TOKENS, head_dim=8, num_experts=4,
          num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=20,
          layer_types=["linear_attention", "full_attention"]),
    entry("recurrent_gemma", "RecurrentGemmaForCausalLM", **GROUPED, **TOKENS, lru_width=WIDTH, head_dim=6,
          attention_window_size=6, block_types=["recurrent", "attention"]),
    entry("rwkv", "RwkvForCausalLM", **STATE, attention_hidden_size=WIDTH, intermediate_size=40, context_length=16),
]  # fmt: skip
