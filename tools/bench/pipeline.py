"""Pipeline stages compared with PyTorch's: `torchrun --nproc-per-node 4 -m tools.bench.pipeline`.

The same decoder, microbatches, schedule (1F1B) and optimizer on the same ranks: ours interpreted and compiled, and
`torch.distributed.pipelining` over modules cut by hand. Rounds alternate; tokens/s are medians, ratios are within a
round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from compiler_trainer import compile_step
from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models.attention import rotary_tables
from compiler_trainer.models.llama import Llama
from compiler_trainer.models.loss import loss_fn
from compiler_trainer.step.ranks import rank, start_ranks, stop_ranks

Batch = dict[str, Tensor]


class Part(nn.Module):
    """A stage of a decoder: its layers, the embedding before the first, the head after the last."""

    def __init__(self, model: Llama, stage: int, stages: int):
        super().__init__()
        per = len(model.layers) // stages
        self.cfg = model.cfg
        self.layers = nn.ModuleList(model.layers[stage * per : (stage + 1) * per])
        self.tok_embeddings = model.tok_embeddings if stage == 0 else None
        self.norm = model.norm if stage == stages - 1 else None
        self.output = model.output if stage == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream [B, T, D], or logits, for tokens [B, T] or the residual stream."""
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        cos, sin = rotary_tables(self.cfg, positions)
        for layer in self.layers:
            x, _ = layer(x, cos, sin, None, None)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


def stock(model: Llama, batch: Batch, microbatches: int) -> Callable[[], float]:
    """Return a step of PyTorch's pipeline, which returns the mean loss on the last rank and 0 on others."""
    stages, stage = dist.get_world_size(), rank()
    part = Part(model, stage, stages)
    pipeline_stage = PipelineStage(part, stage, stages, torch.device("cpu"))

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    schedule = Schedule1F1B(pipeline_stage, microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step() -> float:
        losses = list[Tensor]()
        inputs = (batch["tokens"],) if stage == 0 else ()
        is_last = stage == stages - 1
        schedule.step(*inputs, target=batch["labels"] if is_last else None, losses=losses if is_last else None)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    stages = start_ranks()
    cfg = ModelConfig(dim=args.dim, n_layers=args.layers, n_heads=8, n_kv_heads=4, ffn_dim=3 * args.dim)
    generator = torch.Generator().manual_seed(0)
    batch = {key: torch.randint(0, 257, (args.rows, args.length), generator=generator) for key in ("tokens", "labels")}
    batch["positions"] = torch.arange(args.length).expand(args.rows, -1).contiguous()
    batch["documents"] = torch.zeros_like(batch["positions"])
    optim = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "max_norm": None}

    def model() -> Llama:
        torch.manual_seed(0)
        return Llama(cfg)

    def ours(backend: str) -> Callable[[], float]:
        began = time.perf_counter()
        step = compile_step(
            model(), loss_fn, batch, mesh={"pp": stages}, optim=optim, lower={"backend": backend},
            microbatches=args.rows, evaluate=False,
        )  # fmt: skip
        if rank() == 0:
            print(f"{backend}: compiled in {time.perf_counter() - began:.1f} s", flush=True)
        return lambda: step(batch)["loss"]

    runs = {"stock": stock(model(), batch, args.rows), "ours, eager": ours("eager"), "ours": ours("inductor")}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            dist.barrier()
            began = time.perf_counter()
            losses[name] += [run() for _ in range(args.steps)]
            dist.barrier()
            seconds[name].append((time.perf_counter() - began) / args.steps)
    if rank() == stages - 1:
        tokens = args.rows * args.length
        print("| | tokens/s | of stock | last loss |\n|---|---|---|---|")
        for name, times in seconds.items():
            ratio = statistics.median(s / own for s, own in zip(seconds["stock"], times, strict=True))
            print(f"| {name} | {tokens / statistics.median(times):,.0f} | {ratio:.2f} | {losses[name][-1]:.5f} |")
        off = max(abs(a - b) for a, b in zip(losses["stock"], losses["ours"], strict=True))
        print(f"largest difference of losses: {off:.1e}", flush=True)
    stop_ranks()


if __name__ == "__main__":
    main()
