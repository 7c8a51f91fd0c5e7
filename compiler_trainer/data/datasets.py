"""Datasets for training and validation: tokens of every source, packed, mixed and batched.

A user's dataset is any object with a length that returns an item, one row, by number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, DataConfig, SourceConfig
from compiler_trainer.config.targets import called
from compiler_trainer.config.targets import name_of as target_of
from compiler_trainer.data import tokenized
from compiler_trainer.data.corpus import Ids, hash_arrays, map_volume
from compiler_trainer.data.image_rows import ImageRows, image_tokens_of_row
from compiler_trainer.data.loader import JoinedRows, Loader, Mixture
from compiler_trainer.data.packing import (
    RECORDS,
    ClassRows,
    Facts,
    LayoutSpec,
    PairRows,
    Rows,
    layout_rows,
    of_records,
)
from compiler_trainer.data.pictures import image_options
from compiler_trainer.data.prompts import Rollouts, read_prompts
from compiler_trainer.data.sources import source_of
from compiler_trainer.data.stored import Tokens, load_tokens
from compiler_trainer.data.stream import StreamLoader, StreamRows
from compiler_trainer.data.tokenizers import Tokenizer, tokenizer_of
from compiler_trainer.data.worker import make_recipe
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.places.cache import Cache, cache_of

FAR_LARGER = 4  # ratio of vocabularies from which on the model was made for another tokenizer


@dataclass(frozen=True)
class Part:
    """One source: its tokens on disk, if it has some, and its training and validation sequences, each None without any.

    With `is_cut`, the validation sequences are the end of its longest document.
    """

    name: str
    tokens: Tokens | None
    train: Rows | None
    held_out: Rows | None
    is_cut: bool
    vocab_size: int | None = None  # of a user's dataset, if it has one

    @property
    def is_dataset(self) -> bool:
        """True if the sequences are those of a user's dataset."""
        return any(isinstance(rows, DatasetRows) for rows in (self.train, self.held_out))

    def describe(self, tokenizer: str) -> Iterator[str]:
        """Yield lines on documents, tokens, sequences, the place on disk, and skipped records."""
        if isinstance(self.train, ImageRows):
            yield f"{self.name}: {self.train.describe()}"
        if isinstance(self.train, StreamRows):
            window = self.train.current
            yield f"{self.train.describe()}; its next window has {describe_rows(window.rows)} ({tokenizer})"
            return
        if self.tokens is None:
            halves = ((self.train, "for training"), (self.held_out, "for validation"))
            yield f"{self.name}: {', '.join(f'{len(rows):,} rows {purpose}' for rows, purpose in halves if rows)}"
            return
        holds = self.tokens.holds
        empty_text = f" ({holds.empty:,} empty)" if holds.empty else ""
        facts = [f"{holds.documents:,} documents{empty_text}, {holds.tokens:,} tokens ({tokenizer})"]
        facts += [f"train {describe_rows(self.train)}"] if self.train else []
        origin = "end of the longest document, " if self.is_cut else ""
        facts.append(f"validation {origin}{describe_rows(self.held_out)}" if self.held_out else "no validation data")
        yield f"{self.name}: {'; '.join(facts)}"
        if holds.skipped:
            yield f"{self.name}: {holds.skipped:,} bad records are skipped, the first is {holds.first_skipped}"
        for note, place in holds.notes.items():
            yield f"note: {self.name}: {note} (first: {place})"
        yield f"{self.name}: tokens are stored in {self.tokens.where}, {decimal(self.tokens.size_bytes)}"


