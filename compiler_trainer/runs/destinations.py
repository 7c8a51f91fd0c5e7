"""Exports to places other than a disk: a folder or file of a store, or a repository of the Hugging Face hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import is_remote
from compiler_trainer.config.schema import Config, FolderConfig, ModelConfig
from compiler_trainer.models.gguf.file import is_gguf
from compiler_trainer.places.copies import name_on_hub
from compiler_trainer.places.hub import Repository, card_of, is_of_hub
from compiler_trainer.places.store import Place, split_url
from compiler_trainer.runs.export import export

LAST = ("config.json", "adapter_config.json", "config.yaml")


def export_to(cfg: Config, out: str, dtype: str | None, merge: bool, averaged: bool, check: bool) -> str:
    """Export a run to a folder or file of a disk, of a store (s3://...) or of the hub (hub:ORG/NAME).

    Return a sentence on how to load it. Raises what `export` raises.
    """
    if not is_of_hub(out) and not is_remote(out):
        return export(cfg, Path(out), dtype, merge, averaged, check)
    above, file = split_url(out) if is_gguf(out) else (out, "")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "export")
        if is_of_hub(out):
            repository = Repository(above, file)  # fails before any work
            sentence = export(cfg, folder / file, dtype, merge, averaged, check)
            sentence = sentence.replace(str(folder), repository.name)
            address = repository.upload(folder, model_card(cfg, repository.name, merge, sentence))
            return f"{address}; {sentence}"
        place = Place(above)
        if file in place.files() if file else place.files():
            raise UserError(out, "exists already; name a new one")
        sentence = export(cfg, folder / file, dtype, merge, averaged, check)
        files = sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda f: (f.name in LAST, f.name))
        for path in files:  # the configuration last: a partial export cannot be loaded
            place.put(path, path.relative_to(folder).as_posix())
        return f"{len(files)} files; once they are on a disk, {sentence.replace(str(folder), 'FOLDER')}"


def model_card(cfg: Config, name: str, merge: bool, sentence: str) -> str:
    """Return the model card of an export: library and base model for the hub's pages, and how to load it."""
    metadata: dict[str, Any] = {"tags": ["compiler-trainer"]}
    origin = "Trained"
    if isinstance(cfg.model, FolderConfig | ModelConfig):
        metadata |= {"library_name": "transformers"}
    if isinstance(cfg.model, FolderConfig):
        metadata |= {"library_name": "peft"} if cfg.model.lora and not merge else {}
        base = name_on_hub(cfg.model.path)
        if base and cfg.model.init == "weights":
            metadata |= {"base_model": base}
            origin = f"Trained from [{base}](https://huggingface.co/{base})"
    text = f"{origin} with compiler-trainer, on sequences of up to {cfg.train.seq_len:,} tokens."
    return card_of(metadata, f"# {name.partition('/')[2]}\n\n{text}\n\n{sentence[0].upper()}{sentence[1:]}.\n")
