"""Language models of small packages: linear attention, recurrent nets, state spaces, memories."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nightly.models.case import Batch, Case, Entry, batches
from tests.nightly.models.zoo.lucid import spoken
from tests.nightly.models.zoo.media import of_module, of_x, other, vectors
from tests.nightly.models.zoo.transformer import LENGTH, VOCAB, WIDTH, tokens

PLAIN: dict[str, Any] = {"num_tokens": VOCAB, "dim": WIDTH, "depth": 2}
HEADS: dict[str, Any] = PLAIN | {"heads": 4, "dim_head": 6}


def text(name: str, library: str, kind: str, **options: Any) -> Entry:
    """A model from ids to logits, of the module with the library's name."""
    module = library.replace("-", "_")
    return Entry(name, library, partial(of_module, module, kind, tokens, spoken, **options), sequence=True)


def rows(name: str, library: str, kind: str, **options: Any) -> Entry:
    """A model from vectors to vectors."""
    module = library.replace("-", "_")
    build = partial(of_module, module, kind, vectors(LENGTH, WIDTH), of_x, **options)
    return Entry(name, library, build, sequence=True)


def first_spoken(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the logits, which are the first output."""
    return F.cross_entropy(model(batch["input_ids"])[0].flatten(0, 1), batch["labels"].flatten())


def retained(model: Any, batch: Batch) -> Tensor:
    """Return the cross-entropy of a retentive net, computed for all positions at once."""
    return F.cross_entropy(model.forward_parallel(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def mamba(**options: Any) -> Case:
    """Build a Mamba of mambapy on vectors."""
    module = import_module("mambapy.mamba")
    torch.manual_seed(0)
    model = module.Mamba(module.MambaConfig(d_model=WIDTH, n_layers=2, d_state=6, dt_rank=3, **options))
    return Case(model, of_x, batches(vectors(LENGTH, WIDTH)))


MODELS: list[Entry] = [
    text("gateloop", "gateloop-transformer", "Transformer", **HEADS, use_gate_looped_attn=False),
    text("gmlp", "g-mlp-pytorch", "gMLP", **PLAIN, seq_len=LENGTH, causal=True),
    text("linear_attention", "linear-attention-transformer", "LinearAttentionTransformerLM", **HEADS, max_seq_len=16,
         causal=False, use_axial_pos_emb=False, use_rotary_emb=True),
    text("linformer", "linformer", "LinformerLM", **HEADS, seq_len=LENGTH, k=5),
    text("local_attention", "local-attention", "LocalTransformer", **HEADS, max_seq_len=16, local_attn_window_size=4),
    text("mega", "mega-pytorch", "Mega", **PLAIN, attn_dim_qk=8, attn_dim_value=12),
    text("perceiver_lm", "perceiver-pytorch", "PerceiverLM", **PLAIN, max_seq_len=16, num_latents=6, latent_dim=16,
         cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8),
    text("performer", "performer-pytorch", "PerformerLM", **HEADS, max_seq_len=16, nb_features=8,
         feature_redraw_interval=None, auto_check_redraw=False),
    rows("conformer_blocks", "conformer", "Conformer", dim=WIDTH, depth=2, heads=4, dim_head=6, conv_kernel_size=5),
    rows("min_gru", "minGRU-pytorch", "minGRU", dim=WIDTH),
    rows("nystrom", "nystrom-attention", "Nystromformer", dim=WIDTH, depth=2, heads=4, dim_head=6, num_landmarks=13,
         attn_values_residual_conv_kernel=3),
    rows("tcn", "pytorch-tcn", "TCN", num_inputs=WIDTH, num_channels=[8, 8], kernel_size=3, dropout=0.0,
         input_shape="NLC"),
    Entry("mambapy", "mambapy", mamba, sequence=True),
    Entry("mambapy_sequential", "mambapy", partial(mamba, pscan=False), sequence=True),
    other("block_recurrent", "block-recurrent-transformer-pytorch", "block_recurrent_transformer_pytorch",
          "BlockRecurrentTransformer", tokens, first_spoken, **HEADS, max_seq_len=LENGTH, block_width=LENGTH,
          recurrent_layers=(2,)),
    other("retnet", "yet-another-retnet", "yet_another_retnet.retnet", "RetNet", tokens, retained, VOCAB,
          d_model=32, nhead=2, num_layers=2, dropout=0.0, dim_feedforward=40),
]  # fmt: skip