@dataclass(frozen=True)
class Datasets:
    """The training and validation data; `eval` is None without validation data."""

    cfg: DataConfig
    parts: list[Part]
    vocab_size: int | None
    train: Loader
    eval: Loader | None

    @property
    def below(self) -> dict[str, int]:
        """The exclusive upper bounds of a batch's entries, if known."""
        bounds = {"tokens": self.vocab_size, "positions": self.train.rows.seq_len}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def describe(self, rows_left: int) -> str:
        """Return lines about each source, and how often a run with `left` more sequences sees it."""
        lines: list[str] = []
        mixture = self.train.rows
        for part in self.parts:
            lines += part.describe(self.cfg.tokenizer)
        for name, rows, weight, rows_taken in zip(mixture.names, mixture.parts, mixture.weights, self.train.rows_taken):
            if isinstance(rows, StreamRows):
                rows = rows.current.rows
            else:
                lines.append(f"{name}: {(rows_taken + rows_left * weight) / len(rows):,.3g} epochs when the run ends")
            if self.cfg.chat and rows.cut_share:
                lines.append(f"note: {name}: {packing_note(rows, self.cfg.packs)}")
        return "\n".join(lines)

    def read_only(self, rows: Ids) -> None:
        """Make only these sequences of each global batch: those that this process computes."""
        for loader in filter(None, (self.train, self.eval)):
            loader.read_only(rows)

    def pairs(self) -> Iterator[PairRows]:
        """Yield the sequences of preference pairs, for training and validation."""
        for loader in filter(None, (self.train, self.eval)):
            yield from (part for part in loader.rows.parts if isinstance(part, PairRows))

    def report(self) -> list[dict[str, Any]]:
        """Return, for each source, the number of training sequences and how well they are packed.

        Those of a stream are the ones of its next window.
        """
        parts = (part.current.rows if isinstance(part, StreamRows) else part for part in self.train.rows.parts)
        trained = zip(self.train.rows.names, parts)
        return [
            {"source": name, "rows": len(rows), "padding": rows.padding, "cut": rows.cut_share}
            for name, rows in trained
        ]


def datasets_of(cfg: Config, reference: float = math.nan) -> Datasets:
    """Return the datasets of a run; if the loss has a reference, its log-probabilities are all `reference`."""
    if cfg.has_rollouts:
        return prompt_datasets(cfg)
    datasets = build_datasets(cfg.data, cfg.train.seq_len, cfg.train.global_batch_size)
    if cfg.reference_entries:
        for rows in datasets.pairs():
            rows.reference = np.full((len(rows), len(cfg.reference_entries)), reference, np.float32)
    return datasets


def prompt_datasets(cfg: Config) -> Datasets:
    """Return the prompts of a run; raise UserError on bad input."""
    tokenizer, cache, name = tokenizer_of(cfg.data), cache_of(cfg.data), ", ".join(cfg.data.prompts)
    rows = read_prompts(cfg, tokenizer, cache)
    part = Part(name, None, rows, None, False, tokenizer.vocab_size)
    return Datasets(cfg.data, [part], tokenizer.vocab_size, Rollouts(cfg, Mixture([rows], names=[name]), cache), None)


def build_datasets(cfg: DataConfig, seq_len: int, global_batch_size: int) -> Datasets:
    """Read, tokenize and pack the corpus.

    `global_batch_size` counts sequences of `seq_len` (at least 2) over all ranks. Every rank builds the same datasets
    from the same config. Raises UserError on bad input.
    """
    tokenizer, cache = tokenizer_of(cfg), cache_of(cfg)
    build = partial(build_part, cfg, tokenizer=tokenizer, seq_len=seq_len, cache=cache)
    if cfg.stream:
        parts = [stream_part(cfg, source, number, tokenizer, seq_len) for number, source in enumerate(cfg.read)]
    else:
        parts = [build(source, number, cfg.held_out) for number, source in enumerate(cfg.read)]
    validation_parts = [build(source, number, 1.0) for number, source in enumerate(cfg.validation)]
    train = mix([(part.train, source, part.name) for part, source in zip(parts, cfg.read)])
    loader = StreamLoader if cfg.stream else Loader
    validation = [
        (part.held_out, source, part.name)
        for part, source in zip(validation_parts or parts, cfg.validation or cfg.read)
    ]
    held_out = mix(validation) if any(rows for rows, *_ in validation) else None
    if held_out is not None and cfg.validation:
        trained = {"the training data": train.parts[0]}
        check_same_entries({**trained, **dict(zip(held_out.names, held_out.parts))}, "data.validation")
    return Datasets(
        cfg,
        [*parts, *validation_parts],
        count_ids([*parts, *validation_parts], tokenizer),
        loader(train, global_batch_size, cfg.seed, cache),
        None if held_out is None else Loader(held_out, global_batch_size, seed=None),
    )


def mix(parts: Iterable[tuple[Rows | None, SourceConfig, str]]) -> Mixture:
    """Return the weighted mixture of the sources that have sequences."""
    all_rows, sources, all_names = zip(*parts)
    weights = [getattr(source, "weight", 1.0) for source in sources]
    entries = [entry for entry in zip(all_rows, weights, numbered(all_names)) if entry[0] is not None]
    check_same_entries({name: rows for rows, _, name in entries})
    return Mixture(*zip(*entries))


def numbered(names: Sequence[str]) -> list[str]:
    """Return different names: those that were there before, with a number."""
    counts = [names[:at].count(name) for at, name in enumerate(names)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(names, counts)]


