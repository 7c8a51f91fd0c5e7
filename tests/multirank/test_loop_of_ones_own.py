"""The Python trainer on two processes: one rank's callback ends all, and both have the weights of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compiler_trainer import checkpoint
from compiler_trainer.training.metrics import read

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import torch
import compiler_trainer as ct


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {"tokens": (torch.arange(16) + number) % 250}


class OfLast(ct.Callback):
    def on_step(self, run, record):
        if run.rank == run.step.mesh.world_size - 1 and record["step"] == 3:
            run.stop("the last rank has enough")


torch.manual_seed(0)
trainer = ct.Trainer(
    torch.nn.Sequential(torch.nn.Embedding(257, 16), torch.nn.Linear(16, 257)).double(),
    lambda model, batch: torch.nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()),
    Counting(),
    callbacks=[OfLast()],
    train={"steps": 6, "seq_len": 16, "global_batch_size": 4, "ema": 0.5},
    optim={"lr": 1e-2},
    lower={"backend": "eager"},
    eval={"interval": None},
    checkpoint={"interval": 2},
    run={"dir": sys.argv[1]},
)
trainer.train()
print("weights", sum(float(value.double().abs().sum()) for value in trainer.state_dict().values()), flush=True)
"""


def trained(folder: Path, ranks: int) -> tuple[list[float], list[float], str]:
    """Run the script; return the losses, the sum of each rank's weights, and the output."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*command, str(script), str(folder / "run")], env=env, check=True, timeout=200, capture_output=True, text=True)
    sums = [float(number) for number in re.findall(r"^weights (\S+)", done.stdout, re.MULTILINE)]
    return [each["loss"] for each in read(folder / "run/metrics.jsonl")], sums, done.stdout


@pytest.mark.full
def test_two_processes_train_as_one_and_any_of_them_may_end_the_run(tmp_path):
    runs = []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        runs.append(trained(tmp_path / str(ranks), ranks))
    (one, sums, _), (two, sums_of_ranks, output) = runs
    assert two == pytest.approx(one, abs=1e-5) and len(two) == 3
    assert len(sums_of_ranks) == 2, output
    assert sums_of_ranks == pytest.approx([sums[0]] * 2, rel=1e-6)
    assert "ended after step 3 of 6: a callback on another rank requested it" in output
    averages = [checkpoint.read_averaged(tmp_path / ranks / "run/checkpoints/step_00000003") for ranks in "12"]
    for name, value in averages[0].items():
        assert (averages[1][name] - value).abs().max() < 1e-5
