"""Half an hour with a GPU in one command: what works, how fast it is, beside stock PyTorch and beside the prediction.

    python -m tools.gpu_day --out gpu_day                      # 28 minutes, offline
    python -m tools.gpu_day --out gpu_day --only 'dense*'
    python -m tools.gpu_day --out gpu_day --device cpu         # the same with small models, to try it

Parts are commands of this project, in order of worth, each with its minutes. What a part prints is in
FOLDER/gpu_day.md as soon as it ends, or when its time is up; a part that fails does not stop the next. After a job of
`tools.bench` comes its dry run, for the cluster that was measured before.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPORT = "gpu_day.md"
CLUSTER = "here"  # that `calibrate` measures


@dataclass(frozen=True)
class Part:
    """A command, as arguments of `python -m`, with the minutes that it may take.

    With `small` options it is tried on a CPU, else it is of GPUs alone. With `job` options it is one of `tools.bench`.
    """

    name: str
    minutes: float
    command: tuple[str, ...] = ()
    small: tuple[str, ...] | None = None
    job: tuple[str, ...] = ()

    def arguments(self, device: str) -> tuple[str, ...]:
        """What `python -m` is given."""
        if not self.job:
            return (*self.command, *(self.small or ()) * (device == "cpu"))
        return ("tools.bench", *self.command, *self.options(device))

    def options(self, device: str) -> tuple[str, ...]:
        """The options of its job; a small one has other sizes."""
        return (*self.job, *(self.small or ()) * (device == "cpu"))

    def dry(self, device: str, out: Path) -> tuple[str, ...]:
        """The command that predicts its job."""
        folder = out / "dry" / self.name.replace(" ", "_").replace(",", "")
        where = ("--config-dir", str(out), f"cluster={CLUSTER}", "cluster.gpus=1")
        return ("compiler_trainer", *where, "run.dry=true", f"run.dir={folder}", *WORKLOAD, *self.options(device))


WORKLOAD = ("data=synthetic", "data.tokenizer=bytes", "optim=adamw")
FEW = ("--rounds", "2", "--steps", "4", "--timeout-s", "240")
BESIDE = ("--contenders", "ours,whole", *FEW)  # contenders are on the device at once: of three one runs out of memory
DENSE = ("model=llama3_8b", "model.n_layers=4", "train.seq_len=4096", "train.global_batch_size=2")
TINY = ("model.dim=128", "model.ffn_dim=256", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2",
        "model.vocab_size=512", "train.seq_len=128", "train.global_batch_size=4")  # fmt: skip
OURS = ("--contenders", "ours", *FEW)
PARTS = (
    Part("doctor", 3, ("compiler_trainer", "doctor"), ()),
    Part("rates", 5, ("compiler_trainer", "calibrate", "--out", f"{{out}}/cluster/{CLUSTER}.yaml"), ()),
    Part("dense, 8B in 4 layers", 5, BESIDE, TINY, DENSE),
    Part("dense, 1B", 4, BESIDE, TINY, ("model=llama3_2_1b", "train.seq_len=4096", "train.global_batch_size=2")),
    Part("dense, recorded as CUDA graphs", 2, OURS, None, (*DENSE, "lower.cudagraphs=true")),
    Part("dense, float8", 3, OURS, TINY, (*DENSE, "passes.cast.float8=tensorwise")),
    Part("dense, 32k tokens", 3, OURS, TINY, (*DENSE, "train.seq_len=32768", "train.global_batch_size=1")),
    Part("dense, full recomputation", 2, OURS, TINY, (*DENSE, "passes.remat.policy=full")),
    Part("dense, offloading", 2, OURS, TINY, (*DENSE, "passes.remat.policy=offload")),
    Part("experts", 4, OURS, (*TINY, "model.experts.width=64"),
         ("model=qwen3_30b_a3b", "model.n_layers=4", "train.seq_len=4096", "train.global_batch_size=2")),
    Part("restarts", 4, ("tools.bench.restart", "--rounds", "2", "--layers", "4,24"), ("--layers", "4")),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that there is time for; 1 where one failed."""
    takes = argparse.ArgumentParser("python -m tools.gpu_day", description=(__doc__ or "").splitlines()[0])
    takes.add_argument("--out", type=Path, required=True, help=f"a folder for {REPORT}, what was measured and dry runs")
    takes.add_argument("--minutes", type=float, default=28, help="after which no part begins")
    takes.add_argument("--only", default="*", help="a pattern of parts' names")
    takes.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes")
    takes.add_argument("--list", action="store_true", help="print the parts and their commands")
    given = takes.parse_args(arguments)
    can = [part for part in PARTS if given.device == "cuda" or part.small is not None]
    parts = [part for part in can if fnmatch.fnmatch(part.name, given.only)]
    if given.list:
        for part in parts:
            print(f"{part.minutes:g} min  {part.name}: {shlex.join(part.arguments(given.device))}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * given.minutes
    failed = [part.name for part in parts if not done(part, given.device, given.out, until)]
    print(f"{len(parts) - len(failed)} of {len(parts)} parts done: {given.out / REPORT}", flush=True)
    return 1 if failed else 0


def done(part: Part, device: str, out: Path, until: float) -> bool:
    """Run a part, and what predicts it; whether both ended well."""
    well = True
    for name, command in commands(part, device, out):
        left = min(60 * part.minutes, until - time.monotonic())
        if left <= 0:
            write(out, f"## {name}\n\nno time was left\n")
            return False
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        code, said = ran(command, device, left)
        took = f"{time.monotonic() - began:.0f} s, exit {code}"
        write(out, f"## {name}\n\n`python -m {shlex.join(command)}`: {took}\n\n```\n{said.strip()}\n```\n")
        well = well and code == 0
    return well


def commands(part: Part, device: str, out: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A part's command, and of a job the dry run where the machine was measured."""
    yield part.name, tuple(word.format(out=out) for word in part.arguments(device))
    if part.job and (out / "cluster" / f"{CLUSTER}.yaml").exists():
        yield f"{part.name}, predicted", part.dry(device, out)


def ran(command: Sequence[str], device: str, seconds: float) -> tuple[int, str]:
    """The exit code of a command, 124 where its time was up, and what it said."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    env |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    job = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = job.communicate(timeout=seconds)
        return job.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, 9)
        return 124, job.communicate()[0]


def write(out: Path, text: str) -> None:
    """Add to the report."""
    with open(out / REPORT, "a") as file:
        file.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
