"""Tokenize pieces of a corpus, each into its own shard; as a process, it reads pieces from its input, one per line.

This module does not import torch, so that a process starts in half a second and takes 70 MB.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol

import numpy as np

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig, SourceConfig
from compiler_trainer.data import formats
from compiler_trainer.data.chat import Chats, ChatTemplate
from compiler_trainer.data.corpus import Encoded, Part, Shard
from compiler_trainer.data.pictures import ImageOptions, files_of, image_options, restore_options
from compiler_trainer.data.readers import READERS, ReadOptions, Span
from compiler_trainer.data.records import BadRecord, Conversation, Document, Fields, Ids, Pair, Record, Texts
from compiler_trainer.data.tokenizers import PART_BYTES, Tokenizer, parts, restore, tokenizer_of
from compiler_trainer.places.cache import Cache, cache_of, writable

DOCUMENTS_AT_ONCE = 1000
IDS_AT_ONCE = 2**17


class Recipe(NamedTuple):
    """The parameters of tokenization.

    Records are conversations with `chat`, otherwise texts in `column`. With `pairs`, a record is two conversations, one
    document each. With `last_only`, only the last answer of a conversation is labels. With `skip_bad`, bad records are
    skipped. `records`, `labels` and `margins` are those of DataConfig. With `images`, conversations have images, which
    the processor next to the tokenizer reads. With `in_place`, remote files are not copied.
    """

    tokenizer: Tokenizer
    column: str
    separator: str | None
    chat: bool
    skip_bad: bool
    cache: Cache  # for copies of remote files
    pairs: bool = False
    last_only: bool = False
    records: str = "documents"
    labels: tuple[str, ...] = ()
    margins: bool = False
    images: ImageOptions | None = None
    in_place: bool = False

    @property
    def decides(self) -> tuple[Any, ...]:
        """Everything that tokens depend on, apart from the tokenizer's vocabulary and rules."""
        settings = self.tokenizer.settings
        templates = [settings.special_tokens, settings.templates, formats.VERSION] if self.chat else None
        surroundings = [settings.opening, self.ending, settings.end_of_document]
        kinds: list[Any] = ["pairs"] * self.pairs + ["last_only"] * self.last_only + ["margins"] * self.margins
        kinds += [] if self.records == "documents" else [self.records, *self.labels]
        kinds += [self.images.decides] if self.images else []
        return self.column, self.separator, templates, surroundings, self.skip_bad, *kinds

    @property
    def ending(self) -> tuple[int, ...]:
        """The ids after a text, without the one that closes its document anyway; of texts that are pooled, all of them.

        What transformers pools may be the token that closes a document, which itself is not pooled.
        """
        ending, is_pooled = self.tokenizer.settings.ending, self.records != "documents" and not self.chat
        closes = list(ending[-1:]) == [self.tokenizer.end_of_document]
        return ending[:-1] if closes and not is_pooled else ending

    def fields(self, template: ChatTemplate | None) -> Fields:
        """Return the fields of a record that make up its document."""
        kind: Any = "pair" if self.pairs else "conversation" if self.chat else "text"
        kind = kind if self.records == "documents" else self.records
        names = template.names if template else frozenset[str]()
        further = tuple(self.labels), self.margins, self.images is not None
        return Fields(kind, self.column, names, self.last_only, *further)

    def to_json(self) -> list[Any]:
        """Return JSON from which `restore_recipe` makes the recipe in another process."""
        return [self.tokenizer.to_json(), *self[1:]]


def restore_recipe(values: list[Any]) -> Recipe:
    """Return a recipe from its JSON."""
    recipe = Recipe(*values)
    folder, limit = recipe.cache
    images = restore_options(recipe.images)
    return recipe._replace(tokenizer=restore(values[0]), cache=Cache(Path(folder), limit), images=images)


