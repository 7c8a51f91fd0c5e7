"""The local folder of a model: a path, a copy from an object store, or the hub cache's folder of a model name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, DistillationConfig, FolderConfig
from compiler_trainer.models.weights import INDEX, files_of
from compiler_trainer.places.cache import cache_of
from compiler_trainer.places.copies import folder_here

CONFIG = "config.json"
BESIDE = ("*.json", "*token*", "*.jinja", "*.txt", "*.model")  # files of a model other than its weights
WEIGHTS = ("model*.safetensors", INDEX)


def folder_of(cfg: Config) -> FolderConfig:
    """Return the options of a model with a local folder as their path, which holds the files that `init` needs."""
    assert isinstance(cfg.model, FolderConfig)
    with_weights = cfg.model.init == "weights"
    patterns = BESIDE + (WEIGHTS if with_weights else ())
    is_complete = has_weights if with_weights else has_config
    path = folder_here("model.path", cfg.model.path, patterns, cache_of(cfg.data), is_complete)
    return replace(cfg.model, path=str(path))


def teacher_of(cfg: Config) -> FolderConfig:
    """Return the options of a distillation's teacher, with the folder of its files as their path."""
    assert isinstance(cfg.loss, DistillationConfig) and isinstance(cfg.model, FolderConfig)
    path = folder_here("loss.teacher", cfg.loss.teacher, BESIDE + WEIGHTS, cache_of(cfg.data), has_weights)
    return FolderConfig(path=str(path), attention=cfg.model.attention)


def has_config(folder: Path) -> bool:
    """Return True if a folder holds the config of its model."""
    return (folder / CONFIG).is_file()


def has_weights(folder: Path) -> bool:
    """Return True if a folder holds the config and all weights of its model."""
    try:
        return has_config(folder) and all(file.is_file() for file in files_of(folder))
    except UserError:  # the index is damaged
        return False
