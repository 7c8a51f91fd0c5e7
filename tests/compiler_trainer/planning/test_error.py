"""The error shown with predictions is that of the published table."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from compiler_trainer.config.schema import ClusterConfig, Config, ExpertsConfig, ModelConfig
from compiler_trainer.planning.dry import EXPERTS, LARGEST, MEDIAN, error_bar

PAGE = (Path(__file__).parents[3] / "docs/measured/published.md").read_text()


def test_the_errors_are_those_of_the_published_table():
    assert f"median error {MEDIAN:.1%}, largest {LARGEST:+.1%}." in PAGE
    errors = [int(found) / 100 for found in re.findall(r"DeepSeek-V3 16B.*?\(\+(\d+)%\)", PAGE)]
    assert (min(errors), max(errors)) == EXPERTS


def test_dense_models_mixtures_and_cpus_have_errors_of_their_own():
    dense = Config(model=ModelConfig(), cluster=ClusterConfig(gpus=8))
    assert "8.5% off" in error_bar(dense)
    mixture = replace(dense, model=ModelConfig(experts=ExpertsConfig(count=4, top_k=1, width=64)))
    assert "31% to 36% slower" in error_bar(mixture)
    assert not error_bar(replace(dense, cluster=replace(dense.cluster, host_computes=True)))
