"""A lock on the folders of a run: one process at a time writes to them, and the lock ends with its process.

The file of the lock names its holder. If another host does not see the lock, a job that was thought dead finds the new
holder's name in the file when it continues, and ends. A folder that is deleted during a run is created again.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from compiler_trainer.config.errors import RunError, UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.places.folders import is_at
from compiler_trainer.step.ranks import rank, try_on_rank_0
from compiler_trainer.training.checkpoints import checkpoints_of

FILE = ".owner"
PATIENCE_S = 5.0  # for the previous process, which may be ending


class Owner:
    """The lock on one folder, held from `take` to `release`."""

    def __init__(self, option: str, folder: Path):
        self.option, self.folder, self.path = option, folder, folder / FILE
        self.file: IO[str] | None = None
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        me = {"host": socket.gethostname(), "pid": os.getpid(), "began": began, "token": secrets.token_hex(8)}
        self.text = json.dumps(me) + "\n"
        self.created: list[Path] = []  # paths that `take` created, innermost first
        self.previous: tuple[str, tuple[int, int]] = ("", (0, 0))  # the file's text and times before `take`

    def take(self) -> None:
        """Lock the folder, which is created if needed; raise UserError naming the holder if it is locked."""
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise UserError(self.option, f"{self.folder} is not a folder; choose another name")
        try:
            while self.file is None or not is_at(self.file, self.path):  # the previous run may have removed the file
                self.release()
                self.created = [p for p in (self.path, *self.path.absolute().parents) if not os.path.lexists(p)]
                self.folder.mkdir(parents=True, exist_ok=True)
                self.file = open(self.path, "a+", encoding="utf-8")
                if not try_lock(self.file):
                    owner = holder(self.path)
                    self.release()
                    raise UserError(
                        self.option,
                        f"{self.folder} is in use by another run, {owner}; stop that run, or choose another folder",
                    )
            status = os.fstat(self.file.fileno())
            self.file.seek(0)
            self.previous = self.file.read(), (status.st_atime_ns, status.st_mtime_ns)
            self.say(self.text)
        except OSError as error:
            problem = f"{self.folder} cannot be written: {error.strerror}; choose another"
            raise UserError(self.option, problem) from error

    def say(self, text: str) -> None:
        """Replace the file's text."""
        assert self.file is not None
        self.file.truncate(0)
        self.file.write(text)
        self.file.flush()

    def undo(self) -> None:
        """Unlock the folder and restore its previous state; paths that `take` created stay if they have content now."""
        if self.file is not None:
            with suppress(OSError):
                text, times = self.previous
                self.say(text)
                os.utime(self.path, ns=times)
                for path in self.created:
                    path.unlink() if path == self.path else path.rmdir()
        self.release()

    def check(self, restore: Callable[[], None]) -> None:
        """Check the lock: call `restore` if the folder was deleted; raise RunError if another run took it."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            say(f"{self.folder} was deleted while a run writes to it; it is created again, without its old content")
            self.release()
            try:
                self.take()
                restore()
            except UserError as error:
                say(f"{error}")
        except OSError:  # other writers report a failing disk
            return
        else:
            if text and text != self.text:  # an empty file means a full disk
                problem = f"{self.folder} was taken by another run, {holder(self.path)}"
                raise RunError(f"{problem}; this run ends without saving more")

    def release(self) -> None:
        """Unlock the folder."""
        if self.file is not None:
            self.file.close()
            self.file = None


def try_lock(file: IO[str]) -> bool:
    """Lock a file for this process, and return True if that succeeded."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        except OSError:  # no locks on this file system: only the file's text protects
            return True


def holder(path: Path) -> str:
    """Return a description of a folder's holder from its lock file."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return f"process {entries['pid']} on {entries['host']} since {entries['began']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"which its lock file does not name: {path}"


class Owners:
    """The locks on a run's folders, held on rank 0."""

    def __init__(self, cfg: Config):
        places = {"run.dir": Path(cfg.run.dir)}
        if cfg.checkpoint.saves and checkpoints_of(cfg).resolve() != places["run.dir"].resolve():
            places["checkpoint.dir"] = checkpoints_of(cfg)
        self.restore: Callable[[], None] | None = None  # recreates the folder's first files; None before the run began
        self.owners = [Owner(option, folder) for option, folder in places.items()] if rank() == 0 else []

    def take(self) -> None:
        """Take all locks; raise UserError on every rank if one is held by another run."""

        def take_all() -> None:
            for owner in self.owners:
                owner.take()

        try_on_rank_0(take_all)

    def check(self) -> None:
        """Check all locks; raise RunError if another run took a folder."""
        for owner in self.owners:
            owner.check(self.restore or (lambda: None))

    def leave(self) -> None:
        """Release all locks; if the run did not begin, remove the files that they created."""
        for owner in reversed(self.owners):
            owner.undo() if self.restore is None else owner.release()


@contextmanager
def owning(cfg: Config) -> Iterator[Owners]:
    """Lock the folders of a run during the block, and release them at the end.

    If the run did not begin, no new folder is left behind.
    """
    owners = Owners(cfg)
    try:
        owners.take()
        yield owners
    finally:
        owners.leave()