def check_same_entries(rows_by_source: Mapping[str, Rows], option: str = "data.sources") -> None:
    """Raise UserError unless the rows of all sources have the same entries, of the same shapes and dtypes.

    Those of streams have, and are not read for it.
    """
    if len(rows_by_source) == 1 or any(isinstance(rows, StreamRows) for rows in rows_by_source.values()):
        return
    first, *others = rows_by_source
    shapes = {name: shapes_of(rows.batch(np.zeros(1, np.int64))) for name, rows in rows_by_source.items()}
    for other in others:
        if shapes[other] != shapes[first]:
            both = f"{describe_shapes(shapes[other])}, those of {first} {describe_shapes(shapes[first])}"
            raise UserError(option, f"the rows of {other} have {both}; give both the same entries")


def shapes_of(batch: Mapping[str, NDArray[Any]]) -> dict[str, tuple[Any, Any]]:
    """Return the shape of a row and the dtype of each entry."""
    return {name: (array.shape[1:], array.dtype) for name, array in sorted(batch.items())}


def build_part(
    cfg: DataConfig,
    source: SourceConfig,
    number: int,
    eval_fraction: float,
    tokenizer: Tokenizer,
    seq_len: int,
    cache: Cache,
) -> Part:
    """Return the sequences of source `number`, of which `eval_fraction` is for validation."""
    if source._target_ is not None:
        return dataset_part(source, number, eval_fraction, seq_len, cfg.seed)
    options = image_options(cfg, tokenizer)
    image_tokens = image_tokens_of_row(cfg, options.processor) if options else 0
    tokens, name, documents_before, volume_rows = tokens_of(cfg, source, tokenizer, cache), name_of(source), 0, []
    for at, volume in enumerate(tokens.volumes):
        corpus = map_volume(volume, tokenizer, cfg.has_counted, cfg.has_values, cfg.images_per_row > 0)
        seed = [cfg.seed, number, *([at] if at else [])]
        volume_rows.append(
            layout_rows(
                corpus,
                LayoutSpec(seed, documents_before, eval_fraction, seq_len, cfg.packs, cfg.images_per_row, image_tokens),
                cache,
            )
        )
        documents_before += len(corpus)
    halves = [[half for half in volumes if half is not None] for volumes in zip(*(v[:2] for v in volume_rows))]
    if options is not None:
        halves = [[ImageRows(v, cfg.images_per_row, image_tokens, options) for v in half] for half in halves]
    joined = [join_volumes(half, name) for half in halves]
    train, held_out = (None if half is None else of_records(half, cfg) for half in joined)
    return Part(name, tokens, train, held_out, any(volume.is_cut for volume in volume_rows))


def stream_part(cfg: DataConfig, source: SourceConfig, number: int, tokenizer: Tokenizer, seq_len: int) -> Part:
    """Return the sequences of a source that is read while training."""
    rows = StreamRows(cfg, source, number, tokenizer, seq_len, name_of(source))
    return Part(rows.name, None, rows, None, False, tokenizer.vocab_size)


def dataset_part(source: SourceConfig, number: int, eval_fraction: float, seq_len: int, seed: int) -> Part:
    """Return the sequences of a user's dataset."""
    dataset, name = load_dataset(source), name_of(source)
    numbers = split_numbers(len(dataset), eval_fraction, [seed, number])
    train, held_out = (DatasetRows(dataset, n, seq_len, f"data ({name})") if len(n) else None for n in numbers)
    return Part(name, None, train, held_out, False, getattr(dataset, "vocab_size", None))


def count_ids(parts: Iterable[Part], tokenizer: Tokenizer) -> int | None:
    """Return the number of token ids, or None if a user's dataset does not have one."""
    sizes = [part.vocab_size if part.tokens is None else tokenizer.vocab_size for part in parts]
    known_sizes = [size for size in sizes if size is not None]
    return max(known_sizes) if len(known_sizes) == len(sizes) else None


def tokens_of(cfg: DataConfig, source: SourceConfig, tokenizer: Tokenizer, cache: Cache) -> Tokens:
    """Return the tokens of a source, which are made if needed."""
    if source.tokens is not None:
        return tokenized.open_folder(tokenized.folder_of(source.tokens, cache), tokenizer, cfg)
    return load_tokens(source_of(source, cfg.seed, cache), make_recipe(cfg, source, tokenizer), tokenizer.digest, cache)


