"""Train models of other libraries on several meshes and compare with plain PyTorch: `python -m tests.nightly.models`.

    python -m tests.nightly.models --only 'timm*'                      some models
    python -m tests.nightly.models --write docs/measured/models.md     all models, and the page

Each model of the table is judged in its own process (`judge.py`), with a time limit per mesh. Each result is appended
to a file as a line of JSON. Models in that file are not judged again: remove the file, or name models with `--again`,
after a change of the tree. Exit codes: 0 done, 1 a model is wrong, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path

from tests.nightly.models.case import MESHES, Entry
from tests.nightly.models.judge import Record
from tests.nightly.models.page import page

Known = dict[tuple[str, str], Record]  # model and mesh -> record


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the models that the arguments select; return the exit code."""
    options = parse(arguments)
    table: list[Entry] = import_module(options.table).MODELS
    chosen = [entry for entry in table if fnmatchcase(entry.name, options.only)]
    if not chosen:
        print(f"--only: no model name matches {options.only!r}", file=sys.stderr)
        return 2
    known = read(options.results)
    if options.again:
        known = {key: record for key, record in known.items() if not fnmatchcase(key[0], options.only)}
    for entry in chosen:
        meshes = [mesh for mesh in entry.meshes if fnmatchcase(mesh, options.mesh)]
        missing = [mesh for mesh in meshes if (entry.name, mesh) not in known]
        module = ["tests.nightly.models.judge", options.table, entry.name]
        for record in judged(module, entry.name, missing, options.limit):
            known[entry.name, record["mesh"]] = record
            append(options.results, record)
    if options.write:
        options.write.write_text(page(table, known))
    return int(any(known[key]["verdict"] == "wrong" for key in known if fnmatchcase(key[0], options.only)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.models", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="models whose names match")
    parser.add_argument("--mesh", default="*", metavar="PATTERN", help=f"meshes whose names match: {', '.join(MESHES)}")
    parser.add_argument("--again", action="store_true", help="judge these models again even if they have results")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="time limit for a model on one mesh")
    parser.add_argument("--results", type=Path, default=Path("docs/measured/models.jsonl"), help="file of results")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write all results as a Markdown page")
    parser.add_argument("--table", default="tests.nightly.models.table", metavar="MODULE", help="module with the MODELS to judge")
    return parser.parse_args(arguments)


def judged(module: Sequence[str], name: str, meshes: Sequence[str], limit_seconds: float) -> Iterator[Record]:
    """Yield the records that a module, with its arguments, prints of a model on each mesh.

    After a time-out or a crash a new process goes on.
    """
    remaining = list(meshes)
    while remaining:
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", *module, *remaining]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=paths) as process:
            for mesh in tuple(remaining):
                remaining.remove(mesh)
                record, alive = next_record(process, limit_seconds)
                yield {"model": name, "mesh": mesh} | record
                if not alive:
                    break


def append(results: Path, record: Record) -> None:
    """Append a record to a file as a line of JSON, and print it."""
    with results.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(f"{record['model']} on {record['mesh']}: {record['verdict']} {record['why']}".rstrip(), flush=True)


def next_record(process: subprocess.Popen[bytes], limit_seconds: float) -> tuple[Record, bool]:
    """Return the process's next record, or a time-out or crash; and True if the process is still alive."""
    assert process.stdout is not None
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limit_seconds, stop)
    timer.start()
    line = next((line for line in process.stdout if line.startswith(b'{"model"')), None)
    timer.cancel()
    if line is not None:
        return json.loads(line), True
    if late.is_set():
        return {"verdict": "time-out", "why": f"after {limit_seconds:.0f} s"}, False
    return {"verdict": "crash", "why": f"the process ended with code {process.wait()}"}, False


def read(path: Path) -> Known:
    """Read the records by model and mesh."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(record["model"], record["mesh"]): record for record in records}
