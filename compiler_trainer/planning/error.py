"""The error of predictions against throughput published for other trainers: docs/measured/published.md.

A test compares these figures with the table of that page.
"""

from __future__ import annotations

from compiler_trainer.config.schema import Config, ModelConfig
from compiler_trainer.planning.sizes import routed_rows

MEDIAN, LARGEST = 0.085, 0.222  # over the judged rows of the table, all of dense models
EXPERTS = 0.44, 0.57  # predicted faster by this, for mixtures of experts whose host waits for token counts


def error_bar(cfg: Config) -> str:
    """Return a sentence on the error of a prediction; empty for a CPU, for which nothing is published."""
    if cfg.cluster.host_computes:
        return ""
    has_experts = bool(cfg.model.experts) if isinstance(cfg.model, ModelConfig) else routed_rows(cfg) > 1
    if has_experts:
        most, least = (1 - 1 / (1 + error) for error in reversed(EXPERTS))
        return f"mixtures of experts were {least:.0%} to {most:.0%} slower than predicted in 3 published jobs"
    return f"predictions are {MEDIAN:.1%} off published throughput in the median, {LARGEST:.0%} at most"
