"""Sends each finished checkpoint of a folder to a store, beside training; what fails is said once and tried again.

The newest goes first. One that is being sent is not deleted here, one that waits may have to make room, which is said.
The store keeps those that `checkpoint.keep` and its like say, of all that it had when the run began and got since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from compiler_trainer.checkpoint.elsewhere import Elsewhere
from compiler_trainer.checkpoint.index import Damaged, read_index
from compiler_trainer.checkpoint.listing import complete, kept, left, number_of, path_of
from compiler_trainer.config.schema import CheckpointConfig

RETRY_S = 30.0
LAST_TRIES, LAST_RETRY_S = 3, 10.0  # once training has ended


class Sender:
    """Sends what `offer` names and what of the folder the store has not, in a thread of its own, until `end`."""

    def __init__(self, url: str, folder: Path, cfg: CheckpointConfig, tell: Callable[[str], None]):
        self.url, self.folder, self.cfg, self.tell = url, folder, cfg, tell
        self.store: Elsewhere | None = None  # once it has answered
        self.there: dict[int, float | None] = {}  # steps that the store has, and their held-out losses
        self.waiting = {number_of(path) for path in complete(folder)}
        self.sending: int | None = None
        self.failure = ""
        self.has_ended, self.woken = False, threading.Event()
        self.thread = threading.Thread(target=self.run, name="store", daemon=True)
        self.woken.set()
        self.thread.start()

    def offer(self, step: int) -> None:
        """Let the checkpoint of a step be sent."""
        self.waiting.add(step)
        self.woken.set()

    def spared(self) -> set[int]:
        """The step whose checkpoint must not be deleted now."""
        return {self.sending} if self.sending is not None else set()

    def end(self) -> str:
        """Wait until all is sent, or could not be; why not."""
        self.has_ended = True
        self.woken.set()
        self.thread.join()
        if not self.waiting:
            return ""
        alone = ", ".join(path_of(self.folder, step).name for step in sorted(self.waiting))
        return f"{self.failure}; {self.folder} alone has {alone}, which compiler-trainer resume copies"

    def run(self) -> None:
        """Send what waits, whenever there is something, and some time after a failure."""
        tries = 0
        while not self.has_ended or self.waiting and tries < LAST_TRIES:
            self.woken.wait((LAST_RETRY_S if tries else RETRY_S) if self.failure else None)
            self.woken.clear()
            tries += self.has_ended
            self.attempt()

    def attempt(self) -> None:
        """Send all that waits; what goes wrong is said where nothing did before."""
        try:
            self.begin()
            while (step := self.newest()) is not None:
                self.send(step)
            self.tidy()
        except Exception as error:  # whatever it is, training goes on
            if not self.failure:
                self.tell(f"{error}; training goes on, and this is tried again every {RETRY_S:g} s")
            self.failure = str(error)
        else:
            if self.failure:
                self.tell(f"{self.url} answers again, and has all checkpoints")
            self.failure = ""
        finally:
            self.sending = None

    def begin(self) -> None:
        """Learn what the store has, which is done once."""
        if self.store is None:
            store = Elsewhere(self.url)
            self.there = {step: store.loss_of(step) if self.cfg.keep_best else None for step in store.steps()}
            self.waiting.difference_update(self.there)
            self.store = store

    def newest(self) -> int | None:
        """The newest that waits and is still here; the others are given up, which is said."""
        while self.waiting:
            self.sending = max(self.waiting)
            path = path_of(self.folder, self.sending)
            if path.is_dir():
                return self.sending
            self.give_up(self.sending, f"{path} is gone before it was copied to {self.url}")
        return None

    def give_up(self, step: int, why: str) -> None:
        """Let a checkpoint wait no longer."""
        self.waiting.discard(step)
        self.tell(why)

    def send(self, step: int) -> None:
        """Send a checkpoint."""
        assert self.store is not None
        path = path_of(self.folder, step)
        try:
            loss = read_index(path).eval_loss
            self.store.send(path)
        except Damaged as damage:
            self.give_up(step, f"{path} is damaged, and not copied to {self.url}: {damage}")
            return
        except Exception:
            if path.is_dir():
                raise
            return  # it was taken away meanwhile, which is said next
        self.there[step] = loss
        self.waiting.discard(step)

    def tidy(self) -> None:
        """Delete in the store what is not kept, and what was left as bad."""
        assert self.store is not None
        again = {number_of(path) for path in complete(self.folder)}
        stay = kept(list(self.there.items()), self.cfg) - (left(self.folder) - again)
        for step in sorted(self.there.keys() - stay):
            self.store.discard(step)
            del self.there[step]
