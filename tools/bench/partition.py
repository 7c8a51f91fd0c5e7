"""Time and memory of compiling the step of a large model for many ranks: `python -m tools.bench.partition`.

Weights are on the meta device and nothing runs, so one process stands for any rank of any mesh. With `--whole` passes
process every layer, not a few that stand for all.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time

import torch

from compiler_trainer import models
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import passes_on
from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.programs import compile_programs
from passes.ir.bodies import flatten
from passes.ir.mesh import Mesh

GIB = 2**30


def partition(
    model_name: str, layers: int | None, sizes: dict[str, int], seq_len: int, whole: bool
) -> dict[str, float]:
    """Return CPU seconds of capture, of each pass and in total, the operators of the step, and peak resident bytes."""
    options = [f"model={model_name}", f"passes.fold_layers={not whole}", "passes.cast.param_dtype=bfloat16"]
    job = to_config(compose(options))
    assert isinstance(job.model, ModelConfig), "a folder has layers of its own"
    cfg = dataclasses.replace(job.model, n_layers=layers or job.model.n_layers)
    rows = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    with torch.device("meta"):
        model = models.build(cfg)
        batch = {k: torch.empty(rows, seq_len, dtype=torch.int64) for k in ("tokens", "labels", "positions")}
    request = CompileRequest(
        model=model,
        loss_fn=models.loss_fn,
        batch=batch,
        mesh=Mesh.of(sizes),
        passes=passes_on(job.passes, False),
        optim=job.optim,
        evaluate=False,
    )
    began = time.process_time()
    compiled = compile_programs(request)
    report = compiled.report
    seconds = {"all": time.process_time() - began} | {record["name"]: record["seconds"] for record in report.passes}
    seconds["capture"] = report.seconds["capture"]
    (step,) = compiled.programs.values()
    seconds["nodes"] = len(flatten(step.program).graph.nodes)
    return {**seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main() -> None:
    """Print a line with the seconds of each stage, and the peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3_405b")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--dp-shard", type=int, default=2048)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--whole", action="store_true", help="let passes see every layer")
    args = parser.parse_args()
    sizes = {"dp_shard": args.dp_shard, "tp": args.tp}
    results = partition(args.model, args.layers, sizes, args.seq_len, args.whole)
    peak, nodes = results.pop("peak_bytes"), results.pop("nodes")
    print(f"{args.model}, {args.layers or 'all'} layers, {args.dp_shard * args.tp:,} ranks: {nodes:,.0f} nodes")
    print("  ".join(f"{name} {s:.1f} s" for name, s in results.items() if s >= 0.05) + f"  peak {peak / GIB:.2f} GiB")


if __name__ == "__main__":
    main()
