"""Checkpoints in an object store: list the complete ones, send one, and bring one back.

    s3://bucket/runs/a/  step_00000400/  rank_00000.safetensors  ...  index.json

A store cannot rename. The index of a checkpoint is written last and deleted first, so a checkpoint without an index is
incomplete, whatever interrupted it. A copied checkpoint gets its name on disk once every byte has been verified.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from compiler_trainer.checkpoint.index import FILE, Damaged, read_index
from compiler_trainer.checkpoint.listing import NAME, bad_steps, complete, number_of, path_of, remove
from compiler_trainer.checkpoint.verify import check
from compiler_trainer.config.errors import UserError
from compiler_trainer.places.store import Entry, Place, Unreachable


class RemoteCheckpoints:
    """Checkpoints in a folder of a store; each method raises Unreachable if the store does not answer."""

    def __init__(self, url: str):
        self.place = Place(url)

    def names(self) -> dict[str, dict[str, Entry]]:
        """Return the files of each checkpoint, by the checkpoint's and the file's name."""
        files: dict[str, dict[str, Entry]] = {}
        for name, entry in self.place.files().items():
            checkpoint, _, file = name.partition("/")
            if NAME.fullmatch(checkpoint):
                files.setdefault(checkpoint, {})[file] = entry
        return files

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        return sorted(number_of(Path(name)) for name, files in self.names().items() if FILE in files)

    def send(self, path: Path) -> None:
        """Copy a checkpoint to the store, over an incomplete or older copy; raise Damaged if it is not a checkpoint."""
        files = read_index(path).files
        self.discard(number_of(path))
        for name in files:
            self.place.put(path / name, f"{path.name}/{name}")
        entries = self.names().get(path.name, {})
        for name, file in files.items():
            if name not in entries or entries[name].size_bytes != file.bytes:
                raise Unreachable(f"{self.place.url}/{path.name}/{name}", f"is not there with its {file.bytes:,} bytes")
        self.place.put(path / FILE, f"{path.name}/{FILE}")

    def bring(self, step: int, folder: Path) -> None:
        """Copy a checkpoint into a folder; raise Damaged, with nothing left behind, if it was changed."""
        path = path_of(folder, step)
        partial_path, files = path.with_suffix(".tmp"), self.names()[path.name]
        size = sum(entry.size_bytes for entry in files.values())
        remove(partial_path)
        partial_path.mkdir(parents=True)
        try:
            if (free := shutil.disk_usage(partial_path).free) < size:
                problem = f"{folder} has {free:,} bytes free, and {self.place.url}/{path.name} takes {size:,}"
                raise UserError("checkpoint.dir", f"{problem}; make room, or choose another folder")
            for name in files:
                self.place.get(f"{path.name}/{name}", partial_path / name)
            check(partial_path)
        except UserError:
            remove(partial_path)
            raise
        os.rename(partial_path, path)

    def discard(self, step: int) -> None:
        """Delete a checkpoint, its index first."""
        name = path_of(Path(), step).name
        for file in sorted(self.names().get(name, {}), key=lambda file: file != FILE):
            self.place.remove(f"{name}/{file}")

    def loss_of(self, step: int) -> float | None:
        """Return the validation loss of a complete checkpoint; None if it was not evaluated or its index is damaged."""
        with tempfile.TemporaryDirectory() as scratch:
            self.place.get(f"{path_of(Path(), step).name}/{FILE}", Path(scratch, FILE))
            try:
                return read_index(Path(scratch)).eval_loss
            except Damaged:
                return None

    def is_same(self, path: Path) -> bool:
        """Return True if the store has exactly this checkpoint."""
        return self.place.read(f"{path.name}/{FILE}") == (path / FILE).read_bytes()


def bring_newest(url: str, folder: Path, tell: Callable[[str], None]) -> None:
    """Copy the newest complete checkpoint of a store into a folder, unless that has one as new; report damaged ones.

    Checkpoints that a run in that folder set aside as bad are skipped.
    """
    store = RemoteCheckpoints(url)
    newest_here, bad_here = max(map(number_of, complete(folder)), default=-1), bad_steps(folder)
    for step in sorted((step for step in store.steps() if step > newest_here and step not in bad_here), reverse=True):
        try:
            store.bring(step, folder)
            tell(f"{path_of(folder, step)} was copied from {url}")
            return
        except Damaged as damage:
            tell(f"{url}/{path_of(folder, step).name} is damaged and passed over: {damage}")
