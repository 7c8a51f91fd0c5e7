"""`export`: write a checkpoint as a folder for transformers, peft or safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from compiler_trainer.cli.table import run_parser
from compiler_trainer.config.files import is_remote
from compiler_trainer.runs.export import export, export_to_store
from compiler_trainer.runs.saved import at_checkpoint, options_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str]) -> None:
    """Write the folder, and print how to load it."""
    takes = run_parser("export")
    takes.add_argument("out", help="the folder to write, on a disk or in a store (s3://bucket/folder)")
    takes.add_argument("--dtype", choices=DTYPES, help="of the exported weights (default: train.dtype)")
    takes.add_argument("--merge", action="store_true", help="add the LoRA terms (model.lora) to the weights")
    takes.add_argument("--ema", action="store_true", help="write the averages of weights (train.ema)")
    takes.add_argument("--no-check", action="store_true", help="do not compare it with the trainer on a few tokens")
    given = takes.parse_args(arguments)
    cfg = at_checkpoint(options_of(given.run, []), given.checkpoint)
    how, out = (DTYPES.get(given.dtype), given.merge, given.ema, not given.no_check), given.out
    said = export_to_store(cfg, out, *how) if is_remote(out) else export(cfg, Path(out), *how)
    print(f"{out}: {said}")
