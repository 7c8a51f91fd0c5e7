"""A few small steps of each feature on this machine, against eager PyTorch in fp64 on the CPU.

A feature is a set of options, so a probe that fails here fails with `compiler-trainer` and the same options.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from compiler_trainer.console import say
from compiler_trainer.parity import oracle
from compiler_trainer.parity.compare import difference, wholes
from compiler_trainer.parity.of_config import subject_of
from compiler_trainer.parity.subject import Settings, Subject
from compiler_trainer.step.compile import compile_step
from compiler_trainer.step.ranks import rank
from compiler_trainer.step.step import Step

FP32, BF16, FLOAT8 = 1e-4, 5e-2, 0.5  # of a value's largest entry, gradients among them
LR = 0.1
SMALL = (
    "model.dim=64", "model.n_layers=2", "model.ffn_dim=192", "train.seq_len=64",
    "train.dtype=float32", "passes.cast.param_dtype=null", "optim=sgd",
)  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """A feature: its options, its tolerance, and what to do if it fails."""

    name: str
    options: tuple[str, ...]
    fix: str
    allowed: float = FP32
    mesh: bool = False  # needs several ranks
    gpu: bool = False  # needs a GPU
    steps: int = 1


EAGER = "lower.backend=eager trains without it"
REPLAYED = 5  # steps: CUDA graphs run two, record, and replay three
BF16_OPTIONS = ("passes.cast.param_dtype=bfloat16",)
STAGES = ("mesh.pp=2", "train.microbatches=4")
RING = ("mesh.cp=-1", "mesh.dp_shard=1", "passes.context.method=ring", "passes.context.skip_steps=false")
RECORD, UNRECORDED = "lower.cudagraphs=true", "leave lower.cudagraphs=false"
PROBES = (
    Probe("eager", ("lower.backend=eager",), "PyTorch itself does not run here: reinstall it"),
    Probe("compiled", (), f"Inductor needs a C++ compiler, or Triton on a GPU; {EAGER}"),
    Probe("bfloat16, flash attention", BF16_OPTIONS, "train in passes.cast.param_dtype=null", BF16),
    Probe("packed documents, FlexAttention on a GPU", ("model.attention=documents",), "use model.attention=causal"),
    Probe("float8", (*BF16_OPTIONS, "passes.cast.float8=tensorwise"), "needs an H100 or newer, or a CPU", FLOAT8),
    Probe("experts", ("model=moe_debug",), f"grouped matmuls need Triton on a GPU; {EAGER}"),
    Probe("recomputation", ("passes.remat.policy=full",), "use passes.remat.policy=none, and report it"),
    Probe("offloading", ("passes.remat.policy=offload",), "needs pinned memory (ulimit -l); use policy=selective"),
    Probe("CUDA graphs", (RECORD,), UNRECORDED, gpu=True, steps=REPLAYED),
    Probe("FSDP", ("mesh.dp_shard=-1",), "NCCL_DEBUG=INFO says which link fails", mesh=True),
    Probe("tensor parallelism", ("mesh.tp=-1", "mesh.dp_shard=1"), "as FSDP", mesh=True),
    Probe("context parallelism", ("mesh.cp=-1", "mesh.dp_shard=1"), "as FSDP", mesh=True),
    Probe("expert parallelism", ("model=moe_debug", "mesh.ep=2"), "leave mesh.ep=1", mesh=True),
    Probe("pipeline stages", STAGES, "leave mesh.pp=1", mesh=True),
    Probe("pipeline stages that offload", (*STAGES, "passes.remat.policy=offload"), "use policy=selective", mesh=True),
    Probe("FSDP in CUDA graphs", ("mesh.dp_shard=-1", RECORD), UNRECORDED, mesh=True, gpu=True, steps=REPLAYED),
    Probe("a ring in CUDA graphs", (*RING, RECORD), UNRECORDED, mesh=True, gpu=True, steps=REPLAYED),
    Probe("pipeline stages in CUDA graphs", (*STAGES, RECORD), UNRECORDED, mesh=True, gpu=True, steps=REPLAYED),
)


@dataclass(frozen=True)
class Tried:
    """The result of a probe: seconds, the worst error (infinite if it failed), and the reason."""

    probe: Probe
    seconds: float
    error: float
    why: str = ""

    @property
    def works(self) -> bool:
        return not self.why and self.error <= self.probe.allowed


def probes(ranks: int) -> Iterator[Probe]:
    """Yield the probes that this machine can run; print those whose options do not fit the number of ranks."""
    for probe in PROBES:
        if probe.mesh == (ranks > 1) and (torch.cuda.is_available() or not probe.gpu):
            try:
                if ranks > 1:
                    job(probe, ranks)
            except UserError as error:
                if rank() == 0:
                    say(f"{probe.name} is left out: {error}")
            else:
                yield probe


def tried(probe: Probe, ranks: int) -> Tried:
    """Run a probe and return its result; on several ranks errors are raised, because the others would wait."""
    began = time.perf_counter()
    try:
        error = worst_error(job(probe, ranks), probe.steps)
    except Exception as failure:
        if ranks > 1:
            raise
        return Tried(probe, time.perf_counter() - began, float("inf"), shortened(failure))
    return Tried(probe, time.perf_counter() - began, error)


def shortened(failure: Exception) -> str:
    """Return the beginning of an error's text; for a compiler error, its output without its command line."""
    description, _, command = str(failure).partition("Command:")
    printed = command.partition("Output:")[2]
    return f"{type(failure).__name__}: {' '.join((description + (printed or command)).split())[:300]}"


def job(probe: Probe, ranks: int) -> Config:
    """Return the small job of a probe."""
    cfg = resolve_auto(
        to_config(compose([*SMALL, f"train.global_batch_size={4 * ranks}", *probe.options])), torch.cuda.is_available()
    )
    return validate(cfg, ranks)


def compiled(cfg: Config, subject: Subject) -> Step:
    """Return the compiled training step of a probe's job, without an evaluation."""
    return compile_step(
        copy.deepcopy(subject.model).float(), subject.loss, subject.batches[0], mesh=cfg.mesh, optim=cfg.optim,
        passes=cfg.passes, lower=cfg.lower, microbatches=cfg.train.microbatches, evaluate=False,
    )  # fmt: skip


def worst_error(cfg: Config, steps: int = 1) -> float:
    """Return the largest difference after some steps, over the largest entry of each value: moments are gradients."""
    subject, microbatches = subject_of(cfg), cfg.train.microbatches
    batches = [*itertools.islice(itertools.cycle(subject.batches), steps)]
    subject = dataclasses.replace(subject, batches=batches)
    *_, expected = oracle.train(subject, Settings(optim=cfg.optim, microbatches=microbatches, lrs=(LR,) * steps))
    step = compiled(cfg, subject)
    for batch in batches:
        metrics = step(batch, LR)
    actual = {name: torch.tensor(value) for name, value in metrics.items()} | dict(wholes(step))
    return max(
        difference(actual[name].cpu(), value) for name, value in expected.items() if not name.startswith("chance.")
    )
