"""The conversion of a cluster's options into the objects that predictions use, in bytes, FLOPs and seconds."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from compiler_trainer.config import yamls
from compiler_trainer.config.choices import CONF
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build, not_one_of
from compiler_trainer.config.rates import CollectiveTimes, RatesConfig
from compiler_trainer.config.schema import ClusterConfig
from passes.cost.accounting import SENT
from passes.cost.cluster import Beside, Cluster, Links, Protocol
from passes.cost.rates import Curve, Rates
from passes.program.machine import Balance

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
    return build(RatesConfig, yamls.load(path), str(path))


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
