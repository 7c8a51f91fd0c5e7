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

import numpy as np

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig, SourceConfig
from compiler_trainer.data import chat
from compiler_trainer.data.cutting import PART_BYTES, parts
from compiler_trainer.data.readers import READERS, Asked, Span
from compiler_trainer.data.records import (
    CONVERSATION,
    PAIR,
    BadRecord,
    Columns,
    Document,
    Ids,
    Message,
    Pair,
)
from compiler_trainer.data.shard import Encoded, Shard
from compiler_trainer.data.tokenizers import Tokenizer, build_tokenizer, tokenizer_here
from compiler_trainer.places.cache import Cache, cache_of

DOCUMENTS_AT_ONCE = 1000
IDS_AT_ONCE = 2**17


class Recipe(NamedTuple):
    """How records become tokens: conversations by a `template`, else the texts in `column`; bad ones skipped or not.

    With `pairs`, a record is two conversations, a document each.
    """

    tokenizer: str
    column: str
    separator: str | None
    template: chat.Template | None
    skip_bad: bool
    cache: Cache  # of copies
    pairs: bool = False

    @property
    def decides(self) -> tuple[Any, ...]:
        """What tokens depend on, beside the tokenizer."""
        return self.column, self.separator, self.template, self.skip_bad, *(["pairs"] if self.pairs else [])

    @property
    def columns(self) -> Columns:
        """What of a record makes its document."""
        return PAIR if self.pairs else CONVERSATION if self.template else self.column


def recipe_for(cfg: DataConfig, source: SourceConfig) -> Recipe:
    """How the records of a source become tokens."""
    tokenizer = tokenizer_here(cfg)
    template = chat.template_beside(tokenizer) if cfg.chat else None
    skip_bad, cache = cfg.bad_records == "skip", cache_of(cfg)
    return Recipe(tokenizer, source.text_column, source.document_separator, template, skip_bad, cache, cfg.pairs)


class Part(NamedTuple):
    """A document or part of one: a text, or ids and which of them count as labels."""

    content: str | Encoded
    begins: bool
    ends: bool

    @property
    def size(self) -> int:
        """How many characters or ids it has."""
        return len(self.content if isinstance(self.content, str) else self.content[0])


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
        asked = Asked(self.recipe.columns, self.recipe.separator, self.tokenizer, self.recipe.cache)
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
        if isinstance(content, np.ndarray):
            return self.given(content)
        if isinstance(content, Pair):
            return [Part(self.said(messages, content.shared), True, True) for messages in content[:2]]
        if isinstance(content, list):
            return [Part(self.said(content), begins, ends)]
        found = list(parts(content, self.tokenizer.encode))
        last = len(found) - 1
        return [Part(text, begins and not i, ends and i == last) for i, text in enumerate(found)]

    def said(self, messages: list[Message], after: int = 0) -> Encoded:
        """A conversation, and which of its ids the assistant says after so many messages."""
        assert self.recipe.template
        return chat.encode(messages, self.recipe.template, self.tokenizer, after)

    def given(self, ids: Ids) -> list[Part]:
        """A document of ids in parts; what ends it is left out, for a shard adds it."""
        if self.recipe.template:
            raise BadRecord("holds token ids, and no conversation; set data.chat=false")
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.tokenizer.vocab_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise BadRecord(f"holds id {wrong:,}, and the tokenizer has {self.tokenizer.vocab_size:,}; name its own")
        if len(ids) and ids[-1] == self.tokenizer.end_of_document:
            ids = ids[:-1]
        starts = range(0, len(ids) or 1, IDS_AT_ONCE)
        return [Part((ids[at : at + IDS_AT_ONCE], None), at == 0, at == starts[-1]) for at in starts]

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
        size += part.size
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
    folder, most = recipe.cache
    return recipe._replace(
        template=recipe.template and chat.Template(*recipe.template), cache=Cache(Path(folder), most)
    )


if __name__ == "__main__":
    main()
