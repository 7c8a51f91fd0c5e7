"""Every recipe fits its GPUs with the planned mesh and accumulation."""

from __future__ import annotations

import pytest

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.planning.auto import choose_automatic
from compiler_trainer.planning.dry import dry_run

ON = [
    ("llama3_2_1b", 1), ("llama3_2_1b", 8), ("llama3_8b", 8), ("llama3_8b", 64), ("llama3_70b", 64), ("llama3_70b", 256),
    ("llama3_405b", 512), ("llama3_405b", 1024), ("deepseek_v3_16b", 8), ("deepseek_v3_16b", 64), ("qwen3_30b_a3b", 16),
    ("qwen3_30b_a3b", 64),
]


@pytest.mark.full
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("recipe", "gpus"), ON)
def test_it_fits_80_gib_and_computes_most_of_the_time(recipe, gpus, tmp_path):
    where = ["run.dry=true", "cluster=h100", f"cluster.gpus={gpus}", f"run.dir={tmp_path}/run", "plan.compile=1"]
    report = dry_run(choose_automatic(to_config(compose([f"recipe={recipe}", *where]))))
    assert report["prediction"]["memory"]["fits"]
    assert report["predicted"]["mfu"] > 0.2
