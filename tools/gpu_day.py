"""Half an hour with a GPU in one command: what works, how fast it is, beside stock PyTorch and beside the prediction.

    python -m tools.gpu_day --out gpu_day                      # 28 minutes, offline
    python -m tools.gpu_day --out gpu_day --only 'dense*'
    python -m tools.gpu_day --out gpu_day --device cpu         # the same with small models, to try it
    python -m tools.gpu_day --out gpu_day --device none        # all jobs of all parts made and predicted for an H100

Parts are commands of this project, in order of worth, each with its minutes. What a part prints is in
FOLDER/gpu_day.md as soon as it ends, or when its time is up; a part that fails does not stop the next. After a job of
`tools.bench` comes its dry run, for the cluster that was measured before; a table of both is last.

Without a device nothing runs: each job's options are composed, its programs made for CUDA and predicted, so that what
is refused, or cannot be traced, shows before the day. What only measures has no job, and is left out.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler_trainer.doctor.probes import PROBES, SMALL
from tools.bench.restart import DEFAULTS

REPORT = "gpu_day.md"
TABLE = (
    "| job | tokens/s | torch.compile | predicted | peak GiB | predicted | |",
    "|---|---|---|---|---|---|---|",
)
CLUSTER = "here"  # that `calibrate` measures


@dataclass(frozen=True)
class Part:
    """A command, as arguments of `python -m`, with the minutes that it may take.

    With `small` options it is tried on a CPU, else it is of GPUs alone. With `job` options it is one of `tools.bench`;
    `within` are the options of jobs that other commands run.
    """

    name: str
    minutes: float
    command: tuple[str, ...] = ()
    small: tuple[str, ...] | None = None
    job: tuple[str, ...] = ()
    within: tuple[tuple[str, ...], ...] = ()

    def is_for(self, device: str) -> bool:
        """Whether there is something to do on a device."""
        return device == "cuda" or (self.small is not None if device == "cpu" else bool(self.job or self.within))

    def arguments(self, device: str) -> tuple[str, ...]:
        """What `python -m` is given."""
        if not self.job:
            return (*self.command, *(self.small or ()) * (device == "cpu"))
        few = FEWER if device == "cpu" else ()
        return ("tools.bench", *self.command, *few, "--out", f"{{out}}/bench/{self.folder}", *self.options(device))

    @property
    def folder(self) -> str:
        """Where what is measured of it lies, and what is predicted."""
        return self.name.replace(" ", "_").replace(",", "")

    def options(self, device: str) -> tuple[str, ...]:
        """The options of its job; a small one has other sizes."""
        return (*self.job, *(self.small or ()) * (device == "cpu"))

    def dry(self, device: str, out: Path) -> Iterator[tuple[str, ...]]:
        """The command that predicts its job."""
        where = ("--config-dir", str(out), f"cluster={CLUSTER}", "cluster.gpus=1")
        yield from predicting(self, out, (*where, *WORKLOAD, *self.options(device)))

    def ahead(self, out: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
        """What makes its jobs for a GPU that is not there, and predicts one of `tools.bench`: names and commands."""
        for number, options in enumerate([(*WORKLOAD, *self.job)] if self.job else self.within):
            name = self.name if self.job else f"{self.name}, job {number}"
            made = ("compiler_trainer", "compile", "--out", str(out / "programs"), *ABSENT, *options)
            yield name, (*made, *BYTES * bool(self.job))
            if self.job:
                dry = predicting(self, out, (*ABSENT, *options))
                yield from ((f"{name}, predicted", command) for command in dry)


def predicting(part: Part, out: Path, options: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The dry run of a job; none of one that offloads, whose copies to host memory are not predicted."""
    if "passes.remat.policy=offload" not in options:
        yield ("compiler_trainer", "run.dry=true", f"run.dir={out / 'dry' / part.folder}", *options)


ABSENT = ("cluster=h100", "cluster.gpus=1")
BYTES = ("model.vocab_size=257",)  # that `compile` has data for, which it asks about
WORKLOAD = ("data=synthetic", "data.tokenizer=bytes", "optim=adamw")
FEW = ("--rounds", "2", "--steps", "4", "--timeout-s", "240")
FEWER = ("--rounds", "1", "--steps", "2")
BESIDE = ("--contenders", "ours,whole", *FEW)  # contenders are on the device at once: of three one runs out of memory
DENSE = ("model=llama3_8b", "model.n_layers=4", "train.seq_len=4096", "train.global_batch_size=2")
TINY = ("model.dim=128", "model.ffn_dim=256", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2",
        "model.vocab_size=512", "train.seq_len=128", "train.global_batch_size=4")  # fmt: skip
