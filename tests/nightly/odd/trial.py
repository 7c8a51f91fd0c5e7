"""Run one command in its own process and folder, and judge the outcome."""

from __future__ import annotations

import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from compiler_trainer.cli import command

LIMIT_S = 60.0
FALLBACK, DAMAGED = " is damaged and passed over: ", ": damaged, "  # parts of lines about checkpoints
MEMORY_BYTES = 24 * 2**30  # of address space, most of it for libraries


class Outcome(NamedTuple):
    """A command's exit code (None: killed), its stderr, and its fault, empty if there is none."""

    code: int | None
    stderr: str
    wrong: str


def run_command(arguments: Sequence[str], folder: Path) -> Outcome:
    """Run a command in a folder, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    before = listing(folder)
    child = os.fork()
    if child == 0:
        act(arguments, folder)
    code = wait(child)
    stderr, stdout = (folder.with_suffix(end).read_text(encoding="utf-8", errors="replace") for end in (".err", ".out"))
    return Outcome(code, stderr, find_fault(code, stderr, stdout, listing(folder) != before))


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return mode, size and mtime of everything in a folder, by path; for folders only the mode."""
    entries = ((path, os.lstat(path)) for path in folder.rglob("*"))
    return {
        str(path): (status.st_mode, 0, 0) if stat.S_ISDIR(status.st_mode) else (status.st_mode, status.st_size, status.st_mtime_ns)
        for path, status in entries
    }


def act(arguments: Sequence[str], folder: Path) -> None:
    """Run the command in the child process, and exit."""
    os.setsid()
    for stream, name in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(folder.with_suffix(name), os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, errors="backslashreplace")  # Python's default
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
    sys.argv = ["compiler-trainer", *arguments]
    code = 1
    try:
        command.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(child: int) -> int | None:
    """Return the exit code, or None if the process took too long and was killed."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def find_fault(code: int | None, stderr: str, stdout: str, has_changed: bool) -> str:
    """Return the fault in a command's ending, from exit code, stderr, stdout and changes in its folder; "" if none."""
    lines = [line for line in stderr.splitlines() if FALLBACK not in line]
    errors = [line for line in lines if line.startswith("error: ")]
    if code is None:
        return f"hangs for {LIMIT_S:.0f} s"
    if "Traceback" in stderr or code not in (0, 1, 2):
        return f"ends with {code}: {(lines or ['nothing'])[-1]}"
    if code == 2 and has_changed:
        return "is refused but leaves files"
    if code == 2 and not lines and DAMAGED in stdout:  # check reports each checkpoint on stdout
        return ""
    if code != 0 and len(errors) != 1:
        return f"prints {len(errors)} error lines"
    if code == 2 and lines != errors:
        return "prints more than the error"
    if errors and errors[0].startswith(("error: :", "error:  ")):
        return "the error names no place"
    return ""
