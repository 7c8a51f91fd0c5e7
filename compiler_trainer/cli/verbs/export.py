"""`export`: write a checkpoint as a folder that transformers, peft or safetensors load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from compiler_trainer.cli.table import run_parser
from compiler_trainer.runs.export import export
from compiler_trainer.runs.saved import at_checkpoint, options_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str]) -> None:
    """Write the folder, and print how to load it."""
    takes = run_parser("export")
    takes.add_argument("out", type=Path, help="the folder to write")
    takes.add_argument("--dtype", choices=DTYPES, help="of the exported weights (default: train.dtype)")
    takes.add_argument("--merge", action="store_true", help="add the LoRA terms (model.lora) to the weights")
    takes.add_argument("--ema", action="store_true", help="write the averages of weights (train.ema)")
    given = takes.parse_args(arguments)
    cfg = at_checkpoint(options_of(given.run, []), given.checkpoint)
    print(f"{given.out}: {export(cfg, given.out, DTYPES.get(given.dtype), given.merge, given.ema)}")
