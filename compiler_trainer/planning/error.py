"""The error of predictions, as far as other trainers publish throughput: docs/measured/published.md.

A test compares these figures with that page's table.
"""

from __future__ import annotations

from compiler_trainer.config.schema import Config, ModelConfig
from compiler_trainer.planning.sizes import routed_rows

MEDIAN, LARGEST = 0.085, 0.222  # of the rows that are judged, all of them dense models
EXPERTS = 0.44, 0.57  # of the rows of mixtures of experts whose host waits for counts of rows: predicted so much faster


def error_bar(cfg: Config) -> str:
    """Return how far such a prediction is off, in a sentence; empty for a CPU, for which nothing is published."""
    if cfg.cluster.host_computes:
        return ""
    has_experts = bool(cfg.model.experts) if isinstance(cfg.model, ModelConfig) else routed_rows(cfg) > 1
    if has_experts:
        most, least = (1 - 1 / (1 + error) for error in reversed(EXPERTS))
        return f"mixtures of experts were {least:.0%} to {most:.0%} slower than predicted in 3 published jobs"
    return f"predictions are {MEDIAN:.1%} off published throughput in the median, {LARGEST:.0%} at most"
