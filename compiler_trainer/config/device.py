"""The options that depend on the device, and a cluster's options as the objects that predictions use.

`cluster=auto` and `passes.cast.param_dtype=auto` are resolved for a device. Objects count in bytes, FLOPs and seconds.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import cache
from pathlib import Path

import torch

from compiler_trainer.config.cluster import AUTO_CLUSTER, ClusterConfig, CollectiveTimes, RatesConfig
from compiler_trainer.config.compose import compose
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import CONF, load_yaml
from compiler_trainer.config.options import build, not_one_of
from compiler_trainer.config.schema import Config, PassesConfig, is_open
from passes.cost.accounting import SENT
from passes.cost.cluster import Beside, Cluster, Links, Protocol
from passes.cost.rates import Curve, Rates
from passes.ir.machine import Balance

CPU = "cpu"


def device_name() -> str:
    """Return the device of this process, as clusters name it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else CPU


def for_running(cfg: Config) -> Config:
    """Return `cfg` with `auto` resolved for this device.

    Raises UserError if the job has to be planned and no cluster describes the device.
    """
    if is_open(cfg) and cfg.cluster.name == AUTO_CLUSTER.name and cluster_of_device() is None:
        raise UserError("cluster", f"auto, but no cluster describes {device_name()}; name one to plan for")
    return resolve_auto(cfg, torch.cuda.is_available())


def for_predicting(cfg: Config) -> Config:
    """Return `cfg` with `auto` resolved for the GPUs of its cluster.

    Raises UserError if neither the options nor a GPU of this process say which GPUs these are.
    """
    if cfg.cluster.name == AUTO_CLUSTER.name and cluster_of_device() in (None, CPU):
        problem = f"auto, but no cluster describes a GPU here ({device_name()})"
        raise UserError("cluster", f"{problem}; name one, as cluster=h100")
    return resolve_auto(cfg, not resolve_cluster(cfg.cluster).host_computes)


def resolve_auto(cfg: Config, on_gpu: bool) -> Config:
    """Return `cfg` with a named cluster, and dtypes for a GPU or a CPU."""
    cluster = resolve_cluster(cfg.cluster)
    return dataclasses.replace(cfg, cluster=cluster, passes=with_budget(passes_on(cfg.passes, on_gpu), cluster))


def with_budget(passes: PassesConfig, cluster: ClusterConfig) -> PassesConfig:
    """Return the options of passes, in which a budget of memory without a figure is the memory of the cluster's GPUs.

    Raises UserError if no cluster describes the device.
    """
    if passes.remat.policy != "budget" or passes.remat.budget_gib is not None:
        return passes
    if cluster.name == AUTO_CLUSTER.name:
        problem = f"null is the memory of a GPU of the cluster, and none describes {device_name()}"
        raise UserError("passes.remat.budget_gib", f"{problem}; set it to the GiB of a rank")
    remat = dataclasses.replace(passes.remat, budget_gib=round(usable_gib(cluster, is_alone=False), 3))
    return dataclasses.replace(passes, remat=remat)


def usable_gib(cluster: ClusterConfig, is_alone: bool) -> float:
    """Return the memory of a GPU that is left for tensors, in GiB: without driver, communicators and allocator."""
    device_gib = cluster.context_gib + (0.0 if is_alone else cluster.communicator_gib)
    return (cluster.hbm_gib - device_gib) / (1 + cluster.allocator_loss)


def passes_on(passes: PassesConfig, on_gpu: bool) -> PassesConfig:
    """Return the options of passes, with `cast.param_dtype=auto` resolved for a GPU or a CPU."""
    cast = passes.cast
    if cast.param_dtype != "auto":
        return passes
    reduce_dtype = cast.reduce_dtype or ("float32" if on_gpu else None)
    resolved = dataclasses.replace(cast, param_dtype="bfloat16" if on_gpu else None, reduce_dtype=reduce_dtype)
    return dataclasses.replace(passes, cast=resolved)


def resolve_cluster(cluster: ClusterConfig) -> ClusterConfig:
    """Return the cluster; `auto` becomes the cluster of this device, if there is one."""
    if cluster.name != AUTO_CLUSTER.name or (name := cluster_of_device()) is None:
        return cluster
    return dataclasses.replace(cluster_named(name), gpus=cluster.gpus)


@cache
def cluster_named(name: str) -> ClusterConfig:
    """Return a choice of `cluster`. Composing it takes a tenth of a second."""
    return build(ClusterConfig, compose([f"cluster={name}"])["cluster"], "cluster")


