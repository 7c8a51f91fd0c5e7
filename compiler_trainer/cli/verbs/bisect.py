"""`bisect`: find the pass and the graph node where results go wrong, at the start of a run or after a checkpoint.

    compiler-trainer bisect model.dim=32 model.n_layers=2 train.seq_len=64 mesh.tp=2 mesh.dp_shard=2
    compiler-trainer bisect runs/1

Exit codes: 0 nothing found, 1 a fault found, 2 bad input.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.bisect.case import Case, at_checkpoint, at_start
from compiler_trainer.bisect.find import Finding, bisect
from compiler_trainer.bisect.script import Inexpressible, write
from compiler_trainer.cli.table import parser
from compiler_trainer.config.jobs import is_job_file
from compiler_trainer.console import say


def main(arguments: Sequence[str]) -> int:
    """Print the finding, and write a script that reproduces it."""
    arg_parser = parser("bisect")
    arg_parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run folder: its newest checkpoint and the next batch"
    )
    arg_parser.add_argument(
        "overrides", nargs="*", metavar="OPTION=VALUE", help="options of the run, as small as possible"
    )
    args = arg_parser.parse_intermixed_args(arguments)
    case = case_of(args.run, args.overrides)
    finding = finding_of(case)
    print(finding or "every pass keeps the numbers")
    if finding is not None:
        print(script_of(finding, Path(case.cfg.run.dir, "repro.py")))
    return 1 if finding is not None else 0


def case_of(first: str | None, overrides: Sequence[str]) -> Case:
    """Return the case to bisect: a run folder if the command line begins with one, otherwise the options' job."""
    if first is not None and "=" not in first and not is_job_file(first):
        return at_checkpoint(Path(first), overrides)
    return at_start([first, *overrides] if first else [])


def finding_of(case: Case) -> Finding | None:
    """Return the pass and node at fault, None if every pass keeps the numbers. Progress goes to stderr."""
    cfg = case.cfg
    compiler_options = {"mesh": cfg.mesh, "passes": cfg.passes, "optim": cfg.optim}
    run_options = {"microbatches": cfg.train.microbatches, "seed": cfg.train.seed}
    began = time.monotonic()

    def tell(message: str) -> None:
        say(f"  {time.monotonic() - began:.0f} s: {message}", sys.stderr)

    return bisect(case.model, case.trained.loss, case.batch, **compiler_options, **run_options, tell=tell)  # type: ignore[arg-type]


def script_of(finding: Finding, path: Path) -> str:
    """Write the script of a finding; return how to run it, or why there is none."""
    if finding.piece is None:
        return "no script: no smaller program reproduces it"
    try:
        write(finding.piece, path, str(finding).partition("\n")[0])
    except Inexpressible as error:
        return f"no script: {error}"
    return f"python {path}  # exits with 1 until this is fixed; its values are in {path.with_suffix('.pt').name}"
