"""Small folders of vision-language models as transformers writes them: random weights, tokenizer, image processor."""

from __future__ import annotations

import functools
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from byte_tokenizer import write_tokenizer
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
    Gemma4Config,
    Idefics3Config,
    LlavaConfig,
    LlavaNextConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
)
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

SIDE, PATCH = 16, 4  # pixels
IMAGE_TOKEN, EXTRA = "<image>", ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>"]
TEXT: dict[str, Any] = dict(model_type="llama", vocab_size=300, hidden_size=24, intermediate_size=36,
                            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
                            max_position_embeddings=512, pad_token_id=256, bos_token_id=256, eos_token_id=256)
SEES: dict[str, Any] = dict(hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
                            image_size=SIDE, patch_size=PATCH)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def llava(path: Path) -> Any:
    """Write the processor of a LLaVA; return its config."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)
    tokenizer = AutoTokenizer.from_pretrained(path)
    LlavaProcessor(images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
                   num_additional_image_tokens=1, chat_template=TEMPLATE).save_pretrained(path)
    return LlavaConfig(text_config=TEXT, vision_config={"model_type": "clip_vision_model", **SEES},
                       image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN), vision_feature_layer=-1)


def llava_next(path: Path) -> Any:
    """Write the processor of a LLaVA-NeXT, which cuts an image into tiles by its aspect ratio; return its config."""
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    size, points = {"height": SIDE, "width": SIDE}, [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]]
    images = LlavaNextImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size, image_grid_pinpoints=points)
    tokenizer = AutoTokenizer.from_pretrained(path)
    LlavaNextProcessor(images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
                       num_additional_image_tokens=1, chat_template=TEMPLATE).save_pretrained(path)
    return LlavaNextConfig(text_config=TEXT, vision_config={"model_type": "clip_vision_model", **SEES},
                           image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN), vision_feature_layer=-1,
                           image_grid_pinpoints=points)


def idefics3(path: Path) -> Any:
    """Write the processor of an Idefics3, which cuts no image into tiles; return its config."""
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE},
                                       do_image_splitting=False)
    tokenizer = AutoTokenizer.from_pretrained(path)
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE).save_pretrained(path)
    return Idefics3Config(text_config=TEXT, vision_config=SEES, scale_factor=2,
                          image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))


def of_any_size(path: Path) -> dict[str, int]:
    """Write a processor of Qwen2-VL, whose images have any size; return the ids of special tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096})
    images.save_pretrained(path)
    add_tokens(path, TEMPLATE.replace("<image>", "<fake_token_around_image><image>"))  # two images are never adjacent
    tokenizer = AutoTokenizer.from_pretrained(path)
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<{name}>") for name in ("image", "video")}


def turning(kind: str, **more: Any) -> dict[str, Any]:
    """Return the config of a decoder with positions in time, height and width."""
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    return {**TEXT, "model_type": kind, "rope_parameters": rotary, **more}


def qwen2_vl(path: Path) -> Any:
    """Write the processor of a Qwen2-VL; return its config."""
    tower = dict(embed_dim=24, hidden_size=24, mlp_ratio=2, depth=2, num_heads=2, patch_size=PATCH)
    return Qwen2VLConfig(text_config=turning("qwen2_vl_text"), vision_config=tower, **of_any_size(path))


def qwen3_5(path: Path) -> Any:
    """Write the processor of a Qwen3.5, which has delta rules; return its config."""
    tower = dict(hidden_size=24, intermediate_size=36, depth=2, num_heads=2, patch_size=PATCH, out_hidden_size=24,
                 num_position_embeddings=16)
    rules = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=6, linear_value_head_dim=6,
                 layer_types=["linear_attention", "full_attention"])
    text = turning("qwen3_5_text", **rules)
    text["rope_parameters"] |= {"partial_rotary_factor": 1.0}
    return Qwen3_5Config(text_config=text, vision_config=tower, **of_any_size(path))


def gemma4(path: Path) -> Any:
    """Write the processor of a Gemma 4, whose images have padding; return its config, without audio."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    Gemma4ImageProcessorPil(patch_size=2, pooling_kernel_size=2, max_soft_tokens=70).save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = {"image": "<image>", "video": "<video>", "boi": "<fake_token_around_image>", "eoi": "<global-img>"}
    tower = dict(hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                 head_dim=8, pooling_kernel_size=2, patch_size=2, position_embedding_size=300)
    text = {**TEXT, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "global_head_dim": 8,
            "use_bidirectional_attention": "vision", "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    return Gemma4Config(text_config=text, vision_config=tower, audio_config=None,
                        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()})


def gemma3(path: Path) -> Any:
    """Write the processor of a Gemma 3, whose images have 4 tokens and attend within themselves; return its config."""
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    ids = {"image_token": "<video>", "boi_token": IMAGE_TOKEN, "eoi_token": "<global-img>"}
    tokenizer = AutoTokenizer.from_pretrained(path, extra_special_tokens=ids)
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=4).save_pretrained(path)
    text = {**TEXT, "model_type": "gemma3_text", "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"]}
    boi, eoi = (tokenizer.convert_tokens_to_ids(ids[name]) for name in ("boi_token", "eoi_token"))
    return Gemma3Config(text_config=text, vision_config={"model_type": "siglip_vision_model", **SEES},
                        mm_tokens_per_image=4, image_token_index=tokenizer.convert_tokens_to_ids("<video>"),
                        boi_token_index=boi, eoi_token_index=eoi)


KINDS = {"gemma3": gemma3, "gemma4": gemma4, "llava": llava, "llava_next": llava_next, "idefics3": idefics3, "qwen2_vl": qwen2_vl, "qwen3_5": qwen3_5}


@functools.cache
def vision_folder(kind: str = "llava") -> Path:
    """Return a folder of that kind; tests share it and must not write into it."""
    torch.manual_seed(0)
    path = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
    write_tokenizer(path)
    add_tokens(path)
    config = KINDS[kind](path)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def add_tokens(path: Path, template: str = TEMPLATE) -> None:
    """Add the special tokens of images to the tokenizer, and the template with image parts."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens(EXTRA)
    backend.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


def picture(seed: int, size: tuple[int, int] = (20, 18)) -> bytes:
    """Return a PNG of random colours, of `size` (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()