PROBED = tuple((*SMALL, *probe.options) for probe in PROBES if not probe.mesh)
OURS = ("--contenders", "ours", *FEW)
PARTS = (
    Part("doctor", 3, ("compiler_trainer", "doctor"), (), within=PROBED),
    Part("rates", 5, ("compiler_trainer", "calibrate", "--out", f"{{out}}/cluster/{CLUSTER}.yaml"), ()),
    Part("dense, 8B in 4 layers", 5, BESIDE, TINY, DENSE),
    Part("dense, 1B", 4, BESIDE, TINY, ("model=llama3_2_1b", "train.seq_len=4096", "train.global_batch_size=2")),
    Part("dense, recorded as CUDA graphs", 2, OURS, None, (*DENSE, "lower.cudagraphs=true")),
    Part("dense, float8", 3, OURS, TINY, (*DENSE, "passes.cast.float8=tensorwise")),
    Part("dense, 32k tokens", 3, OURS, TINY, (*DENSE, "train.seq_len=32768", "train.global_batch_size=1")),
    Part("dense, full recomputation", 2, OURS, TINY, (*DENSE, "passes.remat.policy=full")),
    Part("dense, offloading", 2, OURS, TINY, (*DENSE, "passes.remat.policy=offload")),
    Part("experts", 4, OURS, (*TINY, "model.experts.width=64", "model.experts.count=4", "model.experts.top_k=2"),
         ("model=qwen3_30b_a3b", "model.n_layers=4", "train.seq_len=4096", "train.global_batch_size=2")),
    Part("restarts", 4, ("tools.bench.restart", "--rounds", "2", "--layers", "4,24"), ("--layers", "4"),
         within=((*DEFAULTS, "model.n_layers=4"), (*DEFAULTS, "model.n_layers=24"))),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that there is time for; 1 where one failed."""
    takes = argparse.ArgumentParser("python -m tools.gpu_day", description=(__doc__ or "").splitlines()[0])
    takes.add_argument("--out", type=Path, required=True, help=f"a folder for {REPORT}, what was measured and dry runs")
    takes.add_argument("--minutes", type=float, default=28, help="after which no part begins")
    takes.add_argument("--only", default="*", help="a pattern of parts' names")
    takes.add_argument("--device", choices=("cuda", "cpu", "none"), default="cuda", help="cpu: small; none: no step")
    takes.add_argument("--list", action="store_true", help="print the parts and their commands")
    given = takes.parse_args(arguments)
    can = [part for part in PARTS if part.is_for(given.device)]
    parts = [part for part in can if fnmatch.fnmatch(part.name, given.only)]
    if given.list:
        for part in parts:
            for name, command in commands(part, given.device, given.out):
                print(f"{part.minutes:g} min  {name}: {shlex.join(command)}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * given.minutes
    failed = [part.name for part in parts if not done(part, given.device, given.out, until)]
    if rows := [row for part in parts if part.job for row in beside(part, given.out)]:
        write(given.out, "\n".join(("## measured beside predicted", "", *TABLE, *rows)) + "\n")
    print(f"{len(parts) - len(failed)} of {len(parts)} parts done: {given.out / REPORT}", flush=True)
    return 1 if failed else 0


def done(part: Part, device: str, out: Path, until: float) -> bool:
    """Run a part, and what predicts it; whether both ended well, and our contender did."""
    well = True
    (out / "bench" / part.folder / "bench.json").unlink(missing_ok=True)  # of an earlier day
    for name, command in commands(part, device, out):
        left = min(60 * part.minutes, until - time.monotonic())
        if left <= 0:
            write(out, f"## {name}\n\nno time was left\n")
            return False
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        code, said = ran(command, device, left)
        took = f"{time.monotonic() - began:.0f} s, exit {code}"
        write(out, f"## {name}\n\n`python -m {shlex.join(command)}`: {took}\n\n```\n{trimmed(said)}\n```\n")
        well = well and code == 0
    return well and "ours" not in errors(measured(part, out))


def commands(part: Part, device: str, out: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A part's command, and of a job the dry run where the machine was measured; without a device, what makes jobs."""
    if device == "none":
        yield from part.ahead(out)
        return
    yield part.name, tuple(word.format(out=out) for word in part.arguments(device))
    if part.job and (out / "cluster" / f"{CLUSTER}.yaml").exists():
        yield from ((f"{part.name}, predicted", command) for command in part.dry(device, out))


def ran(command: Sequence[str], device: str, seconds: float) -> tuple[int, str]:
    """The exit code of a command, 124 where its time was up, and what it said."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    env |= {"CUDA_VISIBLE_DEVICES": ""} if device != "cuda" else {}
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


def trimmed(said: str) -> str:
    """What a command said, no spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in said.strip().splitlines())


def measured(part: Part, out: Path) -> dict[str, list[dict[str, Any]]]:
    """What a job of `tools.bench` left: the rounds of each contender."""
    path = out / "bench" / part.folder / "bench.json"
    return json.loads(path.read_text()) if path.exists() else {}


def errors(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Why contenders failed."""
    return {name: rounds[-1]["error"] for name, rounds in found.items() if "error" in rounds[-1]}


def beside(part: Part, out: Path) -> Iterator[str]:
    """A job's row of the table: what its contenders gave, or why they gave nothing, and what was predicted of ours."""
    dry, found = out / "dry" / part.folder / "report.json", measured(part, out)
    predicted = json.loads(dry.read_text())["predicted"] if dry.exists() else {}
    if not found and not predicted:
        return
    ours, whole = ([r for r in found.get(name, ()) if "error" not in r] for name in ("ours", "whole"))
    speeds = [statistics.median(r["tokens_per_s"] for r in rounds) if rounds else None for rounds in (ours, whole)]
    peaks = [max(r["peak_bytes"] for r in ours) if ours else None, predicted.get("peak_mem_bytes")]
    said = "; ".join(f"{name}: {why}" for name, why in errors(found).items())
    numbers = [*speeds, predicted.get("tokens_per_s_per_gpu"), *(peak and peak / 2**30 for peak in peaks)]
    shown = ["" if number is None else f"{number:,.{digits}f}" for number, digits in zip(numbers, (0, 0, 0, 2, 2))]
    yield f"| {' | '.join((part.name, *shown, said))} |"


def write(out: Path, text: str) -> None:
    """Add to the report."""
    with open(out / REPORT, "a") as file:
        file.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
