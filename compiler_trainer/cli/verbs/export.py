"""`export`: write a checkpoint as a folder for transformers, peft or safetensors, or as a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

from compiler_trainer.cli.table import run_parser
from compiler_trainer.models.gguf.file import TYPES
from compiler_trainer.runs.destinations import export_to
from compiler_trainer.runs.export import DTYPES
from compiler_trainer.runs.saved import at_checkpoint, options_of

OUT = "folder to write, or a file OUT.gguf; on a disk, in a store (s3://bucket/folder) or on the hub (hub:ORG/NAME)"
DTYPE = "dtype of the weights (default: train.dtype); float8 for vLLM, q8_0 in a GGUF file"
CHOICES = tuple(dict.fromkeys((*DTYPES, *TYPES)))


def main(arguments: Sequence[str]) -> None:
    """Write the folder, and print how to load it."""
    arg_parser = run_parser("export")
    arg_parser.add_argument("out", help=OUT)
    arg_parser.add_argument("--dtype", choices=CHOICES, help=DTYPE)
    arg_parser.add_argument("--merge", action="store_true", help="add the LoRA terms (model.lora) to the weights")
    arg_parser.add_argument("--ema", action="store_true", help="write the averages of weights (train.ema)")
    arg_parser.add_argument(
        "--no-check", action="store_true", help="do not compare the export with the trainer on a few tokens"
    )
    args = arg_parser.parse_args(arguments)
    cfg = at_checkpoint(options_of(args.run, []), args.checkpoint)
    print(f"{args.out}: {export_to(cfg, args.out, args.dtype, args.merge, args.ema, not args.no_check)}")
