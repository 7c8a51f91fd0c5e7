"""Decoders and encoder-decoders that `transformers` added recently."""

from __future__ import annotations

from typing import Any

from tests.nightly.models.case import Entry
from tests.nightly.models.zoo.encoders import TWO_STACKS, only_ids, pairs, translated
from tests.nightly.models.zoo.recent import EXPERTS, LATENT, ROUTED, causal
from tests.nightly.models.zoo.transformer import GROUPED, SIZES, TOKENS, VOCAB, WIDTH, entry, ramp_loss

BOTH: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
LINEAR: dict[str, Any] = {"linear_key_head_dim": 6, "linear_value_head_dim": 6, "linear_num_key_heads": 2,
"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
PART: dict[str, Any] = GROUPED | {"head_dim": 6, **BOTH}

MODELS: list[Entry] = [
    causal("afmoe", "AfmoeForCausalLM", **EXPERTS, **BOTH, head_dim=6, num_dense_layers=1),
    entry("big_bird", "BigBirdForMaskedLM", **SIZES, **TOKENS, attention_type="original_full"),
    entry("blenderbot", "BlenderbotForConditionalGeneration", pairs, translated, **TWO_STACKS),
    causal("cwm", "CwmForCausalLM", **BOTH, head_dim=6),
    entry("deberta", "DebertaModel", only_ids, ramp_loss, **SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    entry("flex_olmo", "FlexOlmoForCausalLM", **GROUPED, **TOKENS, num_experts=4, num_experts_per_tok=2),
    causal("hunyuan_moe", "HunYuanMoEV1ForCausalLM", head_dim=6, num_experts=4, moe_topk=2),
    entry("ibert", "IBertModel", only_ids, ramp_loss, **SIZES | {"pad_token_id": 1}, quant_mode=False),
    causal("jetmoe", "JetMoeForCausalLM", kv_channels=6, num_local_experts=4, num_experts_per_tok=2),
    causal("lfm2_moe", "Lfm2MoeForCausalLM", **EXPERTS, num_dense_layers=1, layer_types=["conv", "full_attention"]),
    entry("longcat_flash", "LongcatFlashForCausalLM", **{**SIZES, "num_layers": 1, "num_hidden_layers": 2}, **TOKENS,
          **LATENT, ffn_hidden_size=40, expert_ffn_hidden_size=20, n_routed_experts=4, zero_expert_num=2, moe_topk=2,
          head_dim=4),
    entry("m2m_100", "M2M100ForConditionalGeneration", pairs, translated, **TWO_STACKS),
    causal("ministral", "MinistralForCausalLM", **BOTH, head_dim=6),
    causal("nanochat", "NanoChatForCausalLM"),
    causal("olmo3", "Olmo3ForCausalLM", **BOTH),
    entry("openai_gpt", "OpenAIGPTLMHeadModel", vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64),
    entry("pegasus_x", "PegasusXForConditionalGeneration", pairs, translated, **TWO_STACKS, block_size=4,
          num_global_tokens=2),
    causal("qwen3_5", "Qwen3_5ForCausalLM", **LINEAR, head_dim=8),
    entry("reformer", "ReformerModel", only_ids, ramp_loss, **SIZES, attention_head_size=6,
          attn_layers=["local", "local"], local_attn_chunk_length=13, axial_pos_embds=False, feed_forward_size=40),
    causal("solar_open", "SolarOpenForCausalLM", **ROUTED, head_dim=6),
    entry("t5gemma", "T5GemmaForConditionalGeneration", pairs, translated, vocab_size=VOCAB, encoder=PART | TOKENS,
          decoder=PART | TOKENS | {"cross_attention_hidden_size": WIDTH}, **TOKENS),
    causal("vaultgemma", "VaultGemmaForCausalLM", **BOTH, head_dim=6),
    entry("yoso", "YosoModel", only_ids, ramp_loss, **SIZES, **TOKENS, use_expectation=True, hash_code_len=4),
    causal("zamba2", "Zamba2ForCausalLM", mamba_d_state=6, mamba_ngroups=1, n_mamba_heads=4, mamba_expand=2,
           chunk_size=8, hybrid_layer_ids=[1], layers_block_type=["mamba", "hybrid"], num_mem_blocks=1),
]  # fmt: skip
