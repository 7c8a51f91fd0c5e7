"""The trainer runs in the workers of Ray Train, if Ray is installed: pip install 'ray[train]'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = """
import json, sys
import ray
import ray.train
import ray.train.torch
import torch.distributed as dist

def loop(options):
    import compiler_trainer as ct

    context, losses = ray.train.get_context(), []
    size = context.get_world_size()
    for number, mesh in enumerate(({"dp_shard": size}, {"tp": size})):
        model = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2}
        train = {"seq_len": 16, "global_batch_size": 4, "steps": 3}
        run = {"dir": f"{options['folder']}/{size}.{number}"}
        losses.append(ct.Trainer(model=model, train=train, lower={"backend": "eager"}, mesh=mesh, run=run).train())
    assert dist.is_initialized() and dist.get_world_size() == size  # the group of Ray stays
    if context.get_world_rank() == 0:
        open(f"{options['folder']}/losses{size}", "w").write(json.dumps(losses))

folder = sys.argv[1]
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
for size in (1, 2):
    scaling = ray.train.ScalingConfig(num_workers=size, use_gpu=False)
    run = ray.train.RunConfig(storage_path=folder, name=f"workers{size}")
    ray.train.torch.TorchTrainer(loop, train_loop_config={"folder": folder}, scaling_config=scaling, run_config=run).fit()
"""


@pytest.mark.full
def test_workers_of_ray_train_on_one_mesh_after_another(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-c", JOB, str(tmp_path)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, together = (json.loads((tmp_path / f"losses{size}").read_text()) for size in (1, 2))
    assert together == pytest.approx(alone, rel=1e-5) and alone[0] == alone[1]
