"""`compiler-trainer launch -n 8 OPTION=VALUE`: the ranks of this machine, in a job of several as the engine says.

An engine is SLURM, Kubeflow Trainer or SkyPilot, which starts this command on each machine; or give torchrun's flags.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import torch
from torch.distributed import DistNetworkError, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from compiler_trainer.cli.table import VERBS, parser
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.jobs import is_job_file, with_files
from compiler_trainer.elastic.engines import place_in_engine
from compiler_trainer.elastic.launcher import SAVING_S, Launcher


def main(arguments: Sequence[str]) -> int:
    """Start ranks with the rest of the command line; return the exit code of the first that failed."""
    arg_parser = parser("launch")
    counts = "ranks on this machine (default: one per GPU)"
    arg_parser.add_argument("-n", "--nproc-per-node", metavar="RANKS", help=counts)
    spares = "processes that replace killed ones, one at a time (run.elastic; default 3)"
    arg_parser.add_argument("--spares", type=int, default=3, metavar="COUNT", help=spares)
    arg_parser.epilog = "Further flags are torchrun's: --nnodes, --rdzv-endpoint, --node-rank ... as --FLAG=VALUE."
    flags, job = split(arguments)
    args, further = arg_parser.parse_known_args(flags)
    place = None if further else place_in_engine(os.environ)
    if place is not None and place.local_size > 1:
        raise UserError(place.engine, f"started {place.local_size} ranks on this machine; leave out `launch`")
    if place is not None and place.rank == 0:
        print(place, file=sys.stderr, flush=True)
    if further or place is not None:
        further += place.as_flags() if place is not None else []
        ranks = args.nproc_per_node or (place.ranks if place is not None and place.ranks != "1" else "auto")
        flags = [f"--nproc-per-node={ranks}", f"--shutdown-timeout={SAVING_S}", *further]
        return torchrun([*flags, "-m", "compiler_trainer", *job])
    command = [sys.executable, "-m", "compiler_trainer", *job]
    options = job if job and job[0] in VERBS else with_files(job)
    return Launcher(ranks_of(args.nproc_per_node), command, args.spares, "run.elastic=true" in options).run()


def ranks_of(text: str | None) -> int:
    """Return the number of ranks to start; raise UserError for anything but a positive number."""
    if text is None:
        return max(1, torch.cuda.device_count())
    if not text.isdecimal() or int(text) < 1:
        raise UserError("-n", f"is {text}; give the number of ranks on this machine")
    return int(text)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (flags of the launcher, arguments of the ranks); these start at the first option or verb."""
    is_job = [not a.startswith("-") and ("=" in a or a in VERBS or is_job_file(a)) for a in arguments]
    at = is_job.index(True) if True in is_job else len(arguments)
    return list(arguments[:at]), list(arguments[at:])


def torchrun(arguments: Sequence[str]) -> int:
    """Start torchrun's launcher; return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does the same, with a warning
    logging.disable(logging.ERROR)  # torch logs the ranks' output again
    try:
        run.run(run.parse_args(list(arguments)))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except DistNetworkError as error:  # a port that is in use, or a host that cannot be reached
        fix = "choose another --master-port or --rdzv-endpoint"
        raise UserError("launch", f"{str(error).splitlines()[0]}; {fix}") from error
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0
