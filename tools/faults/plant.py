"""A copy of the tree with one fault in it, and the commands that run there in separate processes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.faults.fault import Fault

ROOT = Path(__file__).parent.parent.parent
NEEDED = ("compiler_trainer", "conf", "passes", "tests", "tools", "pyproject.toml")
LOOKS_FIRST = {"context": "context", "precision": "cast"}  # package -> the model that runs most of it


def mutated(fault: Fault) -> str:
    """Return the text of the fault's file with the fault in it; raise ValueError if the old text is not there once."""
    return fault.planted_in((ROOT / fault.file).read_text())


@contextmanager
def planted(fault: Fault | None) -> Iterator[Path]:
    """Yield a folder with the needed parts of the tree, and the fault in it (None: unchanged)."""
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        folder = Path(name)
        for part in NEEDED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            copy(ROOT / part, folder / part)
        if fault is not None:
            (folder / fault.file).write_text(mutated(fault))
        yield folder


class Judge:
    """Judges trees one after another, each in a fork of a process that has imported PyTorch."""

    def __init__(self) -> None:
        command = [sys.executable, str(ROOT / "tools/faults/warm.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, folder: Path, models: Sequence[str], limit_seconds: float) -> dict[str, str]:
        """Return the verdict on models compiled by the tree in a folder."""
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"folder": str(folder), "models": list(models), "limit": int(limit_seconds)}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def tested(folder: Path, fault: Fault | None, limit_seconds: float) -> str:
    """Return the first test that fails, or "survives"; tests named after or importing the faulty module run first."""
    options = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no")
    try:
        run = python(folder, limit_seconds, *options, *nearest_tests(folder, fault))
    except subprocess.TimeoutExpired:
        return f"survives {limit_seconds:.0f} s"
    if run.returncode == 0:
        return "survives"
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return match[1].removeprefix("tests/") if match else run.stdout.strip().splitlines()[-1]


def nearest_tests(folder: Path, fault: Fault | None) -> list[str]:
    """Return all test files of the passes and the trainer, the most likely to notice a fault first."""
    module = fault.file.removesuffix(".py").replace("/", ".") if fault else ""

    def distance(path: Path) -> tuple[bool, bool, bool, bool, Path]:
        parts, named = path.relative_to(folder).parts, path.stem == f"test_{module.rpartition('.')[2]}"
        imports = f"from {module} import" in path.read_text()
        return not named, not imports, (fault.room if fault else "") not in parts, parts[1] != "passes", path

    files = [path for part in ("passes", "compiler_trainer") for path in (folder / "tests" / part).rglob("test_*.py")]
    return [str(path.relative_to(folder)) for path in sorted(files, key=distance)]


def python(folder: Path, limit_seconds: float, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, whose packages it imports first."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=limit_seconds, check=False
    )
