"""One contender of `tools.bench` on the ranks that torchrun started: its first steps, then rounds on request.

Rank 0 writes `first.json` into the folder, writes `round<K>.json` when `go<K>` appears there, and ends after the last
round. A rank that fails writes `error.<rank>.json`.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compiler_trainer import compile_step, models
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import for_running
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from compiler_trainer.step.ranks import rank, start_ranks, stop_ranks
from compiler_trainer.training.speed import PeakMemory
from compiler_trainer.training.trainer import local_device
from passes.lower.inductor import counts
from tools.bench.floor import floor_s
from tools.bench.stock import decoder_of, stock_step

Batch = dict[str, Tensor]

WORKLOAD = ("train.global_batch_size=16",)  # default options of all contenders


def main(name: str, results: Path, rounds: int, steps: int, overrides: Sequence[str]) -> None:
    """Measure a contender; a failure is recorded with its time and ends this rank."""
    number = int(os.environ["RANK"])
    try:
        for part, result in measure(name, composed(overrides, start_ranks()), results, rounds, steps):
            if number == 0:
                leave(results / f"{part}.json", result)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        leave(results / f"error.{number}.json", {"error": text, "at": time.time()})
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once, because others wait for this rank
    stop_ranks()


def leave(path: Path, result: dict[str, Any]) -> None:
    """Write a file atomically."""
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path)


def composed(overrides: Sequence[str], ranks: int) -> Config:
    """Return the configuration for options of the command line; raise UserError."""
    return validate(for_running(to_config(compose([*WORKLOAD, *overrides]))), ranks)


def measure(name: str, cfg: Config, results: Path, rounds: int, steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results of the first two steps with all work before them, then those of each round of `steps` steps."""
    batch = {key: tensor.to(local_device()) for key, tensor in global_batch(cfg).items()}
    began, worked = time.perf_counter(), cpu_seconds()
    step, state, floor = our_step(cfg, batch) if name == "ours" else (*stock_step(name, cfg, batch), None)
    losses = [step()]
    first_s, first_cpu_s = time.perf_counter() - began, cpu_seconds() - worked
    memory = PeakMemory(local_device(), state())
    losses.append(memory.during(step))
    times = {"first_s": first_s, "first_cpu_s": first_cpu_s}
    yield "first", {**times, "bodies": dict(counts), "peak_bytes": memory.bytes, "losses": losses}
    tokens = cfg.train.global_batch_size * cfg.train.seq_len
    for number in range(rounds):
        while not (results / f"go{number}").exists():
            time.sleep(0.05)
        step()  # refills CPU caches used by another contender
        losses, seconds, cpu_s, sent = [], [], [], sent_bytes()
        for _ in range(steps):
            began, began_cpu = time.perf_counter(), time.process_time()
            losses.append(step())
            seconds.append(time.perf_counter() - began)
            cpu_s.append(time.process_time() - began_cpu)
        yield f"round{number}", {
            "step_ms": 1e3 * statistics.median(seconds),
            "cpu_ms": 1e3 * statistics.median(cpu_s),
            "tokens_per_s": tokens / statistics.median(seconds),
            "sent_bytes": (sent_bytes() - sent) // steps if dist.get_backend() != "nccl" else None,
            "floor_ms": floor and 1e3 * floor(),
            "losses": losses,
        }


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the compilers it has waited for."""
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def global_batch(cfg: Config) -> Batch:
    """Return random tokens, the same for every contender."""
    rows, length = cfg.train.global_batch_size, cfg.train.seq_len
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, decoder_of(cfg).vocab_size, (rows, length + 1), generator=generator)
    positions = torch.arange(length).expand(rows, length)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions}
    return {name: tensor.contiguous() for name, tensor in batch.items()}


def sent_bytes() -> int:
    """Return the bytes written by this process: between two steps, those sent by gloo through sockets (Linux)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def our_step(
    cfg: Config, batch: Batch
) -> tuple[Callable[[], float], Callable[[], list[Tensor]], Callable[[], float]]:
    """Return our step, its persistent tensors, and a function that measures the step's floor in seconds."""
    model = models.build(decoder_of(cfg))
    weights = models.initial_parameters(model, 0, torch.float32)
    step = compile_step(
        model, models.loss_fn, batch,
        mesh=cfg.mesh, optim=cfg.optim, passes=cfg.passes, lower=cfg.lower, initial=weights,
        device=local_device(),
    )  # fmt: skip
    return lambda: step(batch)["loss"], lambda: [s.local[rank()] for s in step.state.values()], partial(floor_s, step)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
