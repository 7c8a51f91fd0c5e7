"""The tables of measured rates, by size, that `cluster.rates` holds or names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from compiler_trainer.config.kinds import NonNegativeFloat, ShareOfPeak
from compiler_trainer.config.options import Chosen, Must


def are_points(points: tuple[tuple[float, float], ...]) -> bool:
    """Return True if all numbers of [size, figure] pairs are above 0 and sizes increase."""
    return bool(points) and min(map(min, points)) > 0 and all(a < b for (a, _), (b, _) in zip(points, points[1:]))


Points = Annotated[
    tuple[tuple[float, float], ...], Must("be pairs of numbers above 0, [size, figure], sizes growing", are_points)
]


@dataclass(frozen=True)
class ProductRates:
    """The TFLOP/s of matmuls, by their GFLOP; `grouped` ones, of experts, by the GFLOP of a group."""

    float32: Points
    bfloat16: Points
    float8: Points
    grouped: Points


@dataclass(frozen=True)
class AttentionRates:
    """The TFLOP/s of an attention kernel, by the number of keys. Causal attention counts half of the FLOPs."""

    kernel: str
    forward: Points
    backward: Points


@dataclass(frozen=True)
class CollectiveTimes:
    """The microseconds of a collective among `ranks` ranks of a node, by the MiB of the largest buffer of a rank."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift"]
    ranks: Annotated[int, Must("be at least 2", lambda n: n >= 2)]
    us: Points


@dataclass(frozen=True)
class ProtocolConfig:
    """The microseconds before the first byte and per hop, inside a node and between nodes; the share of bandwidth."""

    base_us: NonNegativeFloat
    intra_us: NonNegativeFloat
    inter_us: NonNegativeFloat
    share: ShareOfPeak


@dataclass(frozen=True)
class RatesConfig:
    """The measured rates: lists of [size, figure], sizes increasing, interpolated in logarithms.

    `protocols` are for collectives without a table, among them those between nodes.
    """

    products: ProductRates
    attention: tuple[AttentionRates, ...]
    memory: Points  # share of hbm_gb_s that a kernel reaches, by the MiB that it moves
    collectives: tuple[CollectiveTimes, ...]
    protocols: Annotated[tuple[ProtocolConfig, ...], Must("name at least one", bool)]


def kind_of_rates(value: Any) -> Any:
    """Return the type of the rates of a cluster: tables, or the name of a file of tables."""
    return RatesConfig if isinstance(value, Mapping) else str


RatesOrName = Annotated[RatesConfig | str, Chosen(kind_of_rates, "name | tables")]
