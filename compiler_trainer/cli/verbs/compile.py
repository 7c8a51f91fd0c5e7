"""`compile`: compile a job's programs ahead of time, on any machine, for ranks and GPUs that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.cli.table import parser
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.jobs import pasted
from compiler_trainer.config.schema import Config, is_open


def main(arguments: Sequence[str]) -> int:
    """Compile the programs of a job, and print the option that uses them.

    Bad options are refused before PyTorch is imported, which takes seconds.
    """
    arg_parser = parser("compile")
    arg_parser.add_argument(
        "overrides", nargs="*", metavar="OPTION=VALUE", help="the job, with its mesh and its cluster"
    )
    arg_parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder for lower.programs")
    args = arg_parser.parse_intermixed_args(arguments)
    cfg = to_config(compose(args.overrides))
    if is_open(cfg):
        raise UserError("mesh", "has to be planned; run `compiler-trainer plan` first, and compile its result")
    from compiler_trainer.runs.ahead import compile_ahead
    from compiler_trainer.training.loggers import Working

    if needs_cuda(cfg):
        return again_for_cuda(arguments)
    with Working(sys.stderr) as tell:
        message = compile_ahead(cfg, args.out, tell)
    print(f"{message}\nstart the job with {pasted({'lower.programs': str(args.out)})}")
    return 0


def needs_cuda(cfg: Config) -> bool:
    """Return True if the job's devices are CUDA GPUs, and this process cannot trace for them."""
    from compiler_trainer.config.device import resolve_cluster
    from passes.lower import trace_cuda

    return not resolve_cluster(cfg.cluster).host_computes and not trace_cuda.is_possible()


def again_for_cuda(arguments: Sequence[str]) -> int:
    """Run the command in a process that preloads a library with which PyTorch traces for CUDA; return its exit code.

    Raises UserError if this build of PyTorch cannot do that.
    """
    import torch

    from passes.lower import trace_cuda

    if torch.version.cuda is not None:
        fix = "compile there, or with PyTorch's CPU build"
        raise UserError(
            "cluster", f"has GPUs, and this build of PyTorch traces for them only on a machine with one; {fix}"
        )
    environment = os.environ | {"LD_PRELOAD": str(trace_cuda.library())}
    command = [sys.executable, "-m", "compiler_trainer", "compile", *arguments]
    return subprocess.run(command, env=environment).returncode
