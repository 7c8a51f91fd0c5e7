"""Models of sound, of mixed inputs, of series, and of image generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.nightly.models.case import Batch, Case, Entry, Loss, batches, ids, normal, squares
from tests.nightly.models.zoo.transformer import GROUPED, TOKENS, VOCAB, WIDTH, image_entry

SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
SPEECH: dict[str, Any] = SIZES | {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [8, 4]}
SPEECH |= {"num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": VOCAB}
SPEECH |= {"apply_spec_augment": False}
SEES: dict[str, Any] = SIZES | {"image_size": 16, "patch_size": 4}
READS: dict[str, Any] = SIZES | {"vocab_size": VOCAB, "max_position_embeddings": 32, **TOKENS}
SERIES: dict[str, Any] = {"context_length": 12, "prediction_length": 6, "d_model": WIDTH, "num_attention_heads": 4,
"ffn_dim": 40}
UNET: dict[str, Any] = {"sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}


# ---- transformers ------------------------------------------------------------------------------------


def sound(generator: torch.Generator) -> Batch:
    """Return rows of samples."""
    return {"input_values": normal(generator, 3, 400)}


def spectra(generator: torch.Generator) -> Batch:
    """Return spectra and the spoken tokens."""
    return {"input_features": normal(generator, 3, 10, 32), "decoder_input_ids": ids(generator, VOCAB, 3, 7)}


def frames(generator: torch.Generator) -> Batch:
    """Return spectra, one row per frame."""
    return {"input_values": normal(generator, 3, 32, 16)}


def captioned(generator: torch.Generator) -> Batch:
    """Return images and tokens."""
    return {"pixel_values": normal(generator, 3, 3, 16, 16), "input_ids": ids(generator, VOCAB, 3, 7)}


def contrasted(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's own loss of images against texts."""
    return model(**batch, return_loss=True).loss


def pictured(generator: torch.Generator) -> Batch:
    """Return images, and tokens that include their placeholders."""
    tokens = ids(generator, VOCAB - 1, 3, 24)
    tokens[:, 2:18] = VOCAB - 1
    return {"pixel_values": normal(generator, 3, 3, 16, 16), "input_ids": tokens}


def series(generator: torch.Generator) -> Batch:
    """Return series of two channels."""
    return {"past_values": normal(generator, 3, 12, 2)}


# ---- others ------------------------------------------------------------------------------------------


def vectors(*shape: int) -> Callable[[torch.Generator], Batch]:
    """Return a function that makes batches of one tensor `x` with three rows."""
    return lambda generator: {"x": normal(generator, 3, *shape)}


def of_x(model: nn.Module, batch: Batch) -> Tensor:
    """Return the output's distance to a ramp."""
    return squares(model(batch["x"]))


def noised(generator: torch.Generator) -> Batch:
    """Return latents, times and a text."""
    times = torch.randint(0, 100, (3,), generator=generator)
    return {"x": normal(generator, 3, 4, 8, 8), "t": times, "text": normal(generator, 3, 5, 12)}