def join_volumes(parts: Sequence[Rows], name: str) -> Rows | None:
    """Return the sequences of all volumes, or None without documents; raise UserError if no sequence has a label."""
    if not parts:
        return None
    if not any(map(len, parts)):
        raise UserError(name, "no row has a label; give it more text, or set data.eval_fraction=0")
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


def name_of(source: SourceConfig) -> str:
    """Return the display name of a source."""
    if source._target_ is not None:
        return target_of({"_target_": source._target_, **source.arguments})
    if source.name == "hf_dataset":
        return f"{', '.join(filter(None, (source.path, source.configuration)))} ({source.split})"
    prompts = source.prompts if isinstance(source, DataConfig) else ()
    return ", ".join(source.files or prompts) or source.tokens or source.name


def check_vocabulary(datasets: Datasets, vocab_size: int | None) -> None:
    """Raise UserError if token ids exceed the model's vocabulary, or use only a small part of it."""
    if vocab_size is None or datasets.vocab_size is None:
        return
    dataset_names = [part.name for part in datasets.parts if part.is_dataset]
    owner = f"data._target_={dataset_names[0]}" if dataset_names else f"data.tokenizer={datasets.cfg.tokenizer}"
    tokens = f"{owner} has {datasets.vocab_size:,} tokens"
    if datasets.vocab_size > vocab_size:
        raise UserError("model.vocab_size", f"is {vocab_size:,}, but {tokens}; it needs at least as many")
    if not dataset_names and datasets.cfg.tokenizer == "bytes" and vocab_size >= FAR_LARGER * datasets.vocab_size:
        fix = f"set data.tokenizer=FOLDER/tokenizer.json, or model.vocab_size={datasets.vocab_size} to train on bytes"
        problem = f"is bytes, {datasets.vocab_size} tokens, for a vocabulary of {vocab_size:,}"
        raise UserError("data.tokenizer", f"{problem}; {fix}")


def check_labels(datasets: Datasets) -> None:
    """Raise UserError if validation data have no labels, which weight the batches."""
    if datasets.eval is not None and "labels" not in datasets.eval.rows.batch(np.array([0])):
        problem = f"rows of {', '.join(datasets.eval.rows.names)} have no entry `labels`, which weights the batches"
        raise UserError("eval.interval", f"{problem}; set it to null")


def packing_note(rows: Rows, packing: str) -> str:
    """Return a note on the conversations or pairs that do not fit into a sequence, and the fix."""
    if packing == "cut":
        return f"{rows.cut_share:.1%} of conversations are cut; data.packing=fit keeps answers with their questions"
    length = f"train.seq_len={rows.seq_len:,}"
    if name := RECORDS.get(packing.removeprefix("short ")):
        return f"{rows.cut_share:.1%} of {name} are longer than {length} and left out; increase it"
    return f"{rows.cut_share:.1%} of conversations are longer than {length} and cut; increase it"


def describe_rows(rows: Rows) -> str:
    """Return the size of packed data and the quality of the packing, as text."""
    lost_name = f"{rows.records} left out" if isinstance(rows, PairRows) else "documents cut"
    lost_name = "texts left out" if isinstance(rows, ClassRows) else lost_name
    packed = f"{rows.padding:.2%} padding, {rows.cut_share:.1%} of {lost_name}"
    tokens, excluded = rows.facts.tokens, rows.facts.tokens - rows.facts.row_tokens
    if excluded <= 1 or isinstance(rows, PairRows):  # the very last token can be a label without being an input
        return f"{tokens:,} tokens in {len(rows):,} rows of {rows.seq_len}, {packed}"
    unlabelled = f"{excluded:,} more are in rows without labels, which are left out"
    return f"{rows.facts.row_tokens:,} tokens in {len(rows):,} rows of {rows.seq_len} ({unlabelled}), {packed}"


# ---- datasets of the user's ----------------------------------------------------------------------------


Row = Mapping[str, Any]


