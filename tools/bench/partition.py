"""Time and memory of capture, shard and joint of a large model for many ranks: `python -m tools.bench.partition`.

Weights are on the meta device and nothing is run, so one process stands for any rank of any mesh.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time

import torch

from compiler_trainer import models
from compiler_trainer.capture.capture import capture
from compiler_trainer.config.compose import compose, typed
from compiler_trainer.config.device import passes_on
from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.pipeline import build_pipeline
from passes.check.runner import run_passes
from passes.program.mesh import Mesh

GIB = 2**30


def partition(model_name: str, layers: int | None, sizes: dict[str, int], seq_len: int) -> dict[str, float]:
    """Seconds of each stage and peak resident bytes."""
    job = typed(compose([f"model={model_name}"]))
    assert isinstance(job.model, ModelConfig), "a folder has layers of its own"
    cfg = dataclasses.replace(job.model, n_layers=layers or job.model.n_layers)
    rows = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    with torch.device("meta"):
        model = models.build(cfg)
        batch = {k: torch.empty(rows, seq_len, dtype=torch.int64) for k in ("tokens", "labels", "positions")}
    masters = {name: torch.float32 for name, _ in model.named_parameters()}
    pipeline = build_pipeline(passes_on(job.passes, False), job.optim, masters, 1)
    began = time.perf_counter()
    program, ctx = capture(model, models.loss_fn, batch, torch.device("cpu"), torch.bfloat16)
    captured = time.perf_counter()
    program = dataclasses.replace(program, mesh=Mesh.of(sizes))
    program, records = run_passes("forward", pipeline.forward, program, ctx)
    program, more = run_passes("step", pipeline.train["step"][:1], program, ctx)
    seconds = {r.name: r.seconds for r in (*records, *more)} | {"capture": captured - began}
    seconds["all"] = time.perf_counter() - began
    seconds["nodes"] = len(program.graph.nodes)
    return {**seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main() -> None:
    """Print one line of seconds a stage, and the peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3_405b")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--dp-shard", type=int, default=2048)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=8192)
    args = parser.parse_args()
    found = partition(args.model, args.layers, {"dp_shard": args.dp_shard, "tp": args.tp}, args.seq_len)
    peak, nodes = found.pop("peak_bytes"), found.pop("nodes")
    print(f"{args.model}, {args.layers or 'all'} layers, {args.dp_shard * args.tp:,} ranks: {nodes:,.0f} nodes")
    print("  ".join(f"{name} {s:.1f} s" for name, s in found.items()) + f"  peak {peak / GIB:.2f} GiB")


if __name__ == "__main__":
    main()
