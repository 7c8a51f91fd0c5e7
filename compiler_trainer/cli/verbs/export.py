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
    arg_parser = run_parser("export")
    arg_parser.add_argument("out", help="the folder to write, on a disk or in a store (s3://bucket/folder)")
    arg_parser.add_argument("--dtype", choices=DTYPES, help="dtype of the exported weights (default: train.dtype)")
    arg_parser.add_argument("--merge", action="store_true", help="add the LoRA terms (model.lora) to the weights")
    arg_parser.add_argument("--ema", action="store_true", help="write the averages of weights (train.ema)")
    arg_parser.add_argument(
        "--no-check", action="store_true", help="do not compare the export with the trainer on a few tokens"
    )
    args = arg_parser.parse_args(arguments)
    cfg = at_checkpoint(options_of(args.run, []), args.checkpoint)
    settings, out = (DTYPES.get(args.dtype), args.merge, args.ema, not args.no_check), args.out
    message = export_to_store(cfg, out, *settings) if is_remote(out) else export(cfg, Path(out), *settings)
    print(f"{out}: {message}")
