"""The loop is a function: it runs in a worker of Ray or Monarch, which has a process group, and in any thread."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

WORKER = """
import json, os, sys, threading
import torch.distributed as dist
import compiler_trainer as ct

rank, size, port = map(int, sys.argv[1:])
if size > 1:  # as an engine does: no variable in the environment
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
model = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2}
train = {"seq_len": 16, "global_batch_size": 4, "steps": 3}
rest = {"model": model, "train": train, "lower": {"backend": "eager"}}
losses = []

def work():
    for number, mesh in enumerate(({"dp_shard": size}, {"tp": size}, {"dp_replicate": size})):
        trainer = ct.Trainer(**rest, mesh=mesh, run={"dir": f"run{size}_{number}"})
        losses.append(trainer.train())
        assert trainer.state_dict()
    trainer.stop("enough")  # before it starts, so that all ranks end at the first step
    try:
        ct.Trainer(**rest, mesh={"dp_shard": size}, run={"dir": f"run{size}_1"}).train()
    except ct.UserError as error:
        losses.append(str(error).split(":")[0])

thread = threading.Thread(target=work)
thread.start()
thread.join()
if size > 1:
    assert dist.is_initialized() and dist.get_world_size() == size
    dist.barrier()
    dist.destroy_process_group()
if rank == 0:
    print("LOSSES", json.dumps(losses))
"""


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def losses(size, folder, port):
    ranks = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(n), str(size), str(port)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in range(size)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, outputs
    (line,) = (line for line in outputs[0][0].splitlines() if line.startswith("LOSSES"))
    return json.loads(line.removeprefix("LOSSES"))


@pytest.mark.full
def test_a_thread_of_workers_that_have_a_group_trains_on_one_mesh_after_another(tmp_path):
    alone, together = (losses(size, tmp_path, free_port()) for size in (1, 2))
    assert together[:3] == pytest.approx(alone[:3], rel=1e-5) and alone[3] == together[3] == "run.dir"


STOPPED = """
import threading
import compiler_trainer as ct

trainer = ct.Trainer(
    model={"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2}, train={"seq_len": 16, "global_batch_size": 4, "steps": 10**6},
    lower={"backend": "eager"}, run={"dir": "run"}, checkpoint={"interval": 10**6}, eval={"interval": None},
)
threading.Timer(0.5, trainer.stop, ("enough",)).start()
trainer.train()
print(trainer.run.step.state["optim.step"].local[0].item())
"""


@pytest.mark.full
def test_a_caller_stops_training_from_another_thread(tmp_path):
    done = subprocess.run([sys.executable, "-c", STOPPED], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    steps = int(float(lines[-1]))
    assert 1 <= steps < 10**6 and any(line.endswith(f"ended after step {steps:,} of 1,000,000: enough") for line in lines), done
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step_*")] == [f"step_{steps:08}"]
