"""Models of speech and sound of `transformers`."""

from __future__ import annotations

from typing import Any

import torch

from tests.nightly.models.case import Batch, Entry, ids, normal
from tests.nightly.models.zoo.media import SIZES, SPEECH, sound
from tests.nightly.models.zoo.transformer import TOKENS, VOCAB, WIDTH, image_entry

STACKS: dict[str, Any] = {"vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2}
STACKS |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
STACKS |= {"pad_token_id": 0, "decoder_start_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}


def features(generator: torch.Generator) -> Batch:
    """Return spectra, one row per frame."""
    return {"input_features": normal(generator, 3, 32, 10)}


def narrow(generator: torch.Generator) -> Batch:
    """Return spectra of eight bands."""
    return {"input_features": normal(generator, 3, 32, 8)}


def transcribed(generator: torch.Generator) -> Batch:
    """Return spectra, one row per frame, and the spoken tokens."""
    return features(generator) | {"decoder_input_ids": ids(generator, VOCAB, 3, 7)}


def heard(generator: torch.Generator) -> Batch:
    """Return samples and the spoken tokens."""
    return {"input_values": normal(generator, 3, 900), "decoder_input_ids": ids(generator, VOCAB, 3, 7)}


def waves(generator: torch.Generator) -> Batch:
    """Return samples of one channel."""
    return {"input_values": normal(generator, 3, 1, 64)}


def patches(generator: torch.Generator) -> Batch:
    """Return spectra for models that cut them into patches."""
    return {"input_values": normal(generator, 3, 24, 16)}


def spectrogram(generator: torch.Generator) -> Batch:
    """Return spectra of a vocoder."""
    return {"spectrogram": normal(generator, 3, 8, 10)}


MODELS: list[Entry] = [
    image_entry("ast", "ASTModel", patches, **SIZES, patch_size=4, frequency_stride=4, time_stride=4, max_length=24,
                num_mel_bins=16),
    image_entry("dac", "DacModel", waves, encoder_hidden_size=6, downsampling_ratios=[2, 2], decoder_hidden_size=12,
                n_codebooks=2, codebook_size=16, codebook_dim=4, upsampling_ratios=[2, 2]),
    image_entry("data2vec_audio", "Data2VecAudioModel", sound, **SPEECH),
    image_entry("hubert", "HubertModel", sound, **SPEECH),
    image_entry("moonshine", "MoonshineModel", heard, vocab_size=VOCAB, hidden_size=32, intermediate_size=40,
                encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
                decoder_num_attention_heads=4, max_position_embeddings=32, partial_rotary_factor=0.5, **TOKENS),
    image_entry("parakeet_ctc", "ParakeetForCTC", narrow, vocab_size=VOCAB, pad_token_id=0, encoder_config={
        **SIZES, "num_mel_bins": 8, "subsampling_factor": 4, "subsampling_conv_channels": 8, "conv_kernel_size": 5,
        "max_position_embeddings": 64}),
    image_entry("sew", "SEWModel", sound, **SPEECH, squeeze_factor=2),
    image_entry("speech_to_text", "Speech2TextModel", transcribed, **STACKS, max_source_positions=32,
                max_target_positions=16, input_feat_per_channel=10, conv_channels=16, num_conv_layers=1,
                conv_kernel_sizes=[5]),
    image_entry("unispeech_sat", "UniSpeechSatModel", sound, **SPEECH),
    image_entry("wav2vec2_bert", "Wav2Vec2BertModel", features, **SIZES, feature_projection_input_dim=10,
                conv_depthwise_kernel_size=5, left_max_position_embeddings=8, right_max_position_embeddings=4),
    image_entry("wav2vec2_conformer", "Wav2Vec2ConformerModel", sound, **SPEECH, conv_depthwise_kernel_size=5),
    image_entry("speecht5_vocoder", "SpeechT5HifiGan", spectrogram, model_in_dim=10, upsample_initial_channel=8,
                upsample_rates=[2, 2], upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3],
                resblock_dilation_sizes=[[1, 3]]),
]  # fmt: skip
