"""Interpolation between two recomputations: as many of the first layers by the second one as it takes to fit.

Time and bytes lie on the line between the two settings. The peak is an upper bound: it may be at another place of the
step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from compiler_trainer.planning.estimate import Estimate
from compiler_trainer.planning.space import Candidate, First

POLICIES = ("none", "selective", "attention", "full")  # of one layer


class Mixture(NamedTuple):
    """The estimate between two settings that differ only in recomputation."""

    estimate: Estimate
    ends: tuple[Candidate, Candidate]


def mixtures(estimates: Iterable[Estimate], limit: float, names: Sequence[str]) -> list[Mixture]:
    """Return the fastest mixture that fits of each kind of settings, fastest first; `names` are the layers in order."""
    kinds: dict[Candidate, list[Estimate]] = {}
    for estimate in estimates:
        # with stages, the first layers are all in one
        has_one_policy = estimate.candidate.first is None and estimate.candidate.mesh.pp == 1
        if estimate.candidate.recompute in POLICIES and has_one_policy:
            kinds.setdefault(replace(estimate.candidate, recompute=""), []).append(estimate)
    fastest = []
    for estimates_of_kind in kinds.values():
        mixtures_of_kind = (
            mix(light, heavy, limit, tuple(names)) for light, heavy in itertools.permutations(estimates_of_kind, 2)
        )
        fastest += sorted(filter(None, mixtures_of_kind), key=lambda m: m.estimate.step_s)[:1]
    return sorted(fastest, key=lambda m: m.estimate.step_s)


def mix(light: Estimate, heavy: Estimate, limit: float, names: tuple[str, ...]) -> Mixture | None:
    """Return the mixture with the fewest layers like `heavy` that fits.

    None unless `heavy` fits, `light` does not, and `light` is faster; also None if all layers have to be like `heavy`.
    """
    if not (light.bytes > limit >= heavy.bytes and light.step_s < heavy.step_s):
        return None
    count = math.ceil(len(names) * (light.bytes - limit) / (light.bytes - heavy.bytes))
    if count >= len(names):
        return None
    candidate = replace(light.candidate, first=First(count, heavy.candidate.recompute, names))
    return Mixture(interpolated(candidate, light, heavy, count / len(names)), (light.candidate, heavy.candidate))


def interpolated(candidate: Candidate, light: Estimate, heavy: Estimate, share: float) -> Estimate:
    """Return the estimate of a setting with a `share` of its layers as in `heavy` and the others as in `light`."""

    def line(low: float, high: float) -> float:
        return low + share * (high - low)

    def lines(low: Mapping[str, float], high: Mapping[str, float]) -> dict[str, float]:
        return {key: line(low.get(key, 0.0), high.get(key, 0.0)) for key in {**low, **high}}

    return Estimate(
        candidate,
        line(light.compute_s, heavy.compute_s),
        lines(light.exposed_s, heavy.exposed_s),
        lines(light.memory, heavy.memory),
        line(light.step_s, heavy.step_s),
        line(light.bytes, heavy.bytes),
        {axis: lines(links, heavy.sent.get(axis, {})) for axis, links in light.sent.items()},
        light.place and heavy.place,
    )
