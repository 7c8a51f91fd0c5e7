"""The tokens of a source on disk, in volumes of 64 GiB of text, each made from pieces by several processes.

    <volume>/  tokens.bin  offsets.bin  counted.bin  continues.bin  values.bin  kept.json

A volume's name depends on each file's path, size and time of change, on the tokenizer and on the options. It is made in
its final place, piece by piece, and complete pieces survive an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import NamedTuple

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.corpus import IMAGE_ARRAYS, IMAGE_FILES, Summary, add_summaries, join, read_summary
from compiler_trainer.data.pictures import ImageFile
from compiler_trainer.data.readers import Span
from compiler_trainer.data.sources import Source, has_changed
from compiler_trainer.data.worker import Recipe
from compiler_trainer.data.workers import Bar, tokenize
from compiler_trainer.places.cache import Cache, folder_name, get_or_make, writable
from compiler_trainer.places.folders import StoredFolder, hold_lock, load_folder, lock_of, make_folder, partial_path_of

FORMAT = 5  # version of the stored files and of their keys


class Share(NamedTuple):
    """A share of the pieces: every `of`-th piece from number `number` on, made by `processes` processes."""

    number: int = 0
    of: int = 1
    processes: int | None = None  # None: one per core

    @property
    def is_one(self) -> bool:
        """True if there is such a share."""
        return self.number < self.of


ALL = Share()


class Tokens(NamedTuple):
    """The tokens of a source: their folder and volumes."""

    where: Path
    volumes: list[StoredFolder]

    @property
    def holds(self) -> Summary:
        """The statistics of all volumes together."""
        return reduce(add_summaries, map(summary, self.volumes))

    @property
    def size_bytes(self) -> int:
        """The size on disk."""
        return sum(volume.size_bytes for volume in self.volumes)


def summary(volume: StoredFolder) -> Summary:
    """Return the statistics of a volume."""
    return Summary(*volume.holds)


def load_tokens(source: Source, recipe: Recipe, digest: str, cache: Cache) -> Tokens:
    """Return the tokens of a source, which are made if the cache lacks them; `digest` is the tokenizer's.

    Raises UserError.
    """
    volumes = [
        get_or_make(cache, key_of(volume, recipe, digest), partial(tokenize_volume, source=volume, recipe=recipe))
        for volume in source.volumes()
    ]
    if recipe.images:
        for volume in volumes:
            check_images(volume)
    return Tokens(volumes[0].folder if len(volumes) == 1 else cache.folder, volumes)


def check_images(volume: StoredFolder) -> None:
    """Raise UserError if an image's file has changed since its content was stored; a volume is named by its records."""
    with open(volume.folder / IMAGE_ARRAYS[IMAGE_FILES], encoding="utf-8") as lines:
        for stored in (ImageFile(*json.loads(line)) for line in lines):
            if ImageFile.now(stored.path) != stored:
                problem = "has changed, or is gone, since it was stored with the tokens of its records"
                raise UserError(f"image {stored.path}", f"{problem}; remove {volume.folder} to read all images again")


def make_share(source: Source, recipe: Recipe, digest: str, out: Path, share: Share) -> Tokens | None:
    """Make a share of a source's tokens in the folder `out`.

    Return all tokens, or None while other shares are missing.
    """
    with writable("--out", out):
        for volume, folder in zip(source.volumes(), folders_of(source, recipe, digest, out)):
            if load_folder(folder) is None:
                make_share_of_volume(volume, recipe, folder, share)
    volumes = [load_folder(folder) for folder in folders_of(source, recipe, digest, out)]
    return Tokens(out, [volume for volume in volumes if volume]) if all(volumes) else None


def folders_of(source: Source, recipe: Recipe, digest: str, out: Path) -> list[Path]:
    """Return the folders of a source's volumes."""
    return [out / folder_name(key_of(volume, recipe, digest)) for volume in source.volumes()]


def make_share_of_volume(source: Source, recipe: Recipe, folder: Path, share: Share) -> None:
    """Make a share of a volume's pieces, and join all pieces if they are complete."""
    unfinished = partial_path_of(folder)
    if share.of > 1:
        with hold_lock(lock_of(folder), shared=True), hold_lock(unfinished / f"lock-{share.number}-of-{share.of}"):
            if load_folder(folder) is None:
                make_pieces(unfinished, source, recipe, share)
    if share.of == 1 or is_complete(unfinished, source):
        all_pieces = share._replace(number=0, of=1)
        make_folder(folder, partial(tokenize_volume, source=source, recipe=recipe, share=all_pieces))


def is_complete(folder: Path, source: Source) -> bool:
    """Return True if all pieces of a volume are complete."""
    return all(read_summary(folder, number) is not None for number in range(len(source.pieces())))


def key_of(source: Source, recipe: Recipe, digest: str) -> list[object]:
    """Return everything that the tokens of a source depend on."""
    return [FORMAT, digest, recipe.decides, source.files, source.spans]


def tokenize_volume(folder: Path, source: Source, recipe: Recipe, share: Share = ALL) -> Summary:
    """Make the missing parts of a volume in a folder; raise UserError if it has no tokens at all."""
    make_pieces(folder, source, recipe, share)
    holds = join(folder, len(source.pieces()), recipe.images is not None)
    if not holds.tokens:
        skipped = f", {holds.skipped} bad records skipped" if holds.skipped else ""
        raise UserError(source.where, f"the corpus is empty: {holds.documents} documents, none with a token{skipped}")
    return holds


def make_pieces(folder: Path, source: Source, recipe: Recipe, share: Share) -> None:
    """Make the missing pieces of a share in a folder."""
    pieces = {n: spans for n, spans in enumerate(source.pieces()) if n % share.of == share.number}
    missing = {number: spans for number, spans in pieces.items() if read_summary(folder, number) is None}
    if len(missing) < len(pieces):
        print(f"resuming in {folder}: {len(pieces) - len(missing)} of {len(pieces)} pieces are done", flush=True)
    size = size_of(pieces.values())
    with Bar(size, size - size_of(missing.values())) as bar:
        tokenize(recipe, folder, missing, lambda spans: bar.add(size_of([spans])), share.processes)
    for file in source.files:
        if has_changed(file):
            raise UserError(file.path, "changed while it was being read; start again")


def size_of(pieces: Iterable[Sequence[Span]]) -> int:
    """Return the bytes to read of some pieces."""
    return sum(span.size_bytes for spans in pieces for span in spans)
