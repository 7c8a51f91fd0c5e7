"""Encoders and encoder-decoders of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nightly.models.case import Batch, ids
from tests.nightly.models.zoo.transformer import SIZES, TOKENS, VOCAB, WIDTH, entry, ramp_loss, tokens

ROBERTA: dict[str, Any] = SIZES | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
TWO_STACKS: dict[str, Any] = {"vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2}
TWO_STACKS |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
TWO_STACKS |= {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 64}
TWO_STACKS |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
T5: dict[str, Any] = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
T5 |= {"pad_token_id": 0, "decoder_start_token_id": 0}


def masked(generator: torch.Generator) -> Batch:
    """Return tokens with padding at the ends of some rows."""
    lengths = torch.tensor([13, 9, 4])
    return tokens(generator) | {"attention_mask": (torch.arange(13) < lengths[:, None]).long()}


def masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the logits at every position."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def pairs(generator: torch.Generator) -> Batch:
    """Return ids of a source and of a target."""
    return tokens(generator) | {"decoder_input_ids": ids(generator, VOCAB, 3, 7), "labels": ids(generator, VOCAB, 3, 7)}


def translated(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the decoder's logits."""
    logits = model(input_ids=batch["input_ids"], decoder_input_ids=batch["decoder_input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def only_ids(generator: torch.Generator) -> Batch:
    """Return ids without labels."""
    return {"input_ids": ids(generator, VOCAB, 3, 13)}


MODELS = [
    entry("albert", "AlbertForMaskedLM", masked, masked_loss, **SIZES, **TOKENS, embedding_size=12),
    entry("bert", "BertForMaskedLM", masked, masked_loss, **SIZES),
    entry("canine", "CanineModel", only_ids, ramp_loss, **{**SIZES, "vocab_size": None}, num_hash_buckets=16,
          local_transformer_stride=8,
          downsampling_rate=1, **TOKENS),
    entry("convbert", "ConvBertForMaskedLM", **SIZES, **TOKENS, embedding_size=WIDTH, head_ratio=2, conv_kernel_size=3),
    entry("deberta_v2", "DebertaV2ForMaskedLM", masked, masked_loss, **SIZES, relative_attention=True,
          pos_att_type=["p2c", "c2p"], position_buckets=8),
    entry("distilbert", "DistilBertForMaskedLM", masked, masked_loss, vocab_size=VOCAB, dim=WIDTH, hidden_dim=40,
          n_layers=2, n_heads=4, max_position_embeddings=64),
    entry("esm", "EsmForMaskedLM", masked, masked_loss, **SIZES, pad_token_id=0, mask_token_id=36,
          position_embedding_type="rotary"),
    entry("funnel", "FunnelModel", only_ids, ramp_loss, vocab_size=VOCAB, block_sizes=[1, 1], d_model=WIDTH, n_head=4,
          d_head=6,
          d_inner=40, num_decoder_layers=1),
    entry("modernbert", "ModernBertForMaskedLM", masked, masked_loss, **SIZES, **TOKENS, local_attention=6),
    entry("roberta", "RobertaForMaskedLM", masked, masked_loss, **ROBERTA),
    entry("squeezebert", "SqueezeBertForMaskedLM", **SIZES, embedding_size=WIDTH, q_groups=2, k_groups=2, v_groups=2,
          post_attention_groups=1, intermediate_groups=2, output_groups=2),
    entry("xlnet", "XLNetLMHeadModel", vocab_size=VOCAB, d_model=WIDTH, n_layer=2, n_head=4, d_inner=40),
    entry("bart", "BartForConditionalGeneration", pairs, translated, **TWO_STACKS, forced_eos_token_id=None),
    entry("longt5", "LongT5ForConditionalGeneration", pairs, translated, **T5, local_radius=4),
    entry("prophetnet", "ProphetNetForConditionalGeneration", pairs, translated, vocab_size=VOCAB, hidden_size=WIDTH,
          encoder_ffn_dim=40, decoder_ffn_dim=40, num_encoder_layers=2, num_decoder_layers=2,
          num_encoder_attention_heads=4,
          num_decoder_attention_heads=4, max_position_embeddings=64, relative_max_distance=16, num_buckets=4),
    entry("switch", "SwitchTransformersForConditionalGeneration", pairs, translated, **T5, num_experts=4,
          num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, router_jitter_noise=0.0),
    entry("t5", "T5ForConditionalGeneration", pairs, translated, **T5),
]  # fmt: skip
