"""Models of speech and music of asteroid, speechbrain, demucs and others."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.nightly.models.case import Batch, Case, Entry, batches, ids, normal, squares
from tests.nightly.models.zoo.media import of_x, other, vectors
from tests.nightly.models.zoo.transformer import VOCAB, WIDTH

FILTERS: dict[str, Any] = {"kernel_size": 8, "n_filters": 12, "stride": 4}
LOBES = "speechbrain.lobes.models"
NARROW = [8, 8, 8, 8, 16]


def separated(name: str, kind: str, **options: Any) -> Entry:
    """A model of asteroid that separates two speakers."""
    return other(name, "asteroid", "asteroid.models", kind, vectors(96), of_x, n_src=2, **FILTERS, **options)


def brain(name: str, module: str, kind: str, data: Any, loss: Any = of_x, **options: Any) -> Entry:
    """A model of speechbrain."""
    return other(name, "speechbrain", f"{LOBES}.{module}", kind, data, loss, **options)


def spoken(generator: torch.Generator) -> Batch:
    """Return frames and the spoken tokens."""
    return {"x": normal(generator, 3, 13, 10), "tokens": ids(generator, VOCAB, 3, 7)}


def recognised(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of the decoder's output."""
    return squares(model(batch["x"], batch["tokens"])[1])


def codec() -> Case:
    """Build the encoder and the decoder of encodec, without the quantizer between them."""
    module = import_module("encodec.modules")
    sizes: dict[str, Any] = {"dimension": 8, "n_filters": 4, "ratios": [2, 2], "lstm": 0, "norm": "none"}
    torch.manual_seed(0)
    model = nn.Sequential(module.SEANetEncoder(**sizes), module.SEANetDecoder(**sizes))
    return Case(model, of_x, batches(vectors(1, 64)))


MODELS: list[Entry] = [
    separated("asteroid_convtasnet", "ConvTasNet", n_blocks=2, n_repeats=1, bn_chan=8, hid_chan=10, skip_chan=8),
    separated("asteroid_dptnet", "DPTNet", n_heads=2, ff_hid=10, chunk_size=6, n_repeats=1),
    other("asteroid_sudormrf", "asteroid", "asteroid.masknn", "SuDORMRF", vectors(12, 32), of_x, in_chan=12, n_src=2,
          bn_chan=8, num_blocks=1, upsampling_depth=2),
    other("demucs", "demucs", "demucs.demucs", "Demucs", vectors(1, 256), of_x, sources=["a", "b"], audio_channels=1,
          channels=8, depth=2, resample=False, normalize=False, norm_starts=1, norm_groups=2, dconv_lstm=9,
          dconv_attn=9),
    Entry("encodec", "encodec", codec),
    other("openunmix", "openunmix", "openunmix.model", "OpenUnmix", vectors(1, 12, 9), of_x, nb_bins=12,
          nb_channels=1, hidden_size=8, nb_layers=1),
    other("vocos", "vocos", "vocos.models", "VocosBackbone", vectors(10, 16), of_x, input_channels=10, dim=WIDTH,
          intermediate_dim=40, num_layers=2),
    brain("sb_ecapa_tdnn", "ECAPA_TDNN", "ECAPA_TDNN", vectors(13, 10), input_size=10, lin_neurons=12,
          channels=NARROW, attention_channels=8, res2net_scale=2, se_channels=8),
    brain("sb_conformer_asr", "transformer.TransformerASR", "TransformerASR", spoken, recognised, tgt_vocab=VOCAB,
          input_size=10, d_model=WIDTH, nhead=4, num_encoder_layers=2, num_decoder_layers=2, d_ffn=40, dropout=0.0,
          kernel_size=5, encoder_module="conformer", attention_type="RelPosMHAXL", normalize_before=True),
    brain("sb_branchformer_asr", "transformer.TransformerASR", "TransformerASR", spoken, recognised, tgt_vocab=VOCAB,
          input_size=10, d_model=WIDTH, nhead=4, num_encoder_layers=2, num_decoder_layers=2, d_ffn=40, dropout=0.0,
          kernel_size=5, encoder_module="branchformer", attention_type="regularMHA", csgu_linear_units=16),
    brain("sb_hifigan", "HifiGAN", "HifiganGenerator", vectors(10, 8), in_channels=10, out_channels=1,
          resblock_type="2", resblock_dilation_sizes=[[1, 3]], resblock_kernel_sizes=[3],
          upsample_kernel_sizes=[4, 4], upsample_initial_channel=8, upsample_factors=[2, 2], inference_padding=0),
]  # fmt: skip
