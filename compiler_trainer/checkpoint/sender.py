"""Send each finished checkpoint of a folder to a store, while training runs; failures are reported once and retried.

The newest goes first. A checkpoint that is being sent is not deleted from disk; a waiting one may have to make room,
which is reported. The store keeps those that `checkpoint.keep` and related options select, among all that it had when
the run began or got since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from compiler_trainer.checkpoint.index import Damaged, read_index
from compiler_trainer.checkpoint.listing import bad_steps, complete, number_of, path_of, steps_to_keep
from compiler_trainer.checkpoint.remote import RemoteCheckpoints
from compiler_trainer.config.schema import CheckpointConfig

RETRY_S = 30.0
LAST_TRIES, LAST_RETRY_S = 3, 10.0  # after training has ended


class Sender:
    """A thread that sends offered checkpoints, and those of the folder that the store lacks, until `end`."""

    def __init__(self, url: str, folder: Path, cfg: CheckpointConfig, tell: Callable[[str], None]):
        self.url, self.folder, self.cfg, self.tell = url, folder, cfg, tell
        self.store: RemoteCheckpoints | None = None  # set once it has answered
        self.losses: dict[int, float | None] = {}  # steps in the store, and their validation losses
        self.waiting = {number_of(path) for path in complete(folder)}
        self.sending: int | None = None
        self.failure = ""
        self.has_ended, self.woken = False, threading.Event()
        self.thread = threading.Thread(target=self.run, name="store", daemon=True)
        self.woken.set()
        self.thread.start()

    def offer(self, step: int) -> None:
        """Queue the checkpoint of a step."""
        self.waiting.add(step)
        self.woken.set()

    def spared(self) -> set[int]:
        """Return the step whose checkpoint must not be deleted now."""
        return {self.sending} if self.sending is not None else set()

    def end(self) -> str:
        """Wait until everything is sent or has failed; return the reason for a failure, or an empty string."""
        self.has_ended = True
        self.woken.set()
        self.thread.join()
        if not self.waiting:
            return ""
        names = ", ".join(path_of(self.folder, step).name for step in sorted(self.waiting))
        return f"{self.failure}; {self.folder} alone has {names}; compiler-trainer resume copies these"

    def run(self) -> None:
        """Send waiting checkpoints whenever there are some, and retry some time after a failure."""
        tries = 0
        while not self.has_ended or self.waiting and tries < LAST_TRIES:
            self.woken.wait((LAST_RETRY_S if tries else RETRY_S) if self.failure else None)
            self.woken.clear()
            tries += self.has_ended
            self.attempt()

    def attempt(self) -> None:
        """Send all waiting checkpoints; report an error unless the previous attempt failed too."""
        try:
            self.begin()
            while (step := self.newest()) is not None:
                self.send(step)
            self.tidy()
        except Exception as error:  # no error may stop training
            if not self.failure:
                self.tell(f"{error}; training continues, and this is tried again every {RETRY_S:g} s")
            self.failure = str(error)
        else:
            if self.failure:
                self.tell(f"{self.url} answers again, and has all checkpoints")
            self.failure = ""
        finally:
            self.sending = None

    def begin(self) -> None:
        """List the checkpoints of the store, once."""
        if self.store is None:
            store = RemoteCheckpoints(self.url)
            self.losses = {step: store.loss_of(step) if self.cfg.keep_best else None for step in store.steps()}
            self.waiting.difference_update(self.losses)
            self.store = store

    def newest(self) -> int | None:
        """Return the newest waiting checkpoint that is still on disk; give up and report those that are not."""
        while self.waiting:
            self.sending = max(self.waiting)
            path = path_of(self.folder, self.sending)
            if path.is_dir():
                return self.sending
            self.give_up(self.sending, f"{path} was deleted before it was copied to {self.url}")
        return None

    def give_up(self, step: int, reason: str) -> None:
        """Stop waiting for a checkpoint, and report why."""
        self.waiting.discard(step)
        self.tell(reason)

    def send(self, step: int) -> None:
        """Send a checkpoint."""
        assert self.store is not None
        path = path_of(self.folder, step)
        try:
            loss = read_index(path).eval_loss
            self.store.send(path)
        except Damaged as damage:
            self.give_up(step, f"{path} is damaged and not copied to {self.url}: {damage}")
            return
        except Exception:
            if path.is_dir():
                raise
            return  # it was deleted meanwhile, which is reported next
        self.losses[step] = loss
        self.waiting.discard(step)

    def tidy(self) -> None:
        """Delete checkpoints in the store that are not kept, or that were set aside as bad."""
        assert self.store is not None
        on_disk = {number_of(path) for path in complete(self.folder)}
        to_keep = steps_to_keep(list(self.losses.items()), self.cfg) - (bad_steps(self.folder) - on_disk)
        for step in sorted(self.losses.keys() - to_keep):
            self.store.discard(step)
            del self.losses[step]
