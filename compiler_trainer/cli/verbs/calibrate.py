"""`calibrate`: measure this machine, and write it as a cluster for dry runs and plans.

compiler-trainer calibrate --out FOLDER/cluster/NAME.yaml --ranks 2
compiler-trainer --config-dir FOLDER cluster=NAME run.dry=true ...
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.calibrate.measure import calibrate
from compiler_trainer.calibrate.probes import CLOCKS
from compiler_trainer.cli.table import parser


def main(arguments: Sequence[str]) -> None:
    """Measure, print a table, and write the file."""
    arg_parser = parser("calibrate")
    arg_parser.add_argument("--out", type=Path, required=True, help="FOLDER/cluster/NAME.yaml; NAME is the cluster's")
    arg_parser.add_argument("--ranks", type=int, default=1, help="ranks that measure at once: as many as will train")
    arg_parser.add_argument("--threads", type=int, default=1, help="threads of a rank, on a CPU")
    arg_parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: CPU time of a rank, without waiting")
    args = arg_parser.parse_args(arguments)
    calibrate(args.out, args.ranks, args.threads, args.clock)
