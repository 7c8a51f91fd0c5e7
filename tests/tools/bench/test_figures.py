"""Benchmarks without another test: each command shown in docs/measured gives its figures at a small size."""

from __future__ import annotations

import subprocess
import sys

import pytest

SMALL = "model.dim=32 model.n_heads=2 model.n_kv_heads=2 model.ffn_dim=32"
COMMANDS = {
    "tools.bench.context --tokens 512 --rows 2": "all_gather",
    "tools.bench.documents --tokens 256 --counts 1,4 --heads 2 --width 16 --rounds 1": "by interval",
    "tools.bench.save --mib 2 --ranks 1 --rounds 1": "2 MiB on 1 ranks",
    "tools.bench.partition --model llama_debug --layers 2 --dp-shard 4 --tp 2 --seq-len 64": "2 layers, 8 ranks",
    "tools.bench.predicted --ranks 1 --only *full --budgets 1 --steps 1 --out OUT": "2 settings: median error",
    f"tools.bench --contenders ours --rounds 1 --steps 1 {SMALL} model.n_layers=1": "bodies compiled cold, warm",
    f"tools.bench.restart --layers 1 --rounds 1 {SMALL}": "| 1 |",
    f"tools.bench.restart --layers 1 --rounds 1 --ranks 2 mesh.dp_shard=2 {SMALL}": "| 1 |",
    "tools.bench.published --only torchtitan_2024_12/8B,*FSDP*8": "FSDP 8",
    "torch.distributed.run --standalone --nproc-per-node 2 -m tools.bench.pipeline "
    "--layers 2 --dim 32 --rows 4 --length 32 --steps 1 --rounds 1": "largest difference of losses",
}
SHORT = 3  # of these are in every run of the tests


@pytest.mark.parametrize("called", [pytest.param(c, marks=() if i < SHORT else pytest.mark.full) for i, c in enumerate(COMMANDS)])
def test_it_gives_its_figures(called, tmp_path):
    words = [str(tmp_path / "out.json") if word == "OUT" else word for word in called.split()]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert COMMANDS[called] in done.stdout
