"""`compiler-trainer launch -n 8 OPTION=VALUE`: the ranks of this machine, in a job of several as the engine says.

An engine is SLURM, Kubeflow Trainer or SkyPilot, which starts this command on each machine; or give the flags.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence

import torch

from compiler_trainer.cli.app import SHORT
from compiler_trainer.cli.table import VERBS, parser
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.jobs import is_job_file, with_files
from compiler_trainer.elastic.engines import PORT, Place, place_in_engine
from compiler_trainer.elastic.launcher import ALONE, Launcher

PER_GPU, PER_CORE = ("auto", "gpu"), "cpu"  # numbers of ranks as torchrun takes them


def main(arguments: Sequence[str]) -> int:
    """Start ranks with the rest of the command line; return the exit code of the first that failed."""
    arg_parser = parser("launch")
    counts = "ranks on this machine (default: one per GPU)"
    arg_parser.add_argument("-n", "--nproc-per-node", metavar="RANKS", help=counts)
    spares = "processes that replace killed ones, one at a time (run.elastic; default 3)"
    arg_parser.add_argument("--spares", type=int, default=3, metavar="COUNT", help=spares)
    arg_parser.add_argument("--nnodes", type=int, default=1, metavar="COUNT", help="machines of the job (default 1)")
    arg_parser.add_argument("--node-rank", type=int, metavar="N", help="number of this machine, from 0")
    arg_parser.add_argument("--master-addr", metavar="HOST", help="the machine with number 0")
    arg_parser.add_argument("--master-port", type=int, metavar="PORT", help=f"a free port there (default {PORT})")
    flags, job = split(arguments)
    args = arg_parser.parse_args(flags)
    place = place_of(args)
    if place is not ALONE and place.rank == 0:
        print(place, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "compiler_trainer", *job]
    ranks = ranks_of(args.nproc_per_node or (None if place is ALONE or place.ranks == "1" else place.ranks))
    options = job if job and job[0] in VERBS else with_files(job)
    return Launcher(ranks, command, args.spares, "run.elastic=true" in options, place).run()


def place_of(args: Namespace) -> Place:
    """Return the place of this machine in the job, from the flags or the engine; raise UserError for a part of one."""
    if args.nnodes > 1:
        for flag in ("node_rank", "master_addr"):
            if getattr(args, flag) is None:
                raise UserError("--nnodes", f"is {args.nnodes}; give --{flag.replace('_', '-')}, too")
        if not 0 <= args.node_rank < args.nnodes:
            raise UserError("--node-rank", f"is {args.node_rank}; give a number from 0 to {args.nnodes - 1}")
        return Place("launch", args.node_rank, args.nnodes, 0, 1, args.master_addr, args.master_port or PORT, "1")
    for flag in ("node_rank", "master_addr", "master_port"):
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag.replace('_', '-')}", "is for several machines; give --nnodes, too, or none")
    place = place_in_engine(os.environ)
    if place is not None and place.local_size > 1:
        raise UserError(place.engine, f"started {place.local_size} ranks on this machine; leave out `launch`")
    return place or ALONE


def ranks_of(text: str | None) -> int:
    """Return the number of ranks to start; raise UserError for anything but a positive number."""
    if text is None or text in PER_GPU:
        return max(1, torch.cuda.device_count())
    if text == PER_CORE:
        return os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise UserError("-n", f"is {text}; give the number of ranks on this machine")
    return int(text)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (flags of the launcher, arguments of the ranks); these start at an option, a verb or training flag."""
    flags = {*SHORT, *SHORT.values()}
    is_job = [
        a.partition("=")[0] in flags or not a.startswith("-") and ("=" in a or a in VERBS or is_job_file(a))
        for a in arguments
    ]
    at = is_job.index(True) if True in is_job else len(arguments)
    return list(arguments[:at]), list(arguments[at:])
