"""The default job with overrides, composed by hydra."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from compiler_trainer.config.choices import CONF
from compiler_trainer.config.cluster import AUTO_CLUSTER
from compiler_trainer.config.defaults import store_defaults
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build, tables
from compiler_trainer.config.refusal import as_user_errors
from compiler_trainer.config.schema import AUTO, Config


def compose(overrides: Sequence[str] = (), further: Mapping[str, Any] | None = None) -> dict[Any, Any]:
    """Return the options of the default job with `overrides`, updated with `further`; raise UserError."""
    store_defaults()
    with as_user_errors(), beside_others(), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra.compose("train", list(overrides))
        composed.merge_with(further or {})
        options = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(options, dict)
    return options


@contextmanager
def beside_others() -> Iterator[None]:
    """Let hydra compose while hydra runs a job, as it does for a command line."""
    state = GlobalHydra.instance()
    running = state.hydra
    state.hydra = None
    try:
        yield
    finally:
        state.hydra = running


@cache
def default_job() -> Mapping[str, Any]:
    """Return the options of the default job without overrides, by dotted names; a table is one option."""
    return flat(dataclasses.asdict(typed(compose())), set(tables(Config())))


def flat(options: Mapping[str, Any], undivided: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Return options by dotted names. A mapping whose name is in `undivided` stays one option."""
    flattened: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        inside = isinstance(value, Mapping) and value and name not in undivided
        flattened |= flat(value, undivided, f"{name}.") if inside else {name: value}
    return flattened


def typed(options: Any) -> Config:
    """Return the options as a config; raise UserError naming the option at fault."""
    cfg = build(Config, {**options, "mesh": AUTO} if options["mesh"] == "auto" else options)
    if cfg.cluster.name == AUTO_CLUSTER.name and (figures := set(options["cluster"]) - {"name", "gpus"}):
        raise UserError(f"cluster.{min(figures)}", "goes with a named cluster; set cluster=h100, too, for example")
    return cfg
