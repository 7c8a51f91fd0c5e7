"""`check-model`: compare a model's training on a mesh, with the given options, with eager PyTorch on one device.

    compiler-trainer check-model my_package.Model model.width=64 mesh.tp=2 mesh.cp=2
    compiler-trainer check-model model=hf model.path=FOLDER mesh.dp_shard=4 passes.remat.policy=full

Exit codes: 0 they are the same, 1 they differ or the step crashes, 2 the model is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from compiler_trainer.cli.table import parser
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.jobs import is_job_file, with_files
from compiler_trainer.config.validate import ranks_of, validate
from compiler_trainer.parity.of_config import SMALL, check


def main(arguments: Sequence[str]) -> int:
    """Train both ways for three steps and print the difference; return the exit code."""
    arg_parser = parser("check-model")
    arg_parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="the job; the first may name a class")
    overrides = arg_parser.parse_args(arguments).overrides
    if overrides and "=" not in overrides[0] and not is_job_file(overrides[0]):
        overrides[:1] = ["model=custom", f"model._target_={overrides[0]}"]
    cfg = resolve_auto(to_config(compose([*SMALL, *with_files(overrides)])), on_gpu=False)
    outcome = check(validate(cfg, ranks_of(cfg.mesh)))
    if outcome.verdict == "refused":
        raise UserError(outcome.where, outcome.why)
    print(f"{' '.join(overrides)}: {outcome} ({outcome.seconds:.0f} s)")
    print(outcome.trace, file=sys.stderr, end="")
    return 0 if outcome.verdict == "right" else 1
