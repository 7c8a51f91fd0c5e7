"""Small model folders as transformers writes them: random weights, in several files."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

SIZES = dict(vocab_size=300, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=6, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES | {"intermediate_size": 64, "tie_word_embeddings": True}),  # a block of nf4
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=5),
    "gpt2": lambda: GPT2Config(vocab_size=300, n_embd=24, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0,
                               embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    "gpt_oss": lambda: GptOssConfig(**SIZES | {"hidden_size": 32, "intermediate_size": 32}, num_local_experts=2, num_experts_per_tok=1,
                                    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}),
}


@functools.cache
def folder(kind: str) -> Path:
    """Return a folder of that kind; tests share it and must not write into it."""
    torch.manual_seed(0)
    path = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
    model(kind).save_pretrained(path, max_shard_size="20KB")
    return path


def model(kind: str) -> Any:
    """Return a model of that kind with random weights, including biases and norms."""
    made = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def loaded(path: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Return the model that transformers loads from a folder, in training mode."""
    made = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).train()
    made.set_experts_implementation("eager")  # its grouped matmuls do not support fp64
    return made


def cached(hub: Path, name: str, folder: Path, left_out: str = "") -> None:
    """Put a model into the hub's cache."""
    repository, commit = hub / f"models--{name.replace('/', '--')}", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        if file.name != left_out:
            (snapshot / file.name).write_bytes(file.read_bytes())
