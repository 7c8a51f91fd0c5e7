"""The options that depend on the device: `cluster=auto` and `passes.cast.param_dtype=auto`."""

from __future__ import annotations

import dataclasses
from functools import cache

import torch

from compiler_trainer.config import yamls
from compiler_trainer.config.choices import CONF
from compiler_trainer.config.cluster import AUTO_CLUSTER, ClusterConfig
from compiler_trainer.config.compose import compose
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config, PassesConfig, is_open

CPU = "cpu"


def here() -> str:
    """Return the device of this process, as clusters name it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else CPU


def for_running(cfg: Config) -> Config:
    """Return `cfg` with `auto` resolved for this device.

    Raises UserError if the job has to be planned and no cluster describes the device.
    """
    if is_open(cfg) and cfg.cluster.name == AUTO_CLUSTER.name and choice() is None:
        raise UserError("cluster", f"auto, but no cluster describes {here()}; name one to plan for")
    return settled(cfg, torch.cuda.is_available())


def for_predicting(cfg: Config) -> Config:
    """Return `cfg` with `auto` resolved for the GPUs of its cluster.

    Raises UserError if neither the options nor a GPU of this process say which GPUs these are.
    """
    if cfg.cluster.name == AUTO_CLUSTER.name and choice() in (None, CPU):
        raise UserError("cluster", f"auto, but no cluster describes a GPU here ({here()}); name one, as cluster=h100")
    return settled(cfg, not described(cfg.cluster).host_computes)


def settled(cfg: Config, on_gpu: bool) -> Config:
    """Return `cfg` with a named cluster, and dtypes for a GPU or a CPU."""
    return dataclasses.replace(cfg, cluster=described(cfg.cluster), passes=passes_on(cfg.passes, on_gpu))


def passes_on(passes: PassesConfig, on_gpu: bool) -> PassesConfig:
    """Return the options of passes, with `cast.param_dtype=auto` resolved for a GPU or a CPU."""
    cast = passes.cast
    if cast.param_dtype != "auto":
        return passes
    reduce_dtype = cast.reduce_dtype or ("float32" if on_gpu else None)
    settled = dataclasses.replace(cast, param_dtype="bfloat16" if on_gpu else None, reduce_dtype=reduce_dtype)
    return dataclasses.replace(passes, cast=settled)


def described(cluster: ClusterConfig) -> ClusterConfig:
    """Return the cluster; `auto` becomes the cluster of this device, if there is one."""
    if cluster.name != AUTO_CLUSTER.name or (name := choice()) is None:
        return cluster
    return dataclasses.replace(cluster_named(name), gpus=cluster.gpus)


@cache
def cluster_named(name: str) -> ClusterConfig:
    """Return a choice of `cluster`. Composing it takes a tenth of a second."""
    return build(ClusterConfig, compose([f"cluster={name}"])["cluster"], "cluster")


def choice() -> str | None:
    """Return the choice of `cluster` that describes this device, None if there is none."""
    return choices_by_device().get(here())


@cache
def choices_by_device() -> dict[str, str]:
    """Return the choices of `cluster` by device; of several for a device, the alphabetically first."""
    files = sorted((CONF / "cluster").glob("*.yaml"), reverse=True)
    return {device: file.stem for file in files if (device := yamls.load(file).get("device"))}
