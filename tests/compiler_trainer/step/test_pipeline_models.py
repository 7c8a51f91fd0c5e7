"""transformers' own models in pipeline stages, unmodified: tied, with rotary tables, experts, encoder and decoder."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers

from compiler_trainer import compile_step
from tests.support.sweeps import quick

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 61, "use_cache": False,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 61, "n_positions": 32, "use_cache": False}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 61}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "qwen3": lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SIZES)),
    "gemma3": lambda t: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZES, sliding_window=4, query_pre_attn_scalar=8)),
    "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(**GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "t5": lambda t: t.T5ForConditionalGeneration(t.T5Config(**T5, dropout_rate=0.0, use_cache=False)),
    "qwen3_moe": lambda t: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**SIZES, **EXPERTS)),
}
FP32 = 1e-6  # Gemma's norms compute in it


def loss_of(model, batch):
    inputs = {"decoder_input_ids": batch["labels"]} if model.config.is_encoder_decoder else {}
    logits = model(batch["tokens"], **inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def trained(name: str, mesh: dict[str, int]):
    torch.manual_seed(0)
    model = MODELS[name](transformers).double()
    batch = {key: torch.randint(0, 61, (4, 10)) for key in ("tokens", "labels")}
    how = {"microbatches": 2, "ranks": "lockstep", "evaluate": False}
    step = compile_step(model, loss_of, batch, mesh=mesh, optim={"name": "sgd", "lr": 0.1, "max_norm": 1.0}, **how)
    return [step(batch) for _ in range(3)], step.state_dict()


@pytest.mark.full
@pytest.mark.parametrize("name", quick(MODELS, 0))
def test_a_model_of_transformers_trains_in_stages_as_on_one_device(name):
    (metrics, state), (expected, wanted_state) = trained(name, {"pp": 2, "tp": 2}), trained(name, {})
    allowed = FP32 if name == "gemma3" else 1e-12
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=allowed)
    for parameter, value in wanted_state.items():
        assert torch.allclose(state[parameter], value, rtol=0, atol=allowed), parameter
