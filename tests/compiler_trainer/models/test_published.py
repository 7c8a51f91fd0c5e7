"""Decoders with experts equal those of `transformers`, small and with random weights, in forwards in fp32."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from compiler_trainer import models
from compiler_trainer.config.schema import ExpertsConfig, LatentConfig, ModelConfig, RopeScaling

VOCAB, T = 61, 13
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": VOCAB}
THEIR_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
               "intermediate_size": 48, "vocab_size": VOCAB, "tie_word_embeddings": False}
BASE = {"rope_type": "default", "rope_theta": 10_000.0}
LOOP = {"experts_implementation": "eager"}


def mixtral():
    cfg = ModelConfig(**SIZES, experts=ExpertsConfig(5, 2, 24))
    theirs = {**THEIR_SIZES, "intermediate_size": 24}
    return cfg, tf.MixtralForCausalLM(tf.MixtralConfig(
        **theirs, num_local_experts=5, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_parameters=BASE, head_dim=8, **LOOP))


def qwen3():
    cfg = ModelConfig(**SIZES, norm_eps=1e-6, head_dim=12, qk_norm="learned", experts=ExpertsConfig(6, 3, 20))
    return cfg, tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(
        **THEIR_SIZES, head_dim=12, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True,
        rope_parameters=BASE, **LOOP))


def deepseek_v3(q_rank=16):
    sizes = {**SIZES, "n_layers": 3, "n_kv_heads": 4}
    experts = ExpertsConfig(8, 3, 16, shared=2, dense_layers=1, score="sigmoid", groups=4, top_groups=2, scale=2.5,
                            bias_rate=0.1)
    cfg = ModelConfig(**sizes, norm_eps=1e-6, latent=LatentConfig(20, 12, 8, 10, q_rank), experts=experts)
    theirs = {**THEIR_SIZES, "num_hidden_layers": 3, "num_key_value_heads": 4}
    return cfg, tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(
        **theirs, moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, n_group=4,
        topk_group=2, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5, kv_lora_rank=20,
        q_lora_rank=q_rank, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, rope_interleave=False,
        rope_parameters=BASE, **LOOP))


def llama4():
    scaling = RopeScaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position=16)
    cfg = ModelConfig(**{**SIZES, "n_layers": 4}, qk_norm="plain", nope_every=4, rope_scaling=scaling,
                      experts=ExpertsConfig(4, 1, 48, shared=1, score="sigmoid", normalize=False, weigh="input"))
    rope = {**BASE, "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 16}
    return cfg, tf.Llama4ForCausalLM(tf.Llama4TextConfig(
        **{**THEIR_SIZES, "num_hidden_layers": 4}, head_dim=8, intermediate_size_mlp=64, num_local_experts=4,
        num_experts_per_tok=1, rope_parameters=rope))


NAMES = {  # ours -> theirs, replaced in this order
    "tok_embeddings": "model.embed_tokens", "layers": "model.layers", "output": "lm_head",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "attention.wq.0": "self_attn.q_a_proj", "attention.wq.1": "self_attn.q_a_layernorm",
    "attention.wq.2": "self_attn.q_b_proj", "attention.wq": "self_attn.q_proj", "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm", "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "router.correction": "gate.e_score_correction_bias", "router.weight": "gate.weight",
    "shared.": "shared_experts.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.",
    "feed_forward": "mlp",
}
LLAMA4 = {"mlp": "feed_forward", "gate.weight": "router.weight", "shared_experts": "shared_expert"}


def their_weights(cfg, ours):
    """Return our state by their names: expert weights joined and, except for Llama 4, transposed; no load."""
    is_llama4, state = cfg.nope_every is not None, {}
    for name, value in ours.state_dict().items():
        for mine, their in (*NAMES.items(), *(LLAMA4.items() if is_llama4 else ())):
            name = name.replace(mine, their)
        if is_llama4 and name.endswith(("q_proj.weight", "k_proj.weight")):  # feature i pairs with i + 1 there
            value = value.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
        state[name if name != "norm.weight" else "model.norm.weight"] = value
    for w1 in [name for name in state if name.endswith("experts.w1")]:
        stem = w1.removesuffix("w1")
        gate, up, down = (state.pop(f"{stem}{w}") for w in ("w1", "w3", "w2"))
        joined = torch.cat((gate, up), -1)
        state[f"{stem}gate_up_proj"] = joined if is_llama4 else joined.transpose(1, 2)
        state[f"{stem}down_proj"] = down if is_llama4 else down.transpose(1, 2)
    return {name: value for name, value in state.items() if not name.endswith(".load")}


@pytest.mark.parametrize("make", [mixtral, qwen3, deepseek_v3, lambda: deepseek_v3(None), llama4],
                         ids=["mixtral", "qwen3", "deepseek_v3", "deepseek_v3 without a rank of queries", "llama4"])
def test_logits_equal_those_of_transformers(make):
    cfg, theirs = make()
    torch.manual_seed(0)
    ours = models.Llama(cfg).eval()
    with torch.no_grad():
        for name, value in ours.state_dict().items():
            value.normal_(0.5, 0.2) if "norm" in name else value.normal_(0.0, 0.3)
    theirs.load_state_dict(their_weights(cfg, ours))
    tokens = torch.randint(VOCAB, (2, T))
    positions = torch.arange(T).expand(2, -1).contiguous()
    with torch.no_grad():
        actual, expected = ours(tokens, positions), theirs.eval()(tokens, position_ids=positions).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