def make_recipe(cfg: DataConfig, source: SourceConfig, tokenizer: Tokenizer | None = None) -> Recipe:
    """Return the recipe of a source; raise UserError if `cfg` needs a chat template and there is none."""
    tokenizer = tokenizer or tokenizer_of(cfg)
    if cfg.chat:
        ChatTemplate(tokenizer)
    skip_bad, cache = cfg.bad_records == "skip", cache_of(cfg)
    separator, last_only, images = source.document_separator, cfg.train_on == "last", image_options(cfg, tokenizer)
    kind = cfg.chat, skip_bad, cache, cfg.pairs, last_only, cfg.records, cfg.labels, cfg.margins, images
    return Recipe(tokenizer, source.text_column, separator, *kind)


class RecordCounts(Protocol):
    """An object that counts bad records and collects notes; `where()` names the record."""

    def skip(self, where: Callable[[], str], reason: str) -> None: ...

    def note(self, where: Callable[[], str], notes: Iterable[str]) -> None: ...


class Worker:
    """A tokenizer of pieces by a recipe, into shards in a folder."""

    def __init__(self, recipe: Recipe, folder: Path):
        self.recipe, self.folder, self.tokenizer = recipe, folder, recipe.tokenizer

    @cached_property
    def chats(self) -> Chats | None:
        """The writer of conversations."""
        return Chats(ChatTemplate(self.tokenizer), self.tokenizer) if self.recipe.chat else None

    def tokenize(self, number: int, spans: Iterable[Span]) -> None:
        """Make the shard of piece `number`; raise UserError at a bad record that is not to be skipped."""
        with Shard(self.folder, number, self.tokenizer, self.recipe.images is not None) as shard:
            for batch in batches(self.read(spans, shard)):
                shard.add(batch, self.encode(batch))

    def read(self, spans: Iterable[Span], shard: Shard) -> Iterator[Part]:
        """Yield the contents of spans in parts that a tokenizer can take; the shard counts bad records and notes."""
        for span in spans:
            for record in self.records(span):
                yield from self.parts(record, shard)

    def records(self, span: Span, fields: Fields | None = None) -> Iterator[Record]:
        """Yield the records of a span; `fields` are those of the recipe by default."""
        fields = fields or self.recipe.fields(self.chats.template if self.chats else None)
        fields = fields._replace(base=os.path.dirname(span.path))
        recipe = self.recipe
        options = ReadOptions(fields, recipe.separator, self.tokenizer, recipe.cache, recipe.in_place)
        return READERS[span.reader](span, options)

    def parts(self, record: Record, counts: RecordCounts) -> list[Part]:
        """Return the contents of a record, none of a bad one; `counts` gets bad records and notes."""
        notes: list[str] = []
        try:
            document = record.read()
            parts_read = self.prepare(document, notes)
        except BadRecord as error:
            if not self.recipe.skip_bad:
                raise UserError(record.where(), str(error)) from error
            counts.skip(record.where, str(error))
            return []
        counts.note(record.where, [*document.notes, *notes])
        return parts_read

    def prepare(self, document: Document, notes: list[str]) -> list[Part]:
        """Return a text in parts of bounded length, or the tokens of a conversation's samples."""
        content, begins, ends = document[:3]
        if isinstance(content, np.ndarray):
            return self.id_parts(content)
        if isinstance(content, Pair):
            made = [part for chat in content for part in self.conversation_parts(chat, notes, 1)]
            return [part._replace(value=document.value) for part in made]
        if isinstance(content, Conversation):
            limit = 1 if self.recipe.records == "answers" else None
            return [p._replace(value=document.value) for p in self.conversation_parts(content, notes, limit)]
        if isinstance(content, Texts):
            return [self.whole(text) for text in content.texts]
        assert isinstance(content, str)
        if self.recipe.records == "classes":
            return [self.whole(content, document.value)]
        texts = list(parts(content, self.tokenizer.encode))
        last = len(texts) - 1
        return [Part(text, begins and not i, ends and i == last) for i, text in enumerate(texts)]

    def whole(self, text: str, value: float | None = None) -> Part:
        """Return a text with labels at all its tokens; one with a value has a label only at its last token.

        A label is the next token, so the closing token is always one.
        """
        ids = self.add_surrounding(Part(text, True, True), self.tokenizer.encode([text])[0])
        if not len(ids):
            raise BadRecord("has no token")
        counted = np.full(len(ids) + 1, value is None)
        counted[-1] = True
        return Part((ids, counted), True, True, value=value)

    def conversation_parts(self, chat: Conversation, notes: list[str], limit: int | None = None) -> list[Part]:
        """Return the samples of a conversation; raise BadRecord if there are more than `limit`."""
        assert self.chats
        contents: list[bytes] = []
        if self.recipe.images:
            chat, contents = self.recipe.images.read(chat)
        written = self.chats.write(chat)
        notes += written.notes
        if limit is not None and len(written.samples) > limit:
            problem = "has several answers after the first difference, but the chat template rewrites earlier ones"
            raise BadRecord(f"{problem}: give each conversation only its last answer, with the others in its prompt")
        return [
            Part(
                (t.ids, t.counted),
                True,
                True,
                i > 0,
                images=tuple(contents[: len(t.images)]),
                image_tokens=t.images,
                image_files=() if i else files_of(chat.images),
            )
            for i, t in enumerate(written.tokens)
        ]

    def id_parts(self, ids: Ids) -> list[Part]:
        """Return a document of ids in parts, without its closing id, which the shard adds."""
        if self.recipe.chat:
            raise BadRecord("holds token ids, not a conversation; set data.chat=false")
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.tokenizer.vocab_size:
            invalid_id = ids.min() if ids.min() < 0 else ids.max()
            raise BadRecord(
                f"has id {invalid_id:,}; the tokenizer has {self.tokenizer.vocab_size:,}; set data.tokenizer to theirs"
            )
        if len(ids) and ids[-1] == self.tokenizer.end_of_document:
            ids = ids[:-1]
        starts = range(0, len(ids) or 1, IDS_AT_ONCE)
        return [Part((ids[at : at + IDS_AT_ONCE], None), at == 0, at == starts[-1]) for at in starts]

    def encode(self, batch: list[Part]) -> list[Encoded]:
        """Return the ids and labels of each part; texts also get the tokenizer's opening and ending ids."""
        texts = [part.content for part in batch if isinstance(part.content, str)]
        ids = iter(self.tokenizer.encode(texts))
        return [
            (self.add_surrounding(part, next(ids)), None) if isinstance(part.content, str) else part.content
            for part in batch
        ]

    def add_surrounding(self, part: Part, ids: Ids) -> Ids:
        """Return a text's ids with the opening ids if it begins here, and the ending ids if it ends here."""
        opening, ending = self.tokenizer.settings.opening, self.recipe.ending
        if not (opening or ending) or not len(ids):
            return ids
        return np.concatenate((opening if part.begins else (), ids, ending if part.ends else ())).astype(ids.dtype)


def batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield parts in batches whose texts have about 128 KiB."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += part.size
        if size >= PART_BYTES or len(batch) == DOCUMENTS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def main() -> None:
    """Tokenize the pieces that come in as lines of JSON; answer each with a line: null, or the error."""

    def tokenizing(recipe: Recipe, folder: str) -> Callable[[int, list[Any]], None]:
        worker = Worker(recipe, Path(folder))

        def tokenize(number: int, spans: list[Any]) -> None:
            with writable("data.cache", worker.folder):
                worker.tokenize(number, [Span(*span) for span in spans])

        return tokenize

    serve(tokenizing)


def serve(begin: Callable[..., Callable[..., Any]]) -> None:
    """Answer lines of JSON, each a list of arguments, with a line: [result, null], or [null, error].

    The first line has the file of a recipe and further arguments, from which `begin` makes the function to call.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of libraries away from the answers
    lines: SimpleQueue[str] = SimpleQueue()
    Thread(target=receive, args=(lines,), daemon=True).start()
    recipe, *arguments = json.loads(lines.get())
    call = begin(restore_recipe(json.loads(Path(recipe).read_text(encoding="utf-8"))), *arguments)
    while True:
        values = json.loads(lines.get())
        result, problem = None, None
        try:
            result = call(*values)
        except UserError as error:
            problem = [error.place, error.message]
        print(json.dumps([result, problem]), file=answers, flush=True)


def receive(lines: SimpleQueue[str]) -> None:
    """Queue the incoming lines; end the process immediately when its input is closed."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
