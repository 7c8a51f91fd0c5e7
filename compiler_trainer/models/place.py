"""Where the folder of a model is on this machine: a path, a copy of a store's, or what the hub's cache has of an id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, FolderConfig
from compiler_trainer.models.weights import INDEX, files_of
from compiler_trainer.places.cache import cache_of
from compiler_trainer.places.copies import folder_here

CONFIG = "config.json"
BESIDE = ("*.json", "*token*", "*.jinja", "*.txt", "*.model")  # of a model, beside its weights
WEIGHTS = ("model*.safetensors", INDEX)


def folder_of(cfg: Config) -> FolderConfig:
    """The options of a model with a folder of this machine as their path, which holds what `init` asks for."""
    assert isinstance(cfg.model, FolderConfig)
    with_weights = cfg.model.init == "weights"
    patterns = BESIDE + (WEIGHTS if with_weights else ())
    whole = has_weights if with_weights else has_config
    path = folder_here("model.path", cfg.model.path, patterns, cache_of(cfg.data), whole)
    return replace(cfg.model, path=str(path))


def has_config(folder: Path) -> bool:
    """Whether a folder says what its model is."""
    return (folder / CONFIG).is_file()


def has_weights(folder: Path) -> bool:
    """Whether a folder has all of its model."""
    try:
        return has_config(folder) and all(file.is_file() for file in files_of(folder))
    except UserError:  # of its index
        return False
