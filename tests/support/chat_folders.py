"""A small Llama in a folder, with a chat template, and a file of conversations beside it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from byte_tokenizer import CHATML, write_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig


def chat_folder(path: Path, layers: int = 2) -> Path:
    """Write the model into a folder, and `chats.jsonl` beside it; return the folder."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2)
    config = LlamaConfig(vocab_size=300, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    write_tokenizer(path)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|endoftext|>"}))
    chats = [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"{i + 1}"}] for i in range(40)]
    (path.parent / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    return path
