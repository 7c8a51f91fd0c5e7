"""Measure the time of the first step as models grow deeper: `python -m tools.bench.compile --layers 6,12,24,48`.

Ours against `torch.compile` of the full model and of each block, each in a separate process: cold with an empty cache,
then warm with the filled cache. The precompiled headers of PyTorch's C++ kernels, which all share, exist before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from tools.bench.command import CONTENDERS, Found, Job

DEFAULTS = [
    "model.dim=256", "model.n_heads=16", "model.n_kv_heads=16", "model.ffn_dim=768", "model.vocab_size=2048",
    "train.global_batch_size=4", "train.seq_len=512", "lr_schedule=constant",
]  # fmt: skip
HEADINGS = (
    "layers", "contender", "cold s", "CPU s", "warm s", "warm CPU s", "bodies compiled", "when warm", "step ms"
)  # fmt: skip


def main() -> None:
    """Measure and print; a failed contender is a row with its error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="6,12,24,48")
    parser.add_argument("--contenders", default="ours,whole,block")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1, help="timed steps after the first two")
    parser.add_argument("--threads", type=int, help="of a rank; by default its share of the cores")
    parser.add_argument("--timeout-s", type=float, default=1800)
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    parser.add_argument("overrides", nargs="*", help="options of the trainer, after the defaults of this benchmark")
    args = parser.parse_args()
    args.overrides = [*DEFAULTS, *args.overrides]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        warm_headers(args, Path(scratch))
        for layers in map(int, args.layers.split(",")):
            for name in args.contenders.split(","):
                rows.append(row(name, layers, args, Path(scratch, f"{name}{layers}")))
                print(" | ".join(map(str, cells(rows[-1]))), flush=True)
    Console(width=160).print(Markdown(table(rows)))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


def warm_headers(args: argparse.Namespace, scratch: Path) -> None:
    """Let PyTorch precompile its headers, once a machine, so that no contender pays for it."""
    run("block", with_layers(args, 1), scratch / "headers")


def row(name: str, layers: int, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Return the results of one contender at one depth, cold and warm."""
    cold, warm = (run(name, with_layers(args, layers), scratch) for _ in range(2))
    return {"layers": layers, "contender": name, "cold": cold, "warm": warm}


def run(name: str, args: argparse.Namespace, scratch: Path) -> Found:
    """Return the results of a contender's first steps and one round."""
    results: Found = {}
    for part in Job(name, args.ranks, args, scratch, rounds=1).all():
        results |= part
    return results


def with_layers(args: argparse.Namespace, layers: int) -> argparse.Namespace:
    """Return the arguments for a model of `layers` layers."""
    return argparse.Namespace(**vars(args) | {"overrides": [*args.overrides, f"model.n_layers={layers}"]})


def cells(result: dict[str, Any]) -> list[Any]:
    """Return a row of the table."""
    cold, warm = result["cold"], result["warm"]
    head = [result["layers"], CONTENDERS[result["contender"]]]
    if error := cold.get("error") or warm.get("error"):
        return [*head, error]
    times = [f"{run[key]:.1f}" for run in (cold, warm) for key in ("first_s", "first_cpu_s")]
    bodies = [run["bodies"].get("compiled", 0) if result["contender"] == "ours" else "" for run in (cold, warm)]
    return [*head, *times, *bodies, f"{warm['step_ms']:.0f}"]


def table(rows: list[dict[str, Any]]) -> str:
    """Return all rows in Markdown."""
    lines = [" | ".join(HEADINGS), " | ".join("---" for _ in HEADINGS)]
    return "\n".join(f"| {line} |" for line in (*lines, *(" | ".join(map(str, cells(row))) for row in rows)))


if __name__ == "__main__":
    main()
