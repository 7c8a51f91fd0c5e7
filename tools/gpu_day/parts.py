"""The parts of a GPU session, most valuable first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compiler_trainer.doctor.probes import PROBES, SMALL
from tools.bench.restart import DEFAULTS

Device = Literal["cuda", "cpu", "none"]
ABSENT = ("cluster=h100", "cluster.gpus=1")
BYTES = ("model.vocab_size=257",)  # the vocabulary of bytes, for the data of `compile`
SYNTHETIC = ("data=synthetic", "data.tokenizer=bytes")
WORKLOAD = (*SYNTHETIC, "optim=adamw")


@dataclass(frozen=True)
class Part:
    """A command, as the arguments of `python -m`, and the minutes it may take.

    `small` are options for a rehearsal on a CPU; None if the part needs a GPU. A part with `job` options is measured by
    `tools.bench` and predicted; `jobs` are the options of jobs that other commands run. Parts that are not `alone` run
    side by side.
    """

    name: str
    minutes: float
    command: tuple[str, ...] = ()
    small: tuple[str, ...] | None = None
    job: tuple[str, ...] = ()
    jobs: tuple[tuple[str, ...], ...] = ()
    alone: bool = True

    def is_for(self, device: Device) -> bool:
        """Return True if the part has work on a device."""
        return device == "cuda" or (self.small is not None if device == "cpu" else bool(self.job or self.jobs))

    @property
    def slug(self) -> str:
        """The name of the part's folder."""
        return self.name.replace(" ", "_").replace(",", "")

    def options(self, device: Device) -> tuple[str, ...]:
        """Return the options of the measured job; a small one for a rehearsal."""
        return (*self.job, *(self.small or ()) * (device == "cpu"))

    def arguments(self, device: Device, out: Path) -> tuple[str, ...]:
        """Return the arguments of `python -m`."""
        if not self.job:
            return tuple(word.format(out=out) for word in (*self.command, *(self.small or ()) * (device == "cpu")))
        fewer = FEWER if device == "cpu" else ()
        return ("tools.bench", *self.command, *fewer, "--out", str(self.bench(out)), *self.options(device))

    def bench(self, out: Path) -> Path:
        """Return the folder of the benchmark's results."""
        return out / "bench" / self.slug

    def ahead(self, out: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield names and commands that compile and predict the part's jobs for a GPU that is absent."""
        for number, options in enumerate([(*WORKLOAD, *self.job)] if self.job else self.jobs):
            name = self.name if self.job else f"{self.name}, job {number}"
            command = ("compiler_trainer", "compile", "--out", str(out / "programs"), *ABSENT, *options)
            yield name, (*command, *BYTES * bool(self.job))
        if prediction := self.prediction(out):
            yield f"{self.name}, predicted", prediction

    def prediction(self, out: Path) -> tuple[str, ...]:
        """Return the dry run of the measured job; empty without one, and for offloading, whose copies have no cost."""
        if not self.job and not self.command[1:2] == (ANCHOR[0],) or "passes.remat.policy=offload" in self.job:
            return ()
        options = (*WORKLOAD, *self.job) if self.job else ANCHOR
        return ("compiler_trainer", "run.dry=true", f"run.dir={out / 'dry' / self.slug}", *ABSENT, *options)


ANCHOR = ("recipe=windowed_50m", *SYNTHETIC)
ROUNDS = ("--once", "--rounds", "2", "--steps", "5", "--timeout-s", "200")
FEWER = ("--rounds", "1", "--steps", "2")
BESIDE = ("--contenders", "ours,whole", *ROUNDS)
OURS = ("--contenders", "ours", "--unchecked", *ROUNDS)
DENSE = ("model=llama3_8b", "model.n_layers=4", "train.seq_len=4096", "train.global_batch_size=2")
TINY = ("model.dim=128", "model.ffn_dim=256", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2",
        "model.vocab_size=512", "train.seq_len=128", "train.global_batch_size=4")  # fmt: skip
PROFILED = (*WORKLOAD, "model=llama3_8b", "model.n_layers=4", *BYTES, "train.seq_len=4096", "train.global_batch_size=2")
PROBED = tuple((*SMALL, *probe.options) for probe in PROBES if not probe.mesh)


def on_two_ranks() -> Iterator[Part]:
    """Yield a part for each feature of several ranks, which share one device."""
    for probe in PROBES:
        if probe.mesh:
            command = ("tools.gpu_day.ranks", "2", "compiler_trainer", "doctor", "--only", probe.name)
            yield Part(f"{probe.name} on two ranks of one GPU", 2, command, None if probe.gpu else (), alone=False)


PARTS: Sequence[Part] = (
    Part("doctor", 2, ("compiler_trainer", "doctor"), (), jobs=PROBED, alone=False),
    Part("losses of the default job, GPU and CPU", 2, ("tools.gpu_day.losses", "--out", "{out}/losses"), (),
         alone=False),
    Part("compiled bodies against their operators", 2, ("tools.gpu_day.bodies",), (), alone=False),
    Part("launches that wait for nothing", 2, ("tools.gpu_day.waits",), (), alone=False),
    *on_two_ranks(),
    Part("ranks of one GPU that are killed", 3, ("tools.gpu_day.survive", "--out", "{out}/survive"), (), alone=False),
    Part("dense, 8B in 4 layers", 3, BESIDE, TINY, DENSE),
    Part("profile, 8B in 4 layers", 1.5, ("tools.gpu_day.profile", "--out", "{out}/profile", *PROFILED), TINY),
    Part("profile, 50M with windows", 1.5,
         ("tools.gpu_day.profile", "--out", "{out}/profile_windows", *ANCHOR),
         ("model.dim=128", "model.n_layers=2", "model.head_dim=32", "model.window=64", "train.seq_len=128",
          "train.global_batch_size=4")),
    Part("dense, CUDA graphs", 1.5, OURS, None, (*DENSE, "lower.cudagraphs=true")),
    Part("dense, float8", 1.5, OURS, TINY, (*DENSE, "passes.cast.float8=tensorwise")),
    Part("experts", 1.5, OURS, (*TINY, "model.experts.width=64", "model.experts.count=4", "model.experts.top_k=2"),
         ("model=qwen3_30b_a3b", "model.n_layers=4", "train.seq_len=4096", "train.global_batch_size=2")),
    Part("anchor, 50M with windows", 2,
         ("compiler_trainer", *ANCHOR, "train.steps=14", "eval.interval=null", "run.dir={out}/anchor"),
         ("model.dim=128", "model.n_layers=2", "model.head_dim=32", "model.window=64", "train.seq_len=128",
          "train.global_batch_size=4", "train.steps=4"), jobs=(ANCHOR,)),
    Part("dense, 1B", 3, BESIDE, TINY, ("model=llama3_2_1b", "train.seq_len=4096", "train.global_batch_size=2")),
    Part("dense, 32k tokens", 2, OURS, TINY, (*DENSE, "train.seq_len=32768", "train.global_batch_size=1")),
    Part("dense, full recomputation", 1.5, OURS, TINY, (*DENSE, "passes.remat.policy=full")),
    Part("dense, offloading", 1.5, OURS, TINY, (*DENSE, "passes.remat.policy=offload")),
    Part("rates", 5, ("compiler_trainer", "calibrate", "--out", "{out}/here.yaml"), ()),
    Part("restarts", 4, ("tools.bench.restart", "--rounds", "2", "--layers", "4,24"), ("--layers", "4"),
         jobs=((*DEFAULTS, "model.n_layers=4"), (*DEFAULTS, "model.n_layers=24"))),
)  # fmt: skip
