"""Show a record as the model sees it: its tokens, its labels, and transformers' own text for comparison."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data.corpus import Part
from compiler_trainer.data.pictures import with_image_texts
from compiler_trainer.data.records import BadRecord, Conversation, Document, Fields, Pair, Record, Texts
from compiler_trainer.data.sources import source_of, stream_of
from compiler_trainer.data.tokenizers import Tokenizer, load_by_transformers, tokenizer_of
from compiler_trainer.data.worker import Worker, make_recipe
from compiler_trainer.places.cache import cache_of

KINDS: tuple[dict[str, Any], ...] = ({"chat": True, "pairs": True}, {"chat": True}, {"chat": False})  # records


class Shown(NamedTuple):
    """A document: its tokens with the closing one, its labels, and for chats the text of transformers."""

    tokens: list[int]
    labels: list[bool]
    theirs: str | None = None  # apply_chat_template's text; None for plain texts
    is_same: bool = True  # True if text and ids equal those of transformers
    end: str = "closes the document"  # the meaning of the last token


@dataclass
class Counts:
    """Counts over some records; `notes` and `first_bad` have the first record that each applies to."""

    records: int = 0
    samples: int = 0
    labels: int = 0
    lengths: list[int] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    bad: Counter[str] = field(default_factory=Counter)
    first_bad: dict[str, str] = field(default_factory=dict)

    def skip(self, where: Callable[[], str], reason: str) -> None:
        """Count a bad record."""
        self.bad[reason] += 1
        self.first_bad.setdefault(reason, where())

    def note(self, where: Callable[[], str], notes: Iterable[str]) -> None:
        """Add notes about a record, unless an earlier record had them."""
        for note in notes:
            if note not in self.notes:
                self.notes[note] = where()

    def lines(self) -> Iterator[str]:
        """Yield the counts as text."""
        bad = sum(self.bad.values())
        yield f"{self.records:,} records read: {self.samples:,} samples" + (f", {bad:,} bad records" if bad else "")
        if self.lengths:
            shortest, middle, longest = (int(n) for n in np.quantile(self.lengths, (0, 0.5, 1), method="nearest"))
            share = self.labels / sum(self.lengths)
            half = f"half of them have at most {middle:,}"
            yield f"tokens of a sample: {shortest:,} to {longest:,}, {half}; {share:.1%} are labels"
        yield from (f"note: {note} (first: {place})" for note, place in self.notes.items())
        yield from (
            f"bad: {problem} (first: {self.first_bad[problem]}; {count:,} in all)"
            for problem, count in self.bad.items()
        )


class Reader:
    """A reader of the records of a config's only source; its kind is that of the first record unless `kinds` fix it."""

    def __init__(self, cfg: DataConfig, kinds: Sequence[dict[str, Any]]):
        self.cfg, self.tokenizer, cache = cfg, tokenizer_of(cfg), cache_of(cfg)
        self.source = (stream_of if cfg.stream else source_of)(cfg, cfg.seed, cache)
        self.worker = self.worker_of(chat=False, pairs=False)
        self.chat, self.pairs = (cfg.chat, cfg.pairs) if cfg.records != "documents" else self.kind(kinds)
        self.worker = self.worker_of(chat=self.chat, pairs=self.pairs)

    def worker_of(self, chat: bool, pairs: bool) -> Worker:
        """Return a worker for records of a kind, which skips bad ones."""
        cfg = dataclasses.replace(self.cfg, chat=chat, pairs=pairs, bad_records="skip")
        recipe = make_recipe(cfg, cfg, self.tokenizer)
        return Worker(recipe._replace(in_place=cfg.stream), recipe.cache.folder)

    def kind(self, kinds: Sequence[dict[str, Any]]) -> tuple[bool, bool]:
        """Return (is chat, is pairs) of the first record; raise UserError if it is of no kind."""
        refusals: list[UserError] = []
        for kind in kinds:
            chat, pairs = kind["chat"], kind.get("pairs", False)
            fields = Fields("pair" if pairs else "conversation" if chat else "text", self.cfg.text_column)
            try:
                for record in itertools.islice(self.records(fields), 1):
                    record.read()
                return chat, pairs
            except BadRecord as error:
                refusals.append(UserError(record.where(), str(error)))
            except UserError as error:
                refusals.append(error)
        raise refusals[min(1, len(refusals) - 1)]  # of several kinds, the refusal as a conversation

    def records(self, fields: Fields | None = None) -> Iterator[Record]:
        """Yield all records."""
        for span in self.source.spans:
            yield from self.worker.records(span, fields)

    def documents(self, document: Document, notes: list[str]) -> list[Shown]:
        """Return the documents of a record, each complete."""
        notes += document.notes
        parts = self.worker.prepare(document, notes)
        encoded = self.worker.encode(parts)
        content = document.content
        if isinstance(content, Texts):
            return [self.plain(text, list(map(int, ids))) for text, (ids, _) in zip(content.texts, encoded)]
        if not isinstance(content, Conversation | Pair):
            ids = [int(i) for part, _ in encoded for i in part]
            shown_text = self.plain(content, ids)
            return [shown_text if document.value is None else self.with_class(shown_text, int(document.value))]
        end, shown = self.tokenizer.end_of_document, []
        for sample, counted in encoded:
            assert counted is not None
            shown.append(Shown([*map(int, sample), end], [bool(c) for c in counted]))
        return [
            self.compare_with_transformers(document, text, chat)
            for document, (text, chat) in zip(shown, self.theirs(content))
        ]

    def with_class(self, shown: Shown, number: int) -> Shown:
        """Return a text whose only label is its class, in place of the closing token."""
        labels = [False] * (len(shown.tokens) - 1) + [True]
        return shown._replace(labels=labels, end=f"class {number}, {self.cfg.labels[number]}")

    def plain(self, content: Any, ids: list[int]) -> Shown:
        """Return a plain text, compared with the ids of transformers' tokenizer."""
        tokens, is_same = [*ids, self.tokenizer.end_of_document], True
        if isinstance(content, str) and self.reference_tokenizer is not None and self.cfg.add_bos_token is None:
            theirs = list(self.reference_tokenizer(content)["input_ids"])
            is_same = theirs in (ids, tokens)
        return Shown(tokens, [False, *[True] * (len(tokens) - 1)], None, is_same)

    @property
    def reference_tokenizer(self) -> Any:
        """The tokenizer as transformers loads it; None for one that does not come from a folder."""
        return load_by_transformers(self.tokenizer.path) if self.tokenizer.settings.special_tokens else None

    def theirs(self, content: Conversation | Pair) -> Iterator[tuple[int, Conversation]]:
        """Yield, for each sample, its number of messages and its conversation."""
        assert self.worker.chats
        images = self.worker.recipe.images
        for chat in content if isinstance(content, Pair) else [images.read(content)[0] if images else content]:
            for sample in self.worker.chats.samples(chat, []):
                yield sample.upto, chat

    def compare_with_transformers(self, shown: Shown, upto: int, chat: Conversation) -> Shown:
        """Add the text of apply_chat_template for the same messages to a sample."""
        names = dict(chat.names)
        variables = {"tools": names.pop("tools", None), "documents": names.pop("documents", None), **names}
        reference_tokenizer = self.reference_tokenizer
        text = reference_tokenizer.apply_chat_template(chat.messages[:upto], tokenize=False, **variables)
        if chat.image_token:
            text, _ = with_image_texts(chat, upto, text, [])
            ids = list(reference_tokenizer(text, add_special_tokens=False)["input_ids"])
            return shown._replace(theirs=text, is_same=ids in (shown.tokens, shown.tokens[:-1]))
        ids = list(
            reference_tokenizer.apply_chat_template(chat.messages[:upto], return_dict=True, **variables)["input_ids"]
        )
        return shown._replace(theirs=text, is_same=ids in (shown.tokens, shown.tokens[:-1]))

    def scan(self, limit: int) -> Counts:
        """Return counts over the first `most` records."""
        counts = Counts()
        for record in itertools.islice(self.records(), limit):
            counts.records += 1
            self.count(self.worker.parts(record, counts), counts)
        return counts

    def count(self, parts: list[Part], counts: Counts) -> None:
        """Add the samples of a record."""
        length = 0
        for part, (ids, counted) in zip(parts, self.worker.encode(parts)):
            length += len(ids)
            counts.labels += len(ids) if counted is None else int(counted.sum())
            if part.ends:
                counts.lengths.append(length + 1)
                counts.samples, length = counts.samples + 1, 0


def table(shown: Shown, tokenizer: Tokenizer, limit: int) -> Iterator[str]:
    """Yield a line for each token: number, id, text, and a mark if it is a label."""
    for number, (token, is_label) in enumerate(zip(shown.tokens[:limit], shown.labels)):
        closing = f"   {shown.end}" if number == len(shown.tokens) - 1 else ""
        yield f"{number:6} {token:8} {'label' if is_label else '':5}  {tokenizer.name_of(token)!r}{closing}"
    if len(shown.tokens) > limit:
        yield f"       {len(shown.tokens) - limit:,} tokens more"
