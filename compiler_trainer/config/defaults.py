"""Every option with its default, as hydra is told them."""

from __future__ import annotations

import dataclasses

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from compiler_trainer.config.options import tables
from compiler_trainer.config.schema import Config, ModelConfig


def store_defaults() -> None:
    """Tell hydra every option with its default; those of a decoder go with `model=decoder`, as its choices do."""
    options, decoder = defaults(), OmegaConf.create(dataclasses.asdict(ModelConfig()))
    OmegaConf.set_struct(decoder, True)
    options.model = {}
    options.cluster = {}  # figures come with a name
    for group in (options.model, options.cluster):  # a folder, or a module of one's own
        OmegaConf.set_struct(group, False)
    ConfigStore.instance().store(name="options", node=options)
    ConfigStore.instance().store(group="model", name="decoder", node=decoder)


def defaults() -> DictConfig:
    """Every option with its default; a table takes entries of any name."""
    options = OmegaConf.create(dataclasses.asdict(Config()))
    for name in tables(Config()):
        OmegaConf.set_struct(OmegaConf.select(options, name), False)
    return options
