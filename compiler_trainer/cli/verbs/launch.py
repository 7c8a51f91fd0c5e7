"""`compiler-trainer launch -n 8 OPTION=VALUE`: torchrun, but only the failed rank's line and exit code remain."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from compiler_trainer.cli.table import VERBS, parser

SAVING_S = 600  # for ranks to save after a signal to stop; torchrun kills them after 30


def main(arguments: Sequence[str]) -> int:
    """Start ranks with the rest of the command line; return the exit code of the first that failed."""
    arg_parser = parser("launch")
    arg_parser.add_argument(
        "-n", "--nproc-per-node", default="auto", metavar="RANKS", help="ranks on this machine (default: one per GPU)"
    )
    arg_parser.epilog = "Further flags are torchrun's: --nnodes, --rdzv-endpoint, --node-rank ... as --FLAG=VALUE."
    flags, job = split(arguments)
    args, further = arg_parser.parse_known_args(flags)
    ranks = f"--nproc-per-node={args.nproc_per_node}"
    return started([ranks, f"--shutdown-timeout={SAVING_S}", *further, "-m", "compiler_trainer", *job])


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (flags of the launcher, arguments of the ranks); these start at the first option or verb."""
    is_job = [not a.startswith("-") and ("=" in a or a in VERBS) for a in arguments]
    at = is_job.index(True) if True in is_job else len(arguments)
    return list(arguments[:at]), list(arguments[at:])


def started(arguments: Sequence[str]) -> int:
    """Start torchrun's launcher; return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does the same, with a warning
    logging.disable(logging.ERROR)  # torch logs the ranks' output again
    try:
        run.run(run.parse_args(list(arguments)))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0
