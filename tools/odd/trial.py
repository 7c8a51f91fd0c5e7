"""One command in a process and a folder of its own: what it did, and what is wrong with that."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from compiler_trainer import command

LIMIT_S = 60.0
MEMORY_BYTES = 24 * 2**30  # of addresses, most of which libraries take


class Outcome(NamedTuple):
    """How a command ended, what it said on stderr, and why that is wrong, empty if it is not."""

    code: int | None
    said: str
    wrong: str


def tried(arguments: Sequence[str], folder: Path) -> Outcome:
    """Run the command in an empty folder."""
    folder.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        act(arguments, folder)
    code = waited(child)
    said = folder.with_suffix(".err").read_text(encoding="utf-8", errors="replace")
    return Outcome(code, said, judged(code, said, folder))


def act(arguments: Sequence[str], folder: Path) -> None:
    """In the child: be the command, and end."""
    os.setsid()
    for stream, name in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(folder.with_suffix(name), os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout, sys.stderr = (open(stream, "w", encoding="utf-8", closefd=False) for stream in (1, 2))
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


def waited(child: int) -> int | None:
    """The exit code, None where it took too long and was killed."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def judged(code: int | None, said: str, folder: Path) -> str:
    """What is wrong with how a command ended."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if code is None:
        return f"hangs for {LIMIT_S:.0f} s"
    if "Traceback" in said or code not in (0, 1, 2):
        return f"ends with {code}: {(said.splitlines() or ['nothing'])[-1]}"
    if code == 2 and any(folder.iterdir()):
        return "is refused and leaves files"
    if code != 0 and len(errors) != 1:
        return f"says {len(errors)} lines of error"
    if code == 2 and said.strip() != errors[0]:
        return "says more than the error"
    if errors and errors[0].startswith(("error: :", "error:  ")):
        return "names nothing"
    return ""
