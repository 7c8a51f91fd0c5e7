"""What the device decides: the cluster that `cluster=auto` is, and the dtype of `passes.cast.param_dtype=auto`."""

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
    """The device of this process, as a cluster names it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else CPU


def for_running(cfg: Config) -> Config:
    """`cfg` as this device runs it; raises UserError where it is to be planned for a device of no cluster."""
    if is_open(cfg) and cfg.cluster.name == AUTO_CLUSTER.name and choice() is None:
        raise UserError("cluster", f"auto, but no cluster describes {here()}; name one to plan for")
    return settled(cfg, torch.cuda.is_available())


def for_predicting(cfg: Config) -> Config:
    """`cfg` as the GPUs of its cluster run it; raises UserError where neither options nor a GPU say which they are."""
    if cfg.cluster.name == AUTO_CLUSTER.name and choice() in (None, CPU):
        raise UserError("cluster", f"auto, but no cluster describes a GPU here ({here()}); name one, cluster=h100, say")
    return settled(cfg, not described(cfg.cluster).host_computes)


def settled(cfg: Config, on_gpu: bool) -> Config:
    """`cfg` with its cluster and the dtypes of a kind of device."""
    return dataclasses.replace(cfg, cluster=described(cfg.cluster), passes=passes_on(cfg.passes, on_gpu))


def passes_on(passes: PassesConfig, on_gpu: bool) -> PassesConfig:
    """Options of passes, `cast.param_dtype=auto` as a kind of device has it."""
    cast = passes.cast
    if cast.param_dtype != "auto":
        return passes
    reduce_dtype = cast.reduce_dtype or ("float32" if on_gpu else None)
    settled = dataclasses.replace(cast, param_dtype="bfloat16" if on_gpu else None, reduce_dtype=reduce_dtype)
    return dataclasses.replace(passes, cast=settled)


def described(cluster: ClusterConfig) -> ClusterConfig:
    """The cluster, `auto` as that of this device if there is one."""
    if cluster.name != AUTO_CLUSTER.name or (name := choice()) is None:
        return cluster
    return dataclasses.replace(cluster_named(name), gpus=cluster.gpus)


@cache
def cluster_named(name: str) -> ClusterConfig:
    """Return a choice of `cluster`; composing it takes a tenth of a second."""
    return build(ClusterConfig, compose([f"cluster={name}"])["cluster"], "cluster")


def choice() -> str | None:
    """Return the choice of `cluster` that describes this device, None if there is none."""
    return choices_by_device().get(here())


@cache
def choices_by_device() -> dict[str, str]:
    """Return the choices of `cluster` by the names of their devices; of several, the first."""
    files = sorted((CONF / "cluster").glob("*.yaml"), reverse=True)
    return {device: file.stem for file in files if (device := yamls.load(file).get("device"))}
