"""Test and train with other versions of PyTorch and Python, each pair in a separate environment.

    python -m tools.versions 2.11.0:python3.12 2.15.0:python3.13                # a row a pair
    python -m tools.versions 2.11.0:python3.12 --write docs/measured/versions.md # adds the row to the page

`make venv` makes the environments, `.venv-TORCH-PYTHON`, gigabytes each. Exit codes: 0 all tests passed, 1 some failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from tools import pages

ROOT = Path(__file__).parents[1]
PART = "versions"  # of the page, which is generated
# some tests of each folder, and all that touch private parts of PyTorch: capture, tracing, Inductor, FlexAttention
TESTS = tuple(
    f"tests/{path}"
    for path in (
        "compiler_trainer/capture",
        "compiler_trainer/checkpoint/test_saving.py",
        "compiler_trainer/cli/test_verbs.py",
        "compiler_trainer/config/test_config.py",
        "compiler_trainer/data/test_fitting.py",
        "compiler_trainer/inspect/test_dumps.py",
        "compiler_trainer/models/test_models.py",
        "compiler_trainer/step/test_compile_step.py",
        "compiler_trainer/step/test_fsdp.py",
        "multirank/test_processes.py::test_two_processes_are_lockstep_bit_for_bit",
        "passes/autograd",
        "passes/check/test_verify.py",
        "passes/communication/test_overlap.py",
        "passes/context/test_context.py",
        "passes/context/test_flex_kernels.py",
        "passes/cost/test_accounting.py",
        "passes/lower/test_backends.py",
        "passes/lower/test_cpu_start.py",
        "passes/lower/test_damaged.py",
        "passes/lower/test_inductor.py",
        "passes/lower/test_kernels.py",
        "passes/lower/test_ready.py",
        "passes/memory/test_remat.py",
        "passes/pipeline",
        "passes/precision",
        "passes/ops/test_reshard.py",
        "passes/ir/test_printer.py",
        "passes/ir/test_sharing.py",
        "passes/ops/test_shift.py",
        "passes/ir/test_spec.py",
        "passes/rules/test_rules.py",
        "passes/sharding/test_deep.py",
        "passes/sharding/test_recurrent.py",
        "passes/sharding/test_tensor_parallel.py",
        "passes/update/test_optimize.py",
    )
)
STEPS = 20
JOB = ("data=synthetic", f"train.steps={STEPS}")  # the default data is Python's own library, which differs
HEAD = ("torch", "Python", "passed", "failed", "skipped", "minutes", "loss, step 1", f"step {STEPS}", "eval loss", "")
Row = tuple[str, ...]


class Pair(NamedTuple):
    """A version of PyTorch, and the command of a Python."""

    torch: str
    python: str

    @staticmethod
    def parse(text: str) -> Pair:
        """Return the pair of `TORCH:PYTHON`; raise ArgumentTypeError or ValueError."""
        torch, _, python = text.partition(":")
        if not torch or not python:
            raise argparse.ArgumentTypeError(f"{text}: give TORCH:PYTHON, as in 2.11.0:python3.12")
        Version(torch)
        return Pair(torch, python)

    def installed(self) -> Path:
        """Return the interpreter of the pair's environment, made if it is missing."""
        venv = ROOT / f".venv-{self.torch}-{Path(self.python).name}"
        options = f"TORCH=torch=={self.torch}", f"PYTHON={self.python}", f"VENV={venv}"
        subprocess.run(["make", "venv", *options], cwd=ROOT, check=True)
        return venv / "bin/python"


def row(pair: Pair, jobs: int) -> Row:
    """Return the results of the tests and of the job."""
    python = pair.installed()
    with tempfile.TemporaryDirectory(prefix="versions-") as scratch:
        version = subprocess.run([python, "-c", VERSION], check=True, capture_output=True, text=True).stdout.strip()
        return (pair.torch, version, *tested(python, Path(scratch), jobs), *trained(python, Path(scratch)))


VERSION = "import platform; print(platform.python_version())"


def tested(python: Path, scratch: Path, jobs: int) -> Row:
    """Return counts of passed, failed and skipped tests, and minutes; failed tests are named."""
    report = scratch / "tests.xml"
    subprocess.run([python, "-m", "pytest", f"-n{jobs}", "--dist=worksteal", f"--junitxml={report}", *TESTS], cwd=ROOT)
    return counted(ElementTree.parse(report).getroot())


def counted(report: ElementTree.Element) -> Row:
    """Return for a JUnit report: the number passed, the names of failed tests, the number skipped, minutes."""
    (suite,) = report.iter("testsuite")
    cases = list(suite.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = "<br>".join(f"`{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}`" for case in failed)
    passed = len(cases) - len(failed) - len(skipped)
    return str(passed), names or "0", str(len(skipped)), f"{float(suite.get('time', 0)) / 60:.1f}"


def trained(python: Path, scratch: Path) -> Row:
    """Return the job's first, last and validation loss, and an empty text, or the last line of its error."""
    run = scratch / "run"
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "kernels"), "XDG_CACHE_HOME": str(scratch / "tokens")}
    command = [str(python), "-m", "compiler_trainer", *JOB, f"run.dir={run}"]
    job = subprocess.run(command, cwd=ROOT, env=os.environ | caches, capture_output=True, text=True)
    if job.returncode:
        return "", "", "", job.stderr.strip().splitlines()[-1]
    return (*losses([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]), "")


def losses(steps: Sequence[Mapping[str, float]]) -> Row:
    """Return the losses of a run's metrics."""
    return f"{steps[0]['loss']:.5f}", f"{steps[-1]['loss']:.5f}", f"{steps[-1]['eval_loss']:.5f}"


def renewed(page: str, rows: Sequence[Row]) -> str:
    """Return the page with these rows in place of those of the same versions."""
    old_rows = [cells for line in pages.split(page, PART)[1].splitlines() if (cells := cells_of(line))]
    row_of_versions = {cells[:2]: cells for cells in [*old_rows, *rows]}
    in_order = (row_of_versions[key] for key in sorted(row_of_versions, key=numbers))
    return pages.renewed(page, PART, pages.table(HEAD, in_order))


def cells_of(line: str) -> Row:
    """Return the cells of a table's line, none for its head."""
    cells = tuple(cell.strip() for cell in line.split("|")[1:-1])
    return cells if cells and cells[0][:1].isdigit() else ()


def numbers(versions: Row) -> list[Version]:
    """Return the sort key of versions; a Python between two releases calls itself 3.15.0a1+."""
    return [Version(version.rstrip("+")) for version in versions]


def main(arguments: Sequence[str] | None = None) -> int:
    """Test each pair, print and write the rows; return the exit code."""
    parser = argparse.ArgumentParser("python -m tools.versions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pairs", nargs="+", type=Pair.parse, metavar="TORCH:PYTHON", help="such as 2.11.0:python3.12")
    parser.add_argument("--write", type=Path, help="the page in which to replace the rows")
    parser.add_argument("--jobs", type=int, default=2, help="tests at once")
    args = parser.parse_args(arguments)
    if args.write:
        renewed(args.write.read_text(encoding="utf-8"), [])  # raises before the tests, which take hours
    rows = []
    for pair in args.pairs:
        rows.append(row(pair, args.jobs))
        print(" | ".join(rows[-1]), flush=True)
        if args.write:
            args.write.write_text(renewed(args.write.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 1 if any(cells[3] != "0" or cells[-1] for cells in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
