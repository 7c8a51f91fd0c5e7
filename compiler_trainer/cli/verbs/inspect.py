"""`inspect`: show what each pass did to the graph of a run, in the terminal or as a page.

compiler-trainer inspect runs/1                              # every pass: time, nodes, communication, memory
compiler-trainer inspect runs/1 --pass shard                 # what one pass did
compiler-trainer inspect runs/1 --node 'all_gather*' --line llama.py:71 --module layers.0
compiler-trainer inspect runs/1 --parameter '*.wq.weight'    # where a weight is stored, gathered, used, updated
compiler-trainer inspect runs/1 --html                       # runs/1/inspect.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.cli.table import parser
from compiler_trainer.console import tabular
from compiler_trainer.inspect.dumps import load
from compiler_trainer.inspect.parameter import show_parameters
from compiler_trainer.inspect.tables import chosen, show_nodes, show_pass, show_run, write_page


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write the page."""
    arg_parser = parser("inspect")
    arg_parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    arg_parser.add_argument(
        "--pass", dest="name", help="a pass (shard, joint), also as 05, step_joint or 06_step_joint"
    )
    arg_parser.add_argument("--node", help="nodes whose name matches; * and ? are wildcards")
    arg_parser.add_argument("--module", help="nodes of modules that match")
    arg_parser.add_argument("--line", help="nodes of a line of the model's source, FILE:LINE")
    arg_parser.add_argument(
        "--parameter", metavar="PATTERN", help="show where matching parameters are stored, gathered, used"
    )
    arg_parser.add_argument(
        "--html", nargs="?", const="", metavar="FILE", help="write a page, by default RUN/inspect.html"
    )
    args = arg_parser.parse_args(arguments)
    out, run = tabular(), load(args.run)
    if args.html is not None:
        write_page(run, Path(args.html or args.run / "inspect.html"), out)
    elif args.parameter:
        show_parameters(run, args.parameter, out)
    elif args.node or args.module or args.line:
        show_nodes(chosen(run, args.name), args.node, args.module, args.line, out)
    elif args.name:
        for stage in chosen(run, args.name):
            show_pass(run, stage, out)
    else:
        show_run(run, out)
