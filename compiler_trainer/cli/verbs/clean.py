"""`clean`: bound the size of the compile cache, programs and kernels, and print it."""

from __future__ import annotations

from collections.abc import Sequence

from compiler_trainer.cli.table import parser
from passes.lower.inductor import MOST_BYTES
from passes.lower.store import bound, files_in
from passes.torch_private import compiler_folder


def main(arguments: Sequence[str]) -> None:
    """Delete the least recently used entries beyond the limit, and print the size that is left."""
    arg_parser = parser("clean")
    arg_parser.add_argument("--gib", type=float, default=MOST_BYTES / 2**30, help="size that may stay (default 20)")
    args, folder = arg_parser.parse_args(arguments), compiler_folder()
    if message := bound(folder, int(args.gib * 2**30)):
        print(message)
    sizes = {name: sum(size for _, size, _ in files_in(folder / name)) for name in ("", "programs")}
    size_text = f"{sizes[''] / 2**20:,.0f} MiB, {sizes['programs'] / 2**20:,.0f} of them programs"
    print(f"{folder} holds {size_text}; at most {args.gib:g} GiB stay, and entries used within a day")
