"""Start a small job as each engine starts jobs, stop it by the engine's signal, and repeat the command: a table.

    python -m tests.nightly.engines --out docs/measured/engines.md

The engines are imitated: the processes that they start, with their variables, on this machine. A job stops after ten
steps or more, continues from its checkpoint, and must end with the losses of a job that was not stopped, bit by bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from compiler_trainer.training.metrics import FILE, read

ROOT = Path(__file__).parents[2]
STEPS, PATIENCE_S = 300, 240
OPTIONS = (
    "model.dim=16 model.n_layers=1 model.n_heads=2 model.n_kv_heads=2 data=synthetic data.documents=60 "
    f"train.steps={STEPS} train.seq_len=16 train.global_batch_size=4 lower.backend=eager passes.verify=none "
    "run.dump_graphs=false checkpoint.interval=100 checkpoint.resume=auto eval.interval=null mesh.dp_shard=2"
).split()
COMMAND = [sys.executable, "-m", "compiler_trainer"]
VALUES = ("loss", "grad_norm", "lr", "tokens")


class Engine(NamedTuple):
    """An engine: the processes that it starts, each with variables and a command, and the signal that it sends them."""

    name: str
    processes: Callable[[int], list[tuple[Mapping[str, str], list[str]]]]
    signal: signal.Signals
    shown: str  # the variables, for the table


def srun(tasks: int, per_node: str, command: list[str]) -> Callable[[int], list[tuple[Mapping[str, str], list[str]]]]:
    """Return what starts tasks of `srun`; with a task per machine, the command is to start the ranks."""

    def processes(port: int) -> list[tuple[Mapping[str, str], list[str]]]:
        of_step = {"SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NODELIST": "localhost",
                   "SLURM_STEP_TASKS_PER_NODE": per_node}
        by_node = per_node != "2"
        return [
            ({**of_step, "SLURM_PROCID": str(n), "SLURM_LOCALID": "0" if by_node else str(n), "SLURM_NODEID": str(n) if by_node else "0"}, command)
            for n in range(tasks)
        ]

    return processes


def kubeflow(port: int) -> list[tuple[Mapping[str, str], list[str]]]:
    """Return the commands of two pods."""
    shared = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port)}
    return [({**shared, "PET_NODE_RANK": str(n)}, [*COMMAND, "launch"]) for n in range(2)]


def skypilot(port: int) -> list[tuple[Mapping[str, str], list[str]]]:
    """Return the commands of two machines; SkyPilot gives no port."""
    shared = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    return [({**shared, "SKYPILOT_NODE_RANK": str(n)}, [*COMMAND, "launch"]) for n in range(2)]


def torchrun(port: int) -> list[tuple[Mapping[str, str], list[str]]]:
    """Return torchrun's command."""
    flags = ["--nproc-per-node=2", f"--master-port={port}", "--shutdown-timeout=120"]
    return [({}, [sys.executable, "-m", "torch.distributed.run", *flags, "-m", "compiler_trainer"])]


ENGINES = (
    Engine("a shell", lambda port: [({}, [*COMMAND, "launch", "-n", "2"])], signal.SIGINT, "none"),
    Engine("torchrun", torchrun, signal.SIGTERM, "`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`"),
    Engine("SLURM, a task per rank", srun(2, "2", COMMAND), signal.SIGUSR1, "`SLURM_STEP_*`, `SLURM_PROCID`, `SLURM_LOCALID`"),
    Engine("SLURM, a task per machine", srun(2, "1(x2)", [*COMMAND, "launch", "-n", "1"]), signal.SIGUSR1, "the same"),
    Engine("Kubeflow Trainer, JobSet", kubeflow, signal.SIGTERM, "`PET_NNODES`, `PET_NODE_RANK`, `PET_MASTER_ADDR`, `PET_MASTER_PORT`"),
    Engine("SkyPilot", skypilot, signal.SIGTERM, "`SKYPILOT_NODE_IPS`, `SKYPILOT_NODE_RANK`, `SKYPILOT_NUM_GPUS_PER_NODE`"),
)


def main() -> None:
    """Write the table; exit with 1 if a job of an engine was not as it should be."""
    parser = argparse.ArgumentParser("python -m tests.nightly.engines", description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch, "whole")
        assert wait(start(ENGINES[0], whole)) == [0], text_of(whole)
        rows = [row(engine, Path(scratch, str(number)), whole) for number, engine in enumerate(ENGINES)]
    text = "\n".join([HEAD, *rows, TAIL])
    print(text)
    if args.out:
        args.out.write_text(text)
    sys.exit(1 if any("different" in each for each in rows) else 0)


def row(engine: Engine, folder: Path, whole: Path) -> str:
    """Stop a job of an engine and repeat it; return the row of the table."""
    processes = start(engine, folder)
    until_step(folder, 10, processes)
    for process in processes:
        process.send_signal(engine.signal)
    stopped = wait(processes)
    message = next((line for line in text_of(folder).splitlines() if line.startswith("stopped after")), "no message")
    again = wait(start(engine, folder))
    same = [[record.get(name) for name in VALUES] for record in read(folder / FILE)] == [
        [record.get(name) for name in VALUES] for record in read(whole / FILE)
    ]
    codes = ["/".join(map(str, sorted(set(each)))) for each in (stopped, again)]
    cells = [engine.name, engine.shown, f"{engine.signal.name} to {len(processes)}", codes[0], message.partition(";")[0], codes[1]]
    return "| " + " | ".join([*cells, "the same bits" if same else "different"]) + " |"


def start(engine: Engine, folder: Path) -> list[subprocess.Popen]:
    """Start the processes of an engine; their output is added to a file beside the run folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_", "SKYPILOT_"))}
    with open(folder.with_suffix(".log"), "a") as log:
        return [
            subprocess.Popen([*command, *OPTIONS, f"run.dir={folder}"], env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}, stdout=log, stderr=log)
            for env, command in engine.processes(free_port())
        ]


def wait(processes: list[subprocess.Popen]) -> list[int]:
    """Return the exit codes of processes."""
    return [process.wait(PATIENCE_S) for process in processes]


def until_step(folder: Path, step: int, processes: list[subprocess.Popen]) -> None:
    """Wait until a job has recorded a step."""
    end = time.monotonic() + PATIENCE_S
    while not (folder / FILE).exists() or (folder / FILE).read_text().count("\n") < step:
        assert time.monotonic() < end and all(process.poll() is None for process in processes), text_of(folder)
        time.sleep(0.05)


def text_of(folder: Path) -> str:
    """Return what a job has printed."""
    return folder.with_suffix(".log").read_text()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


HEAD = f"""# Engines

What a job of two ranks does when an engine starts it, stops it and repeats its command, with `checkpoint.resume=auto` and
{STEPS} steps on CPUs. The engines are imitated on one machine: the processes that they start, with the variables that they set
(`python -m tests.nightly.engines`). "The same bits" compares losses, gradient norms, learning rates and tokens of all steps with a job
that was not stopped. What each exit code means: [stop and resume](../guides/stop-and-resume.md#stop).

| engine | sets | sends | exit code | prints | repeated: exit code | all steps |
|---|---|---|---|---|---|---|"""
TAIL = """
Ray itself has run: in Ray Train 2.60, one worker and two trained on two meshes in a row inside Ray's process group, with the same
losses (`tests/multirank/test_in_ray.py`, where Ray is installed).
"""


if __name__ == "__main__":
    main()
