"""One run at a time writes to a folder: a lock that ends with its process, and in its file who holds it.

Where another host does not see the lock, a job that was thought dead finds another's name in the file when it goes on,
and ends. A folder that is deleted under a run is made anew.
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
from compiler_trainer.places.kept import is_at
from compiler_trainer.step.ranks import from_rank_0, rank
from compiler_trainer.training.resume import checkpoints_of

FILE = ".owner"
PATIENCE_S = 5.0  # for the process before, which may be about to end


class Owner:
    """Owns a folder from `take` to `release`."""

    def __init__(self, option: str, folder: Path):
        self.option, self.folder, self.path = option, folder, folder / FILE
        self.file: IO[str] | None = None
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        me = {"host": socket.gethostname(), "pid": os.getpid(), "began": began, "token": secrets.token_hex(8)}
        self.text = json.dumps(me) + "\n"
        self.made: list[Path] = []  # by `take`, innermost first
        self.before: tuple[str, tuple[int, int]] = ("", (0, 0))  # what the file said, and its times

    def take(self) -> None:
        """Lock the folder, made where it is not there; raises UserError naming who holds it."""
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise UserError(self.option, f"{self.folder} is not a folder; choose another name")
        try:
            while self.file is None or not is_at(self.file, self.path):  # else the run before has removed it
                self.release()
                self.made = [p for p in (self.path, *self.path.absolute().parents) if not os.path.lexists(p)]
                self.folder.mkdir(parents=True, exist_ok=True)
                self.file = open(self.path, "a+", encoding="utf-8")
                if not locked(self.file):
                    held = holder(self.path)
                    self.release()
                    raise UserError(self.option, f"{self.folder} is another run's, {held}; end it, or name another")
            at = os.fstat(self.file.fileno())
            self.file.seek(0)
            self.before = self.file.read(), (at.st_atime_ns, at.st_mtime_ns)
            self.say(self.text)
        except OSError as error:
            said = f"{self.folder} cannot be written: {error.strerror}; choose another"
            raise UserError(self.option, said) from error

    def say(self, text: str) -> None:
        """Let the file hold a text."""
        assert self.file is not None
        self.file.truncate(0)
        self.file.write(text)
        self.file.flush()

    def undo(self) -> None:
        """Unlock the folder, as it was before; what was made to lock it stays if it holds something since."""
        if self.file is not None:
            with suppress(OSError):
                text, times = self.before
                self.say(text)
                os.utime(self.path, ns=times)
                for path in self.made:
                    path.unlink() if path == self.path else path.rmdir()
        self.release()

    def check(self, restore: Callable[[], None]) -> None:
        """`restore` what a run starts with where the folder was deleted; raises RunError where another run took it."""
        try:
            found = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            say(f"{self.folder} was deleted while a run writes to it; it is made anew, without what it held")
            self.release()
            try:
                self.take()
                restore()
            except UserError as error:
                say(f"{error}")
        except OSError:  # of a disk that fails, others tell
            return
        else:
            if found and found != self.text:  # empty: its disk is full
                said = f"{self.folder} was taken by another run, {holder(self.path)}"
                raise RunError(f"{said}; this one ends, with nothing more saved")

    def release(self) -> None:
        """Unlock the folder."""
        if self.file is not None:
            self.file.close()
            self.file = None


def locked(file: IO[str]) -> bool:
    """Lock a file, for this process alone; whether that could be done."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        except OSError:  # a file system without locks: the name in the file is all there is
            return True


def holder(path: Path) -> str:
    """Who holds a folder, as its file says."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return f"process {found['pid']} on {found['host']} since {found['began']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"which does not say who it is in {path}"


class Owners:
    """The folders that a run writes to, owned on rank 0."""

    def __init__(self, cfg: Config):
        places = {"run.dir": Path(cfg.run.dir)}
        if cfg.checkpoint.saves:
            places["checkpoint.dir"] = checkpoints_of(cfg)
        self.restore: Callable[[], None] | None = None  # what a folder begins with, once a run began in it
        self.all = [Owner(option, folder) for option, folder in places.items()] if rank() == 0 else []

    def take(self) -> None:
        """Take all of them, on all ranks alike: raises UserError on each where one is another's."""
        refusal = from_rank_0(self.refusal)
        if refusal is not None:
            raise UserError(*refusal)

    def refusal(self) -> tuple[str, str] | None:
        """Take all of them; what is said where one cannot be taken."""
        try:
            for each in self.all:
                each.take()
        except UserError as error:
            return error.where, error.message
        return None

    def check(self) -> None:
        """Look whether they are still there, and still this run's: raises RunError where they are not its own."""
        for each in self.all:
            each.check(self.restore or (lambda: None))

    def leave(self) -> None:
        """Unlock them; of a run that did not begin nothing is left."""
        for each in reversed(self.all):
            each.undo() if self.restore is None else each.release()


@contextmanager
def owning(cfg: Config) -> Iterator[Owners]:
    """The folders of a run, taken; none is held afterwards, and none is there that was not, unless the run began."""
    owners = Owners(cfg)
    try:
        owners.take()
        yield owners
    finally:
        owners.leave()
