"""Further decoders, hybrids and encoders of `transformers`."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.nightly.models.case import Batch, Case, Entry, batches
from tests.nightly.models.zoo.transformer import (
    GROUPED,
    LENGTH,
    SIZES,
    TOKENS,
    VOCAB,
    WIDTH,
    entry,
    make,
    next_token_loss,
    ramp_loss,
)
from tests.nightly.models.zoo.transformer import tokens as both

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 1,
"topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT: dict[str, Any] = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
"v_head_dim": 6}
MAMBA: dict[str, Any] = {"mamba_d_state": 6, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 1,
"mamba_chunk_size": 8}
NANO: dict[str, Any] = {"head_dim": 6, "sliding_window": 5, "num_kv_shared_layers": 0, "laurel_rank": 4,
"layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": VOCAB,
"hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0, 0.0]}


def tokens(generator: Any) -> Batch:
    """Return ids without labels."""
    return {"input_ids": both(generator)["input_ids"]}


def causal(name: str, model: str, **sizes: Any) -> Any:
    """A decoder."""
    return entry(name, model, **GROUPED, **TOKENS, **sizes)


def unclipped(**sizes: Any) -> Case:
    """Build Gemma 3n without its clip, because that writes into a parameter in its forward."""
    model = make("Gemma3nForCausalLM", **GROUPED, **TOKENS, **sizes)
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "altup_coef_clip"):
            object.__setattr__(module.config, "altup_coef_clip", None)
    return Case(model, next_token_loss, batches(both))


def encoder(name: str, model: str, **sizes: Any) -> Any:
    """An encoder without a head."""
    return entry(name, model, tokens, ramp_loss, **SIZES, **sizes)


MODELS = [
    causal("apertus", "ApertusForCausalLM"),
    causal("arcee", "ArceeForCausalLM"),
    causal("bamba", "BambaForCausalLM", **MAMBA, attn_layer_indices=[1]),
    entry("biogpt", "BioGptForCausalLM", **SIZES, **TOKENS),
    causal("bitnet", "BitNetForCausalLM"),
    entry("codegen", "CodeGenForCausalLM", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64,
          rotary_dim=4, **TOKENS),
    causal("cohere2", "Cohere2ForCausalLM", sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    entry("ctrl", "CTRLLMHeadModel", vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64, dff=40),
    entry("deepseek_v2", "DeepseekV2ForCausalLM", **SIZES, **TOKENS, **LATENT, **ROUTED, head_dim=4),
    causal("deepseek_v4", "DeepseekV4ForCausalLM", head_dim=8, q_lora_rank=12, num_experts_per_tok=2,
           n_routed_experts=4, moe_intermediate_size=20, o_groups=2, o_lora_rank=8, index_n_heads=2, index_head_dim=8,
           index_topk=4, sliding_window=6),
    causal("diffllama", "DiffLlamaForCausalLM"),
    causal("doge", "DogeForCausalLM"),
    causal("dots1", "Dots1ForCausalLM", **ROUTED),
    causal("ernie4_5", "Ernie4_5ForCausalLM", head_dim=6),
    causal("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2, moe_intermediate_size=20,
           moe_num_shared_experts=1, moe_layer_start_index=1),
    causal("exaone4", "Exaone4ForCausalLM", sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    causal("falcon_h1", "FalconH1ForCausalLM", **MAMBA, mamba_d_ssm=48, mamba_expand=2, head_dim=6),
    entry("falcon_mamba", "FalconMambaForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2,
          state_size=6, time_step_rank=3, intermediate_size=48, **TOKENS),
    causal("gemma3", "Gemma3ForCausalLM", head_dim=6, sliding_window=5,
           layer_types=["sliding_attention", "full_attention"]),
    causal("gemma3n", "Gemma3nForCausalLM", **NANO),
    Entry("gemma3n_unclipped", "transformers", partial(unclipped, **NANO), sequence=True),
    causal("glm4", "Glm4ForCausalLM", head_dim=8),
    causal("glm4_moe", "Glm4MoeForCausalLM", **ROUTED, head_dim=8),
    entry("gpt_neo", "GPTNeoForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, num_layers=2, num_heads=4,
          max_position_embeddings=64, attention_types=[[["global", "local"], 1]], window_size=5, **TOKENS),
    causal("granitemoe", "GraniteMoeForCausalLM", **LOCAL),
    causal("granitemoehybrid", "GraniteMoeHybridForCausalLM", **LOCAL, **MAMBA, shared_intermediate_size=40,
           layer_types=["mamba", "attention"]),
    causal("helium", "HeliumForCausalLM", head_dim=6),
    causal("hunyuan", "HunYuanDenseV1ForCausalLM", head_dim=6),
    causal("minimax", "MiniMaxForCausalLM", **LOCAL, head_dim=6, block_size=8,
           layer_types=["linear_attention", "full_attention"]),
    causal("minimax_m2", "MiniMaxM2ForCausalLM", **LOCAL, head_dim=6),
    causal("nemotron", "NemotronForCausalLM"),
    causal("olmo2", "Olmo2ForCausalLM"),
    causal("olmoe", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    entry("persimmon", "PersimmonForCausalLM", **SIZES | {"hidden_size": 32}, **TOKENS),
    causal("phi", "PhiForCausalLM", partial_rotary_factor=1.0),
    causal("phimoe", "PhimoeForCausalLM", **LOCAL),
    causal("qwen2_moe", "Qwen2MoeForCausalLM", **EXPERTS, shared_expert_intermediate_size=20),
    causal("seed_oss", "SeedOssForCausalLM", head_dim=6),
    causal("smollm3", "SmolLM3ForCausalLM"),
    causal("stablelm", "StableLmForCausalLM"),
    causal("starcoder2", "Starcoder2ForCausalLM", sliding_window=5),
    entry("xglm", "XGLMForCausalLM", vocab_size=VOCAB, d_model=WIDTH, ffn_dim=40, num_layers=2, attention_heads=4,
          max_position_embeddings=64, **TOKENS),
    encoder("electra", "ElectraModel", embedding_size=16),
    encoder("fnet", "FNetModel", tpu_short_seq_length=LENGTH),
    encoder("megatron_bert", "MegatronBertModel"),
    encoder("mobilebert", "MobileBertModel", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    encoder("mpnet", "MPNetModel"),
    encoder("nystromformer", "NystromformerModel", num_landmarks=13, segment_means_seq_len=13, conv_kernel_size=3),
    encoder("rembert", "RemBertModel", input_embedding_size=16),
    encoder("roformer", "RoFormerModel", embedding_size=WIDTH),
    encoder("xmod", "XmodModel", default_language="en_XX"),
]  # fmt: skip