class Dataset(Protocol):
    """The interface of a user's dataset, as in `torch.utils.data.Dataset`: a row by its number, the same each time.

    A row has named tensors or arrays, of the same shapes in all rows. If it has `tokens`, int64 [train.seq_len],
    missing `labels`, `positions` and `documents` are added as for one document that fills the row; tokens of document
    -1 are padding. If the dataset has `vocab_size`, the model is checked against it; `fingerprint`, a string, has to
    change when rows change.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row: ...


class DatasetRows(Rows):
    """The rows `numbers` of a user's dataset."""

    def __init__(self, dataset: Dataset, numbers: Ids, seq_len: int, place: str):
        self.dataset, self.numbers, self.seq_len, self.place = dataset, numbers, seq_len, place
        first = self.row(0)
        if "tokens" in first and first["tokens"].shape != (seq_len,):
            shape = list(first["tokens"].shape)
            raise UserError(place, f"has rows of {shape} tokens, and train.seq_len={seq_len}; make them equal")
        self.shapes = {name: (value.shape, value.dtype) for name, value in first.items()}
        ends = (first, self.row(len(numbers) - 1))
        description = repr((getattr(dataset, "fingerprint", ""), len(dataset), seq_len)).encode()
        arrays = [np.ascontiguousarray(row[name]).view(np.uint8).ravel() for row in ends for name in sorted(row)]
        fingerprint = hash_arrays(np.frombuffer(description, np.uint8), numbers, *arrays)
        row_tokens = len(numbers) * seq_len
        self.facts = Facts(len(numbers), row_tokens, 0, row_tokens, fingerprint)

    def __len__(self) -> int:
        return len(self.numbers)

    def token_counts(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row, with padding: rows of other ranks are not read to count."""
        return np.full_like(rows, self.seq_len)

    def batch(self, rows: Ids) -> dict[str, NDArray[Any]]:
        """Return the entries of some rows, each [len(rows), ...]."""
        items = [self.row(int(row)) for row in rows]
        return {name: np.stack([row[name] for row in items]) for name in self.shapes}

    def row(self, at: int) -> dict[str, NDArray[Any]]:
        """Return a row as arrays; raise UserError if it is not a dict, or its entries differ from the first row's."""
        number = int(self.numbers[at])
        item = self.dataset[number]
        if not isinstance(item, Mapping) or not item:
            raise UserError(self.place, f"item {number} is a {type(item).__name__}, not a dict of named tensors")
        row = add_defaults({name: self.array(value, f"item {number}: entry {name!r}") for name, value in item.items()})
        shapes = {name: (value.shape, value.dtype) for name, value in row.items()}
        if shapes != getattr(self, "shapes", shapes):
            raise UserError(
                self.place, f"item {number} has {describe_shapes(shapes)}, the first {describe_shapes(self.shapes)}"
            )
        return row


    def array(self, value: Any, where: str) -> NDArray[Any]:
        """Return an entry of a row as an array; raise UserError unless it has numbers that NumPy knows."""
        try:
            array = np.asarray(value)
        except (TypeError, ValueError) as error:
            dtype = getattr(value, "dtype", type(value).__name__)
            raise UserError(self.place, f"{where} is {dtype}, which NumPy cannot take; make it float32") from error
        if array.dtype.kind not in "biufc":
            raise UserError(self.place, f"{where} has no numbers, but {array.dtype}; make it a tensor, or leave it out")
        return array


def add_defaults(row: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return a row with the default entries for its tokens added."""
    if "tokens" not in row:
        return row
    tokens = row["tokens"].astype(np.int64)
    documents = np.asarray(row.get("documents", np.zeros_like(tokens)))
    is_within = np.append((documents[1:] == documents[:-1]) & (documents[1:] >= 0), False)  # -1 is padding
    starts = np.flatnonzero(np.append(True, documents[1:] != documents[:-1]))
    lengths = np.diff(np.append(starts, len(tokens)))
    defaults = {
        "labels": np.where(is_within, np.append(tokens[1:], IGNORED_LABEL), IGNORED_LABEL),
        "positions": np.arange(len(tokens)) - np.repeat(starts, lengths),
        "documents": np.zeros_like(tokens),
    }
    return {**defaults, **row, "tokens": tokens}


def describe_shapes(shapes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return entries with their shapes and dtypes, as text."""
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in shapes.items())


def load_dataset(source: SourceConfig) -> Dataset:
    """Create the dataset that a source names; raise UserError if it is not a dataset."""
    target = {"_target_": source._target_, **source.arguments}
    dataset = called(target, "data")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        fix = "it needs __len__ and __getitem__; write a stream into files, or make it indexable"
        raise UserError("data._target_", f"{target_of(target)} makes a {type(dataset).__name__}; {fix}")
    if not len(dataset):
        raise UserError("data._target_", f"{target_of(target)} has no rows")
    return dataset


def split_numbers(count: int, fraction: float, seed: list[int]) -> tuple[Ids, Ids]:
    """Return the training and validation row numbers; a fraction above 0 gives at least one validation row."""
    order = np.random.default_rng(seed).permutation(count)
    size = count if fraction == 1 else min(max(1, round(fraction * count)), count - 1) if fraction else 0
    return np.sort(order[size:]), np.sort(order[:size])
