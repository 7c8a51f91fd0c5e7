"""`export`: write a checkpoint as a folder for transformers, peft or safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from compiler_trainer.cli.table import run_parser
from compiler_trainer.config.files import is_remote
from compiler_trainer.places.hub import is_of_hub
from compiler_trainer.runs.export import export, export_to_hub, export_to_store
from compiler_trainer.runs.saved import at_checkpoint, options_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

OUT = "the folder to write, on a disk, in a store (s3://bucket/folder) or on the hub (hub:ORG/NAME)"


def main(arguments: Sequence[str]) -> None:
    """Write the folder, and print how to load it."""
    arg_parser = run_parser("export")
    arg_parser.add_argument("out", help=OUT)
    arg_parser.add_argument("--dtype", choices=DTYPES, help="dtype of the exported weights (default: train.dtype)")
    arg_parser.add_argument("--merge", action="store_true", help="add the LoRA terms (model.lora) to the weights")
    arg_parser.add_argument("--ema", action="store_true", help="write the averages of weights (train.ema)")
    arg_parser.add_argument(
        "--no-check", action="store_true", help="do not compare the export with the trainer on a few tokens"
    )
    args = arg_parser.parse_args(arguments)
    cfg = at_checkpoint(options_of(args.run, []), args.checkpoint)
    settings, out = (DTYPES.get(args.dtype), args.merge, args.ema, not args.no_check), args.out
    if is_of_hub(out):
        message = export_to_hub(cfg, out, *settings)
    elif is_remote(out):
        message = export_to_store(cfg, out, *settings)
    else:
        message = export(cfg, Path(out), *settings)
    print(f"{out}: {message}")
