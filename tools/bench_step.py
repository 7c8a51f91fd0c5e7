"""Our whole-step graph against stock PyTorch, one rank: `python -m tools.bench_step`.

Contenders run in turn, each round in a process of its own and the order reversed every other round: ours (one
Inductor graph of forward, backward, clip and AdamW), `torch.compile` of the plain model with fused AdamW, and eager.
Peak memory is `ru_maxrss` of the process after its steps, less what it was before the model was made.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTENDERS = ("ours", "torch.compile", "eager")
MIB = 2**20


def make_step(contender: str, batch: dict, seq_len: int) -> Callable[[], float]:
    """What takes one optimizer step on the batch and returns its loss."""
    import torch

    from compiler_trainer import compile_step, models
    from compiler_trainer.config import ModelConfig

    model = models.build(ModelConfig())
    weights = models.initial_parameters(model, 0, torch.float32)
    if contender == "ours":
        optim = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "max_norm": 1.0}
        step = compile_step(model, models.loss_fn, batch, optim=optim, initial=weights)
        return lambda: step(batch)["loss"]
    model = model.to_empty(device="cpu")
    model.load_state_dict(dict(weights))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run: Any = torch.compile(model) if contender == "torch.compile" else model

    def stock() -> float:
        optimizer.zero_grad()
        loss = models.loss_fn(run, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return stock


def contend(contender: str, rows: int, seq_len: int, steps: int) -> dict[str, Any]:
    """Measure one contender in this process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (rows, seq_len + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    batch["positions"] = torch.arange(seq_len).expand(rows, seq_len).contiguous()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    step = make_step(contender, batch, seq_len)
    losses = [step()]
    compile_s = time.perf_counter() - began
    losses.append(step())
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "contender": contender,
        "compile_s": compile_s,
        "step_ms": [1e3 * s for s in seconds],
        "tokens_per_s": rows * seq_len / statistics.median(seconds),
        "peak_bytes": peak - base,
        "base_bytes": base,
        "losses": losses,
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rounds, each contender in a process of its own."""
    found = []
    for number in range(args.rounds):
        for contender in CONTENDERS[:: 1 if number % 2 == 0 else -1]:
            command = [sys.executable, "-W", "ignore", "-m", "tools.bench_step", "--contender", contender]
            command += ["--rows", str(args.rows), "--seq-len", str(args.seq_len), "--steps", str(args.steps)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found.append({"round": number, **json.loads(out.splitlines()[-1])})
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Medians over rounds (lowest to highest), and ratios to `torch.compile`."""
    lines = [
        "| contender | tokens/s | ratio | peak RSS above base, MiB | ratio | first step, s |",
        "|---|---|---|---|---|---|",
    ]
    rows = {c: [f for f in found if f["contender"] == c] for c in CONTENDERS}

    def median(contender: str, key: str) -> float:
        return statistics.median(f[key] for f in rows[contender])

    for c, runs in rows.items():
        speeds = [f["tokens_per_s"] for f in runs]
        speed, peak = median(c, "tokens_per_s"), median(c, "peak_bytes")
        lines.append(
            f"| {c} | {speed:,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f}) "
            f"| {speed / median('torch.compile', 'tokens_per_s'):.2f} | {peak / MIB:,.0f} "
            f"| {peak / median('torch.compile', 'peak_bytes'):.2f} | {median(c, 'compile_s'):.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark, or one contender of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--contender", choices=CONTENDERS)
    args = parser.parse_args()
    if args.contender:
        print(json.dumps(contend(args.contender, args.rows, args.seq_len, args.steps)))
        return
    found = measure(args)
    difference = max(abs(a - b) for f in found for a, b in zip(f["losses"], found[0]["losses"], strict=True))
    print(table(found))
    print(f"largest difference of a loss: {difference:.1e}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    if difference > 1e-3:
        raise SystemExit("the contenders do not compute the same losses")


if __name__ == "__main__":
    main()
