"""Small unmodified models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from compiler_trainer.parity.subject import Terms
from tests.nightly.parity.models.kind import VOCAB, Kind, mean_over, token_batch

ENDS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, **ENDS,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 64, **ENDS}
HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")
NO_DROPOUT = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "hidden_dropout_prob",
              "attention_probs_dropout_prob")  # fmt: skip


def build(name: str, sizes: dict[str, Any], **_: Any) -> nn.Module:
    """Build a causal or masked language model of transformers, without dropout."""
    library = import_module("transformers")
    config = getattr(library, f"{name}Config")(**sizes)
    for field in NO_DROPOUT:
        if hasattr(config, field):
            setattr(config, field, 0.0)
    config.use_cache = False
    model = next(getattr(library, name + end) for end in HEADS if hasattr(library, name + end))(config)
    for parameter in model.parameters():  # many start with zeros, which hide errors
        nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else nn.init.uniform_(parameter, 0.5, 1.0)
    return model


def terms(**_: Any) -> Terms:
    return lambda model, batch: (mean_over(model(input_ids=batch["tokens"]).logits, batch["labels"]), None)


def kind(name: str, sizes: dict[str, Any], **changes: Any) -> Kind:
    builder: Callable[..., nn.Module] = partial(build, name, sizes)
    return Kind("transformers", builder, terms, token_batch, {"labels": ("some", "all", "uneven")}, **changes)


KINDS = {
    "bert": kind("Bert", SIZES | {"is_decoder": False}),
    "gemma": kind("Gemma", SIZES | GROUPED | {"head_dim": 4}, narrow=True),
    "gemma2": kind(
        "Gemma2", SIZES | GROUPED | {"head_dim": 4, "sliding_window": 3, "attn_implementation": "eager"}, narrow=True
    ),
    "gpt2": kind("GPT2", GPT2),
    "gpt_neox": kind("GPTNeoX", SIZES),
    "mixtral": kind(
        "Mixtral",
        SIZES | GROUPED | {"num_local_experts": 4, "experts_implementation": "batched_mm"},
        muon=False,
        narrow=True,
    ),
    "olmo2": kind("Olmo2", SIZES | GROUPED, narrow=True),
    "qwen3": kind("Qwen3", SIZES | GROUPED | {"head_dim": 4}, narrow=True),
}