def cluster_of_device() -> str | None:
    """Return the choice of `cluster` that describes this device, None if there is none."""
    return choices_by_device().get(device_name())


@cache
def choices_by_device() -> dict[str, str]:
    """Return the choices of `cluster` by device; of several for a device, the alphabetically first."""
    files = sorted((CONF / "cluster").glob("*.yaml"), reverse=True)
    return {device: file.stem for file in files if (device := load_yaml(file).get("device"))}


# ---- clusters as predictions use them ------------------------------------------------------------------


TABLES = CONF / "cluster" / "rates"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
US = 1e-6
LARGE_FLOPS, LARGE_BYTES = 1e12, 2**28  # typical of the kernels that take most of a step's time
# kind of collective -> largest buffer of a rank among p ranks, in units of the rank's own operand
BUFFER = {"all_gather": lambda p: p, "reduce_scatter": lambda p: 1, "all_reduce": lambda p: 1,
          "all_to_all": lambda p: 1, "shift": lambda p: 1}  # fmt: skip


def cluster_of(cfg: ClusterConfig) -> Cluster:
    """Return the cluster with its measured rates; raise UserError if there are no such rates."""
    tables = tables_of(cfg)
    return Cluster(
        gpus_per_node=cfg.gpus_per_node,
        rates=rates_of(cfg, tables),
        links=Links(
            1e9 * cfg.intra_gb_s,
            1e9 * cfg.inter_gb_s,
            tuple(Protocol(US * p.base_us, US * p.intra_us, US * p.inter_us, p.share) for p in tables.protocols),
            {(times.kind, times.ranks): by_sent_bytes(times) for times in tables.collectives},
        ),
        beside=Beside(cfg.beside_computing, cfg.beside_moving, cfg.beside_sending),
        expert_load=cfg.expert_load,
    )


def balance_of(cfg: ClusterConfig, dtype: str | None) -> Balance:
    """Return the FLOPs that a GPU computes per byte sent or moved, for large kernels of a dtype (None: fp32)."""
    peak_flops, rates = 1e12 * cfg.throttle * getattr(cfg.peak_tflops, dtype or "float32"), cluster_of(cfg).rates
    return Balance(
        gpus_per_node=cfg.gpus_per_node,
        flops_per_byte=peak_flops / (1e9 * cfg.intra_gb_s),
        outside=cfg.intra_gb_s / cfg.inter_gb_s,
        flops_per_moved_byte=rates.products[DTYPES[dtype or "float32"]].at(LARGE_FLOPS) / rates.memory.at(LARGE_BYTES),
    )


def tables_of(cfg: ClusterConfig) -> RatesConfig:
    """Return the measured rates of a cluster; raise UserError naming the files of rates that exist."""
    if isinstance(cfg.rates, RatesConfig):
        return cfg.rates
    names = sorted(path.stem for path in TABLES.glob("*.yaml"))
    if cfg.rates not in names:
        raise UserError("cluster.rates", not_one_of(names, cfg.rates))
    return read(TABLES / f"{cfg.rates}.yaml")


@functools.cache
def read(path: Path) -> RatesConfig:
    """Return the tables in a file."""
    return build(RatesConfig, load_yaml(path), str(path))


def rates_of(cfg: ClusterConfig, tables: RatesConfig) -> Rates:
    """Return the rates of kernels; raise UserError naming the attention kernels that have rates."""
    kernels = {rates.kernel: rates for rates in tables.attention}
    if cfg.attention not in kernels:
        raise UserError("cluster.attention", not_one_of(kernels, cfg.attention))
    attention = kernels[cfg.attention]

    def flops(points: tuple[tuple[float, float], ...], size: float = 1e9) -> Curve:
        return Curve(points).scaled(size, 1e12 * cfg.throttle)

    return Rates(
        products={dtype: flops(getattr(tables.products, name)) for name, dtype in DTYPES.items()},
        grouped=flops(tables.products.grouped),
        attention=flops(attention.forward, 1.0),
        attention_backward=flops(attention.backward, 1.0),
        memory=Curve(tables.memory).scaled(2**20, 1e9 * cfg.hbm_gb_s),
        kernel_s=US * cfg.kernel_us,
        launch_s=US * cfg.launch_us,
        operator_s=US * cfg.operator_us,
        host_computes=cfg.host_computes,
    )


def by_sent_bytes(times: CollectiveTimes) -> Curve:
    """Return the seconds of a collective by the bytes that a rank sends.

    The tables have them by the largest buffer of a rank.
    """
    brought = 2**20 / BUFFER[times.kind](times.ranks)
    return Curve(times.us).scaled(SENT[times.kind](int(brought), times.ranks), US)
