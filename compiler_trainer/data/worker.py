"""Tokenizes pieces of a corpus, each into a shard of its own; as a process it takes them from its input, one a line.

It imports no torch: a process starts in half a second and takes 70 MB.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from compiler_trainer.config.errors import UserError
from compiler_trainer.data import chat
from compiler_trainer.data.cutting import PART_BYTES, parts
from compiler_trainer.data.readers import READERS, Asked, Span
from compiler_trainer.data.records import BadRecord, Document
from compiler_trainer.data.shard import Encoded, Shard
from compiler_trainer.data.tokenizers import Tokenizer, build_tokenizer

DOCUMENTS_AT_ONCE = 1000


class Recipe(NamedTuple):
    """How records become tokens: conversations by a `template`, else the texts in `column`; bad ones skipped or not."""

    tokenizer: str
    column: str
    separator: str | None
    template: chat.Template | None
    skip_bad: bool


class Part(NamedTuple):
    """A document or part of one: a text, or ids and which of them count as labels."""

    content: str | Encoded
    begins: bool
    ends: bool


class Worker:
    """Tokenizes by a recipe, into shards in a folder."""

    def __init__(self, recipe: Recipe, folder: Path):
        self.recipe, self.folder = recipe, folder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What the recipe names."""
        return build_tokenizer(self.recipe.tokenizer)

    def tokenize(self, number: int, spans: Iterable[Span]) -> None:
        """Make the shard of piece `number`; raises UserError where it holds a bad record that is not to be skipped."""
        with Shard(self.folder, number, self.tokenizer) as shard:
            for batch in batches(self.read(spans, shard)):
                shard.add(batch, self.encode(batch))

    def read(self, spans: Iterable[Span], shard: Shard) -> Iterator[Part]:
        """What the spans hold, in parts that a tokenizer takes; the shard counts what is skipped."""
        column = None if self.recipe.template else self.recipe.column
        asked = Asked(column, self.recipe.separator, self.tokenizer.encode)
        for span in spans:
            for record in READERS[span.reader](span, asked):
                try:
                    found = self.prepared(record.read())
                except BadRecord as error:
                    if not self.recipe.skip_bad:
                        raise UserError(record.where(), str(error)) from error
                    shard.skip(record.where, str(error))
                else:
                    yield from found

    def prepared(self, document: Document) -> list[Part]:
        """A text in parts of bounded length; the tokens of a conversation."""
        content, begins, ends = document
        if isinstance(content, list):
            assert self.recipe.template
            return [Part(chat.encode(content, self.recipe.template, self.tokenizer), begins, ends)]
        found = list(parts(content, self.tokenizer.encode))
        last = len(found) - 1
        return [Part(text, begins and not i, ends and i == last) for i, text in enumerate(found)]

    def encode(self, batch: list[Part]) -> list[Encoded]:
        """Ids of each part and which of them count."""
        texts = [part.content for part in batch if isinstance(part.content, str)]
        ids = iter(self.tokenizer.encode(texts))
        return [(next(ids), None) if isinstance(part.content, str) else part.content for part in batch]


def batches(found: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts in batches whose texts have about 128 KiB."""
    batch: list[Part] = []
    size = 0
    for part in found:
        batch.append(part)
        size += len(part.content)
        if size >= PART_BYTES or len(batch) == DOCUMENTS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def main() -> None:
    """Tokenize the pieces that come in, a line of JSON each, and answer each with a line: null, or what is bad."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    lines: SimpleQueue[str] = SimpleQueue()
    Thread(target=receive, args=(lines,), daemon=True).start()
    recipe, folder = json.loads(lines.get())
    worker = Worker(recipe_of(recipe), Path(folder))
    while True:
        number, spans = json.loads(lines.get())
        try:
            worker.tokenize(number, [Span(*span) for span in spans])
            answer = None
        except UserError as error:
            answer = [error.where, error.message]
        except OSError as error:
            answer = ["data.cache", f"{folder}: {error.strerror or error}"]
        print(json.dumps(answer), file=answers, flush=True)


def receive(lines: SimpleQueue[str]) -> None:
    """Take in what the process is asked; it ends at once, whatever it is at, when nobody can ask it any more."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def recipe_of(fields: list[Any]) -> Recipe:
    """A recipe that has been through JSON."""
    recipe = Recipe(*fields)
    return recipe._replace(template=recipe.template and chat.Template(*recipe.template))


if __name__ == "__main__":
    main()
