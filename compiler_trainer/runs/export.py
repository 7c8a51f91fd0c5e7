"""A run's weights as a folder that others load: transformers and peft, or any reader of safetensors."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, FolderConfig, ModelConfig
from compiler_trainer.data.tokenizers import tokenizer_here, tokenizer_of
from compiler_trainer.models.decoders import as_transformers, form_of
from compiler_trainer.models.folder import library
from compiler_trainer.models.place import folder_of
from compiler_trainer.models.weights import ONE_FILE
from compiler_trainer.places.store import Place
from compiler_trainer.runs.saved import trained_model

LAST = ("config.json", "adapter_config.json", "config.yaml")
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")  # of a tokenizer.json
END = "<|endoftext|>"  # what a byte tokenizer ends a document with


def export_to_store(cfg: Config, url: str, dtype: torch.dtype | None, merge: bool, averaged: bool = False) -> str:
    """Write it as a folder of a store, what says what it is last: without that nothing loads a part of it."""
    place = Place(url)
    if place.files():
        raise UserError(url, "is there already; name a folder that is not")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "export")
        said = export(cfg, out, dtype, merge, averaged)
        files = sorted(out.iterdir(), key=lambda file: (file.name in LAST, file.name))
        for file in files:
            place.put(file, file.name)
        return f"{len(files)} files; once they are on a disk, {said.replace(str(out), 'FOLDER')}"


def export(cfg: Config, out: Path, dtype: torch.dtype | None, merge: bool, averaged: bool = False) -> str:
    """Write the newest checkpoint of a run as a folder; what it is and how it is loaded, in a sentence.

    `dtype` is that of its floating numbers (None: `train.dtype`). Of a model with LoRA the terms alone are written, or,
    with `merge`, the model with them added to its weights. `averaged` weights are those of `train.ema`. The folder is
    there once it is whole. Raises UserError where a model has no such form.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(str(out), "is there already; name a folder that is not, or an empty one")
    if isinstance(cfg.model, ModelConfig):
        form_of(cfg.model)  # before its weights are read
    if merge and not (isinstance(cfg.model, FolderConfig) and cfg.model.lora):
        raise UserError("--merge", "is for a model with model.lora, and this one has nothing to merge")
    _, module = trained_model(cfg, averaged)
    place = out.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as scratch:
        made = Path(scratch, "export")
        made.mkdir()
        said = write(cfg, module, made, dtype, merge)
        made.replace(place)
    return said.replace(str(made), str(out))


def write(cfg: Config, module: Any, out: Path, dtype: torch.dtype | None, merge: bool) -> str:
    """Write a module with the weights of a run; how it is loaded, in a sentence."""
    if isinstance(cfg.model, FolderConfig):
        write_folder(cfg, module, out, dtype, merge)
        if cfg.model.lora and not merge:
            return f"load it with peft's PeftModel.from_pretrained(model, {str(out)!r})"
        write_tokenizer(cfg, out)
        return loaded_by_transformers(out)
    if isinstance(cfg.model, ModelConfig):
        model = as_transformers(cfg.model, module)
        model.config.max_position_embeddings = cfg.train.seq_len  # further ones it has not seen
        end = tokenizer_of(cfg.data).end_of_document
        model.config.eos_token_id = model.generation_config.eos_token_id = end
        save(model.to(dtype), out)
        write_tokenizer(cfg, out)
        name_end(out, end)
        return loaded_by_transformers(out)
    shutil.copy(Path(cfg.run.dir, "config.yaml"), out / "config.yaml")
    tensors = {name: converted(value, dtype).contiguous() for name, value in untied(module).items()}
    save_file(tensors, out / ONE_FILE)
    return f"load it with model.load_state_dict(safetensors.torch.load_file({str(out / ONE_FILE)!r}))"


def save(model: Any, out: Path) -> None:
    """As transformers or peft write it, without bars of progress."""
    library("transformers.utils.logging").disable_progress_bar()
    model.save_pretrained(out)


def loaded_by_transformers(out: Path) -> str:
    """How such a folder is loaded."""
    return f"load it with transformers' AutoModelForCausalLM.from_pretrained({str(out)!r})"


def write_folder(cfg: Config, module: Any, out: Path, dtype: torch.dtype | None, merge: bool) -> None:
    """A folder as the one that the model came from; of LoRA the terms alone, or all of the weights with them added."""
    assert isinstance(cfg.model, FolderConfig)
    named, here = cfg.model.path, folder_of(cfg).path
    if cfg.model.lora:
        base = str(Path(named).resolve()) if here == named else named
        module.peft_config["default"].base_model_name_or_path = base
    model = module.merge_and_unload() if merge else module
    save(model.to(dtype), out)
    for pattern in ("*token*", "*.jinja"):
        for file in sorted(Path(here).glob(pattern)):
            shutil.copy(file, out / file.name)


def untied(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module, what has two names under both, each with memory of its own."""
    seen: set[int] = set()
    found = {}
    for name, value in module.state_dict().items():
        found[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return found


def converted(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Floating numbers in another dtype."""
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def write_tokenizer(cfg: Config, out: Path) -> None:
    """The tokenizer of the run and its chat template; that of bytes in the form of a tokenizer.json."""
    if cfg.data.tokenizer != "bytes":
        there = Path(tokenizer_here(cfg.data))
        files = {"tokenizer.json": there, **{name: there.with_name(name) for name in BESIDE}}
        for name, file in files.items():
            if file.is_file() and not (out / name).exists():
                shutil.copy(file, out / name)
        return
    symbols = byte_symbols()
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(out / "tokenizer.json"))


def name_end(out: Path, end: int) -> None:
    """Let a tokenizer_config.json say which token ends a document, where there is none."""
    path = out / "tokenizer_config.json"
    if not path.exists():
        token = Tokenizer.from_file(str(out / "tokenizer.json")).id_to_token(end)
        path.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}, indent=2) + "\n")


def byte_symbols() -> list[str]:
    """The character that stands for each byte in a tokenizer.json: itself if it prints, else one from 256 on."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]
