"""The engines that start processes of a job: the place of each process, as torchrun's environment variables.

| engine | starts | tells it by |
|---|---|---|
| torchrun, Ray Train | each rank | `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` |
| `srun` of SLURM | tasks | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_STEP_NODELIST` and their like |
| Kubeflow Trainer (JobSet) | a pod per machine | `PET_NNODES`, `PET_NODE_RANK`, `PET_MASTER_ADDR` and their like |
| SkyPilot | a process per machine | `SKYPILOT_NODE_RANK`, `SKYPILOT_NODE_IPS`, `SKYPILOT_NUM_GPUS_PER_NODE` |

A task of `srun` is a rank. A process per machine is one only if it is to be the only rank there; otherwise
`compiler-trainer launch` starts the ranks of the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from compiler_trainer.config.errors import UserError

PORT = 29500  # of the store, if the engine names none: PyTorch's
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


class Place(NamedTuple):
    """The place of this process among those that an engine started, and the address of the first one.

    `ranks` are the ranks that each process is to start, as torchrun's `--nproc-per-node` takes them; "1" for none.
    """

    engine: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    ranks: str

    def as_rank(self) -> dict[str, str]:
        """Return torchrun's variables of this process as a rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }

    def __str__(self) -> str:
        return f"{self.engine} started {self.size} processes; the first one is at {self.address}:{self.port}"


def place_in_engine(env: Mapping[str, str]) -> Place | None:
    """Return the place that an engine other than torchrun gave this process; None if it started only this process.

    Raises UserError if two engines give places, or if a variable is missing.
    """
    if "RANK" in env:
        if missing := [name for name in TORCHRUN if name not in env]:
            problem = f"is {env['RANK']}, but {', '.join(missing)} is not set, as where RANK counts machines"
            raise UserError("RANK", f"{problem}; unset RANK and WORLD_SIZE, and use compiler-trainer launch")
        return None
    places = [place for place in (of_srun(env), of_kubeflow(env), of_skypilot(env)) if place and place.size > 1]
    if len(places) > 1:
        engines = " and ".join(place.engine for place in places)
        raise UserError("environment", f"{engines} both give this process a place; unset the variables of one of them")
    return next(iter(places), None)


def place_of_rank(env: Mapping[str, str]) -> Place | None:
    """Return the place of this process as a rank, as `place_in_engine`; raise UserError if it is to start several."""
    place = place_in_engine(env)
    if place is not None and place.ranks != "1":
        problem = f"started one process for {place.ranks} ranks on each of {place.size} machines"
        raise UserError(place.engine, f"{problem}; write `compiler-trainer launch` before the options")
    return place


# ---- engines -------------------------------------------------------------------------------------------


def of_srun(env: Mapping[str, str]) -> Place | None:
    """Return the place of a task that `srun` started; the variables are those of its step."""
    if "SLURM_STEP_NUM_TASKS" not in env or "SLURM_PROCID" not in env:
        return None
    tasks = [*counts_in(env["SLURM_STEP_TASKS_PER_NODE"])]
    number = int(env["SLURM_JOB_ID"]) + 97 * int(env["SLURM_STEP_ID"])  # steps of a job may run at the same time
    return Place(
        "SLURM",
        int(env["SLURM_PROCID"]),
        int(env["SLURM_STEP_NUM_TASKS"]),
        int(env["SLURM_LOCALID"]),
        tasks[int(env["SLURM_NODEID"])],
        first_host(env["SLURM_STEP_NODELIST"]),
        15000 + number % 15000,
        "1",
    )


def of_kubeflow(env: Mapping[str, str]) -> Place | None:
    """Return the place of a pod of Kubeflow Trainer."""
    if "PET_NNODES" not in env:
        return None
    for name in ("PET_NODE_RANK", "PET_MASTER_ADDR"):
        if name not in env and int(env["PET_NNODES"]) > 1:
            raise UserError(name, f"is not set, but PET_NNODES={env['PET_NNODES']}; set it as torchrun needs it")
    count, number = int(env["PET_NNODES"]), int(env.get("PET_NODE_RANK", 0))
    address, port = env.get("PET_MASTER_ADDR", ""), int(env.get("PET_MASTER_PORT", PORT))
    return Place("Kubeflow Trainer", number, count, 0, 1, address, port, env.get("PET_NPROC_PER_NODE", "1"))


def of_skypilot(env: Mapping[str, str]) -> Place | None:
    """Return the place of a process that SkyPilot started on each machine."""
    if "SKYPILOT_NODE_IPS" not in env:
        return None
    addresses, number = env["SKYPILOT_NODE_IPS"].split(), int(env["SKYPILOT_NODE_RANK"])
    ranks = env.get("SKYPILOT_NUM_GPUS_PER_NODE", "1")
    return Place("SkyPilot", number, len(addresses), 0, 1, addresses[0], PORT, "1" if ranks == "0" else ranks)


def counts_in(text: str) -> Iterator[int]:
    """Yield the numbers of tasks by machine, of SLURM's `2(x3),1`."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(count)] * int(times or 1)


def first_host(text: str) -> str:
    """Return the first machine of SLURM's `node[07-12,20]-ib,gpu1`."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", text).split(",")[0]