def denoised(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model of latents and times."""
    return squares(model(batch["x"], batch["t"]).sample)


def denoised_by_text(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model of latents, times and a text."""
    return squares(model(batch["x"], timestep=batch["t"], encoder_hidden_states=batch["text"]).sample)


def denoised_by_class(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model of latents, times and a class, here the time's last digit."""
    return squares(model(batch["x"], timestep=batch["t"], class_labels=batch["t"] % 5).sample)


def pooled_text(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model of latents, times, a text and its mean."""
    text = batch["text"]
    inputs = {"timestep": batch["t"], "encoder_hidden_states": text, "pooled_projections": text.mean(1)}
    return squares(model(batch["x"], **inputs).sample)


def lengths_too(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model of frames and their number."""
    frames = batch["x"]
    return squares(model(frames, torch.full((frames.shape[0],), frames.shape[1])))


def of_module(module: str, kind: str, data: Any, loss: Loss, *args: Any, **options: Any) -> Case:
    """Build a case from a class or function of a module."""
    torch.manual_seed(0)
    return Case(getattr(import_module(module), kind)(*args, **options), loss, batches(data))


def other(name: str, library: str, module: str, kind: str, data: Any, loss: Loss, *args: Any, **options: Any) -> Entry:
    """A model of another library."""
    return Entry(name, library, partial(of_module, module, kind, data, loss, *args, **options))


def diffusion(name: str, kind: str, data: Any, loss: Loss, **options: Any) -> Entry:
    """A model of diffusers."""
    return other(name, "diffusers", "diffusers", kind, data, loss, **options)


def without_label_dropout(entry: Entry) -> Entry:
    """Return the entry of a diffusers model with label dropout off, for which it has no argument."""

    def build() -> Case:
        case = entry.build()
        for module in case.model.modules():
            if hasattr(module, "class_embedder"):
                vars(module.class_embedder)["dropout_prob"] = 0.0
        return case

    return replace(entry, build=build)


def audio(name: str, kind: str, data: Any, loss: Loss, **options: Any) -> Entry:
    """A model of torchaudio."""
    return other(name, "torchaudio", "torchaudio.models", kind, data, loss, **options)


def segmented(name: str, kind: str, **options: Any) -> Entry:
    """A model of segmentation_models_pytorch with a small encoder."""
    arguments = {"encoder_name": "mobilenet_v2", "encoder_weights": None, "classes": 3, **options}
    library = "segmentation-models-pytorch"
    return other(name, library, "segmentation_models_pytorch", kind, vectors(3, 32, 32), of_x, encoder_depth=3, **arguments)


def clip(kind: str, **options: Any) -> Case:
    """Build a CLIP of open_clip, or its captioning variant."""
    tower = {"width": WIDTH, "layers": 2}
    sees = {**tower, "head_width": 6, "image_size": 16, "patch_size": 4}
    reads = {**tower, "heads": 4, "vocab_size": VOCAB, "context_length": 8}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        image, text, scale = list(model(batch["image"], batch["text"]))[:3]
        return nn.functional.cross_entropy(scale * image @ text.T, torch.arange(3))

    def data(generator: torch.Generator) -> Batch:
        return {"image": normal(generator, 3, 3, 16, 16), "text": ids(generator, VOCAB, 3, 8)}

    return of_module("open_clip.model", kind, data, loss, WIDTH, sees, reads, **options)


MODELS: list[Entry] = [
    image_entry("wav2vec2", "Wav2Vec2Model", sound, **SPEECH),
    image_entry("wavlm", "WavLMModel", sound, **SPEECH, num_buckets=8, max_bucket_distance=16),
    image_entry("whisper", "WhisperModel", spectra, vocab_size=VOCAB, num_mel_bins=10, d_model=WIDTH, encoder_layers=2,
                decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=40,
                decoder_ffn_dim=40, max_source_positions=16, max_target_positions=16, pad_token_id=0,
                decoder_start_token_id=0, bos_token_id=0, eos_token_id=1),
    image_entry("clip", "CLIPModel", captioned, contrasted, text_config=READS, vision_config=SEES, projection_dim=10),
    image_entry("siglip", "SiglipModel", captioned, contrasted, text_config=READS | {"max_position_embeddings": 7},
                vision_config=SEES),
    image_entry("vilt", "ViltModel", captioned, **READS, image_size=16, patch_size=4),
    image_entry("llava", "LlavaForConditionalGeneration", pictured, image_token_index=VOCAB - 1,
                text_config={"model_type": "llama", **GROUPED, **TOKENS}, vision_feature_layer=-1,
                vision_config={"model_type": "clip_vision_model", **SEES}, vision_feature_select_strategy="default"),
    image_entry("patchtst", "PatchTSTForPrediction", series, **SERIES, num_input_channels=2, patch_length=4,
                patch_stride=4,
                num_hidden_layers=2, use_cls_token=False),
    diffusion("autoencoder_kl", "AutoencoderKL", vectors(3, 16, 16), of_x, block_out_channels=(8, 16),
              norm_num_groups=4,
              down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16),
    without_label_dropout(
        diffusion("dit", "DiTTransformer2DModel", noised, denoised_by_class, num_attention_heads=4,
                  attention_head_dim=6, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
                  num_embeds_ada_norm=100, norm_num_groups=4)),
    diffusion("sd3", "SD3Transformer2DModel", noised, pooled_text, sample_size=8, patch_size=2, in_channels=4,
              num_layers=2,
              attention_head_dim=6, num_attention_heads=4, joint_attention_dim=12, caption_projection_dim=24,
              pooled_projection_dim=12, pos_embed_max_size=8),
    diffusion("unet2d_conditioned", "UNet2DConditionModel", noised, denoised_by_text, cross_attention_dim=12, **UNET,
              attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
              up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
    audio("conformer", "Conformer", vectors(13, 12), lengths_too, input_dim=12, num_heads=4, ffn_dim=20, num_layers=2,
          depthwise_conv_kernel_size=3),
    audio("conv_tasnet", "ConvTasNet", vectors(1, 96), of_x, num_sources=2, enc_kernel_size=8, enc_num_feats=12,
          msk_kernel_size=3, msk_num_feats=8, msk_num_hidden_feats=10, msk_num_layers=2, msk_num_stacks=1),
    audio("deepspeech", "DeepSpeech", vectors(1, 13, 6), of_x, n_feature=6, n_hidden=10, n_class=5),
    Entry("open_clip", "open_clip_torch", partial(clip, "CLIP")),
    segmented("smp_pspnet", "PSPNet", psp_out_channels=16),
    segmented("smp_unet", "Unet", decoder_channels=(12, 8, 4)),
]  # fmt: skip
