"""The default of every option, in hydra's config store."""

from __future__ import annotations

import dataclasses

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from compiler_trainer.config.options import tables
from compiler_trainer.config.schema import Config, ModelConfig


def store_defaults() -> None:
    """Store every option with its default for hydra. The options of a decoder are stored as `model=decoder`."""
    options, decoder = defaults(), OmegaConf.create(dataclasses.asdict(ModelConfig()))
    OmegaConf.set_struct(decoder, True)
    options.model = {}
    options.cluster = {}  # the figures come from a choice of `cluster`
    for group in (options.model, options.cluster):  # a folder or the user's module has other options
        OmegaConf.set_struct(group, False)
    ConfigStore.instance().store(name="options", node=options)
    ConfigStore.instance().store(group="model", name="decoder", node=decoder)


def defaults() -> DictConfig:
    """Return every option with its default. Tables accept any names."""
    options = OmegaConf.create(dataclasses.asdict(Config()))
    for name in tables(Config()):
        OmegaConf.set_struct(OmegaConf.select(options, name), False)
    return options
