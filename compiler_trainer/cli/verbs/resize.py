"""`resize`: give a running job of run.elastic=true another mesh, after its next snapshot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.cli.table import parser
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.validate import ranks_of, validate
from compiler_trainer.elastic.member import ask_for
from compiler_trainer.runs.saved import options_of
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.training import status


def main(arguments: Sequence[str]) -> None:
    """Ask the launcher of a run for another mesh."""
    arg_parser = parser("resize")
    arg_parser.add_argument("run", type=Path, metavar="RUN", help="the run folder of a job that runs now")
    arg_parser.add_argument("sizes", nargs="+", metavar="mesh.AXIS=SIZE", help="sizes that change")
    args = arg_parser.parse_args(arguments)
    for option in args.sizes:
        if not option.startswith("mesh."):
            raise UserError(option.partition("=")[0], "cannot change while a job runs; give only mesh.AXIS=SIZE")
    cfg = options_of(args.run, args.sizes)
    if not cfg.run.elastic:
        raise UserError("run.elastic", f"is false in {args.run}; stop it, and resume it with the other mesh")
    validate(cfg, ranks_of(cfg.mesh))
    mesh = mesh_of(cfg.mesh)
    ask_for(launcher_of(args.run), cfg.mesh, mesh.world_size)
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes if size > 1) or "one rank"
    print(f"{args.run} changes to {axes} after its next snapshot; it makes one every {cfg.run.snapshot_interval} steps")


def launcher_of(run: Path) -> str:
    """Return the address of a run's launcher; raise UserError if the run has taken no step or the file is damaged."""
    path = run / status.FILE
    try:
        state = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise UserError(str(path), "is damaged; the run writes it again with its next step") from error
    if status.LAUNCHER not in state:
        raise UserError(str(run), "has taken no step yet; ask again when it trains")
    return state[status.LAUNCHER]
