"""Models that nobody here wrote, unmodified from `transformers`, small and in fp64, and our own Llama."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

VOCAB = 97
COMMON = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
          "num_attention_heads": 6, "max_position_embeddings": 256}
GPT2 = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 0}

MODELS = {
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**COMMON)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**COMMON, num_key_value_heads=2, head_dim=8)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON, num_key_value_heads=2)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=4,
                                                                experts_implementation="batched_mm")),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=8)),
}


def build(name: str) -> nn.Module:
    """A model with its own initial weights, dropout off, in fp64."""
    torch.manual_seed(0)
    model = MODELS[name]()
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for field in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if field in model.config.to_dict():
            setattr(model.config, field, 0.0)
    return model.double().train()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy over labels that are not ignored."""
    logits = model(input_ids=batch["tokens"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def batch(rows: int = 3, length: int = 13) -> dict[str, Tensor]:
    """Tokens and labels; the first row's beginning is ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, VOCAB, (rows, length), generator=generator) for _ in range(2))
    labels[0, :5] = -100
    return {"tokens": tokens, "labels": labels}
