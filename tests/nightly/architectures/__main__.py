"""Train small models of all causal language models of the installed transformers, and compare with eager PyTorch.

    python -m tests.nightly.architectures --only 'qwen*'                            some
    python -m tests.nightly.architectures --jobs 2 --write docs/measured/architectures.md   all, and the page

Each type of model is judged in its own process (`judge.py`), with a time limit per mesh, on the path of a user's job:
`model.path` is a folder that holds a small config. Each result is appended to a file as a line of JSON, and is not
computed again as long as it is there. Exit codes: 0 done, 1 a model is wrong, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from tests.nightly.architectures.judge import NAMES
from tests.nightly.architectures.page import page
from tests.nightly.architectures.tiny import architectures
from tests.nightly.models.command import append, judged, read


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the types that the arguments select; return the exit code."""
    options = parse(arguments)
    kinds = architectures()
    chosen = [kind for kind in kinds if fnmatchcase(kind, options.only)]
    if not chosen:
        print(f"--only: no type matches {options.only!r}", file=sys.stderr)
        return 2
    known = read(options.results)

    def judge(kind: str) -> None:
        names = [name for name in NAMES if fnmatchcase(name, options.mesh) and (kind, name) not in known]
        for record in judged(["tests.nightly.architectures.judge", kind], kind, names, options.limit):
            known[kind, record["mesh"]] = record
            append(options.results, record)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(judge, chosen))
    if options.write:
        options.write.write_text(page(kinds, known))
    return int(any(record["verdict"] == "wrong" for (kind, _), record in known.items() if kind in chosen))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.architectures", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="types whose names match")
    parser.add_argument("--mesh", default="*", metavar="PATTERN", help=f"meshes whose names match: {', '.join(NAMES)}")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="types to judge at once")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="time limit on one mesh")
    parser.add_argument(
        "--results", type=Path, default=Path("docs/measured/architectures.jsonl"), help="file of results"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write all results as a Markdown page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
