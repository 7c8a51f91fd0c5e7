"""Rows of complete documents: where they are placed, that none is lost or cut needlessly, and the time it takes."""

from __future__ import annotations

import collections
import itertools
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler_trainer.config.schema import DataConfig, WeightedSource
from compiler_trainer.data.corpus import Corpus, hash_arrays
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.loader import Mixture
from compiler_trainer.data.packing import best_fit, fit, pack

EOD = 1000
LENGTHS = st.lists(st.integers(2, 20), min_size=1, max_size=12)
SEQ_LENS = st.integers(2, 9)


def for_all(*strategies):
    """Run the test on the same hundred examples each time, without a deadline."""
    return lambda test: settings(deadline=None, derandomize=True)(given(*strategies)(test))


def corpus_of(lengths, counted=None):
    """Return documents of the given numbers of tokens, which are numbered, except for closing tokens."""
    offsets = np.cumsum([0, *lengths])
    tokens = np.arange(offsets[-1], dtype=np.uint16)
    tokens[offsets[1:] - 1] = EOD
    return Corpus(tokens, offsets, EOD, hash_arrays(tokens, offsets), counted)


def fitted(lengths, seq_len, order=None, counted=None):
    corpus = corpus_of(lengths, counted)
    return pack(corpus, np.arange(len(corpus)) if order is None else order, seq_len, "fit")


def all_of(rows):
    return rows.batch(np.arange(len(rows)))


def pieces_in(batch):
    """Return (tokens, labels) of each document in each row, with padding."""
    for tokens, labels, documents in zip(batch["tokens"], batch["labels"], batch["documents"]):
        cuts = np.flatnonzero(np.diff(documents)) + 1
        yield list(zip(np.split(tokens, cuts), np.split(labels, cuts)))


# By hand


def test_rows_by_hand():
    rows = fitted([3, 4, 2, 3], 6)  # 4 + 2, 3 + 3; the row of the first document comes first
    batch = all_of(rows)
    assert batch["tokens"].tolist() == [[0, 1, EOD, 9, 10, EOD], [3, 4, 5, EOD, 7, EOD]]
    assert batch["labels"].tolist() == [[1, EOD, -100, 10, EOD, -100], [4, 5, EOD, -100, EOD, -100]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]]
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert rows.padding == rows.cut_share == 0 and rows.token_counts(np.arange(2)).tolist() == [6, 6]


def test_padding_is_a_document_of_its_own_without_labels():
    rows = fitted([3, 2], 4)
    batch = all_of(rows)
    assert batch["tokens"].tolist() == [[0, 1, EOD, EOD], [3, EOD, EOD, EOD]]
    assert batch["labels"].tolist() == [[1, EOD, -100, -100], [EOD, -100, -100, -100]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert batch["documents"].tolist() == [[0, 0, 0, -1], [0, 0, -1, -1]]
    assert rows.token_counts(np.array([1, 0])).tolist() == [2, 3] and rows.padding == 3 / 8


def test_a_long_document_is_cut_into_rows_and_its_rest_is_fitted():
    rows = fitted([11, 2], 4)  # 4, 4 and 3 tokens; the document of 2 does not fit with them
    batch = all_of(rows)
    assert batch["tokens"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, EOD, EOD], [11, EOD, EOD, EOD]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, EOD, -100, -100], [EOD, -100, -100, -100]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 0], [0, 1, 0, 1]]
    assert rows.cut_share == 1 / 2


def test_the_last_token_of_a_document_of_one_more_than_a_row_is_a_label_alone():
    rows = fitted([5], 4)
    assert all_of(rows)["tokens"].tolist() == [[0, 1, 2, 3]] and all_of(rows)["labels"].tolist() == [[1, 2, 3, EOD]]
    assert rows.cut_share == rows.padding == 0


def test_documents_stand_in_a_row_as_in_the_order():
    (row,) = all_of(fitted([2, 4, 3], 9, np.array([2, 0, 1])))["tokens"].tolist()
    assert row == [6, 7, EOD, 0, EOD, 2, 3, 4, EOD]


def test_what_has_no_label_takes_no_room():
    counted = np.zeros(14, bool)
    counted[[9, 12]] = True  # the first of the second row of a document of 10 tokens is 5
    rows = fitted([10, 4], 5, counted=counted)
    batch = all_of(rows)
    assert batch["tokens"].tolist() == [[5, 6, 7, 8, EOD], [10, 11, 12, EOD, EOD]]
    assert batch["labels"].tolist() == [[-100, -100, -100, EOD, -100], [-100, 12, -100, -100, -100]]


def test_a_label_behind_the_end_of_a_row_is_that_of_its_last_token():
    counted = np.zeros(10, bool)
    counted[5] = True
    (tokens,), (labels,) = (all_of(fitted([10], 5, counted=counted))[name] for name in ("tokens", "labels"))
    assert tokens.tolist() == [0, 1, 2, 3, 4] and labels.tolist() == [-100, -100, -100, -100, 5]


def test_no_label_makes_no_row():
    assert len(fitted([3, 12], 5, counted=np.zeros(15, bool))) == 0


# For all documents


@for_all(LENGTHS, SEQ_LENS, st.randoms(use_true_random=False))
def test_each_document_is_there_once_and_none_that_fits_is_cut(lengths, seq_len, random):
    order = random.sample(range(len(lengths)), len(lengths))
    rows, offsets = fitted(lengths, seq_len, np.array(order)), np.cumsum([0, *lengths])
    pieces = [(tokens.tolist(), labels.tolist()) for row in pieces_in(all_of(rows)) for tokens, labels in row]
    expected = []
    for first, length in zip(offsets, lengths):
        tokens = [*range(first, first + length - 1), EOD]
        for start in range(0, length - 1, seq_len):
            piece = tokens[start : start + seq_len]
            expected.append((piece, [*tokens[start + 1 : start + seq_len + 1], -100][: len(piece)]))
    assert sorted(piece for piece in pieces if piece[1].count(-100) < len(piece[1])) == sorted(expected)
    rest = [piece for piece in pieces if piece[1].count(-100) == len(piece[1])]
    assert all(set(tokens) == {EOD} for tokens, _ in rest) and len(rest) <= len(rows)
    assert rows.token_counts(np.arange(len(rows))).sum() == sum(len(tokens) for tokens, _ in expected)


@for_all(LENGTHS, SEQ_LENS)
def test_rows_are_like_those_of_cutting_in_form(lengths, seq_len):
    batch = all_of(fitted(lengths, seq_len))
    assert all(array.dtype == np.int64 and array.shape[1] == seq_len for array in batch.values())
    documents = batch["documents"]
    steps = np.diff(np.where(documents == -1, documents.max(axis=1, keepdims=True) + 1, documents))  # padding comes last
    assert (documents[:, 0] == 0).all() and np.isin(steps, (0, 1)).all()
    assert ((batch["positions"] == 0)[:, 1:] == (steps == 1)).all() and (batch["positions"][:, 0] == 0).all()
    assert (batch["labels"] != -100).any(axis=1).all()


@for_all(LENGTHS, SEQ_LENS)
def test_cutting_and_fitting_give_the_same_labels(lengths, seq_len):
    corpus = corpus_of(lengths)
    labels = [all_of(pack(corpus, np.arange(len(lengths)), seq_len, how))["labels"] for how in ("cut", "fit")]
    counts = [collections.Counter(result[result != -100].tolist()) for result in labels]
    assert counts[0] == counts[1]


@for_all(LENGTHS, SEQ_LENS, st.integers(0, 9))
def test_of_what_is_left_out_no_row_is_made_and_no_label_lost(lengths, seq_len, seed):
    counted = np.random.default_rng(seed).random(sum(lengths)) < 0.2
    corpus = corpus_of(lengths, counted)
    rows = [pack(corpus, np.arange(len(lengths)), seq_len, how) for how in ("cut", "fit")]
    labels = [all_of(result)["labels"] for result in rows]
    assert all((result != -100).any(axis=1).all() for result in labels)
    counts = [collections.Counter(result[result != -100].tolist()) for result in labels]
    assert counts[0] == counts[1]


# Best fit


def room_left(sizes, row_of, room):
    return sorted(room - sizes[row_of == row].sum() for row in np.unique(row_of))


def one_by_one(sizes, room):
    """Place pieces by best fit decreasing, one at a time; return the room left in each row."""
    left: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [row for row in range(len(left)) if left[row] >= size]
        if not fits:
            left.append(room)
        left[min(fits, key=lambda row: left[row], default=-1)] -= size
    return sorted(left)


def first_fit(sizes, room):
    """Return the number of rows if each piece goes into the first row with enough room."""
    left: list[int] = []
    for size in sizes:
        at = next((row for row in range(len(left)) if left[row] >= size), None)
        if at is None:
            left.append(room - size)
        else:
            left[at] -= size
    return len(left)


@for_all(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 90))
def test_all_of_a_size_at_once_is_best_fit_one_by_one(sizes, room):
    row_of = best_fit(np.array(sizes, np.int64), room)
    assert room_left(np.array(sizes), row_of, room) == one_by_one(sizes, room)
    assert (row_of[row_of] == row_of).all()


@for_all(st.lists(st.integers(1, 30), min_size=2, max_size=60), st.integers(30, 90))
def test_no_two_rows_would_go_into_one(sizes, room):
    left = room_left(np.array(sizes), best_fit(np.array(sizes, np.int64), room), room)
    assert all((room - a) + (room - b) > room for a, b in itertools.combinations(left, 2))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("spread", [0.3, 1.0, 1.7])
def test_lengths_as_of_texts_take_no_more_rows_than_by_first_fit(seed, spread):
    sizes = np.random.default_rng(seed).lognormal(4.5, spread, 600).astype(np.int64).clip(1, 512)
    assert len(np.unique(best_fit(sizes, 512))) <= first_fit(sizes, 512)


def test_a_million_documents_take_seconds():
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 10**6).astype(np.int64).clip(2, 50_000)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    corpus = Corpus(np.zeros(1, np.uint16), offsets, EOD, "lengths alone")
    began = time.process_time()
    result = fit(corpus, np.random.default_rng(1).permutation(len(lengths)), 2048)
    assert time.process_time() - began < 20  # about 2 s on a machine of 2024
    assert result.starts[-1] == len(result.rows) * 2048
    assert lengths.sum() / result.starts[-1] > 0.99


# In datasets


def fitting(path, seq_len=16, batch_size=4, **options):
    options = {"eval_fraction": 0.0, "packing": "fit", **options}
    return build_datasets(DataConfig(**{"name": "text", "files": (str(path),), **options}), seq_len, batch_size)


def lines(folder, name="a.jsonl", letters="abcdefgh", most=14):
    """Write a file of texts of different lengths; return it and the texts."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list(letters), rng.integers(1, most))) for _ in range(50)]
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / name, texts


def texts_of(batch):
    """Return the texts that are complete in rows."""
    result = [bytes(tokens[:-1].tolist()).decode() for row in pieces_in(batch) for tokens, labels in row if (labels != -100).any()]
    return sorted(result)


def numpy_of(batch):
    return {name: tensor.numpy() for name, tensor in batch.items()}


def test_an_epoch_has_each_document_once_and_whole(tmp_path):
    path, texts = lines(tmp_path)
    result = fitting(path, batch_size=1)
    epochs = [[numpy_of(result.train.next()) for _ in range(len(result.train.rows))] for _ in range(2)]
    for batches in epochs:
        assert sorted(itertools.chain(*map(texts_of, batches))) == sorted(texts)
    assert str(epochs[0]) != str(epochs[1])


def test_rows_follow_from_the_seed(tmp_path):
    path, _ = lines(tmp_path)
    first, second, other = (fitting(path, seed=seed).train.rows for seed in (0, 0, 1))
    assert first.fingerprint == second.fingerprint != other.fingerprint
    assert all((a == b).all() for a, b in zip(all_of(first).values(), all_of(second).values()))


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_it_goes_on_exactly_at_another_batch_size(batch_size, tmp_path):
    path, _ = lines(tmp_path)
    ours, restored = fitting(path).train, fitting(path, batch_size=batch_size).train
    for _ in range(5):
        ours.next()
    restored.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    rest = [row for _ in range(6) for row in ours.next()["tokens"].tolist()]
    got = [row for _ in range(24 // batch_size) for row in restored.next()["tokens"].tolist()]
    assert got == rest[: len(got)]


def test_cut_rows_are_others(tmp_path):
    path, _ = lines(tmp_path)
    fit, cut = (fitting(path, packing=packing).train.rows.fingerprint for packing in ("fit", "cut"))
    assert fit != cut


def test_a_batch_counts_its_tokens_without_padding(tmp_path):
    path, texts = lines(tmp_path)
    loader = fitting(path, batch_size=3).train
    counted = 0
    for _ in range(len(loader.rows)):
        batch = numpy_of(loader.next())
        assert loader.token_count == sum(len(text) + 1 for text in texts_of(batch))
        counted += loader.token_count
    assert counted == 3 * sum(len(text) + 1 for text in texts)


def test_mixtures_give_their_shares_of_rows(tmp_path):
    letters = {"a.jsonl": "abcd", "b.jsonl": "wxyz"}
    sources = [
        WeightedSource(files=(str(lines(tmp_path, name, of)[0]),), weight=weight)
        for (name, of), weight in zip(letters.items(), (1.0, 3.0))
    ]
    result = fitting(None, name="mixture", files=(), sources=tuple(sources))
    seen = [row[0] for _ in range(20) for row in result.train.next()["tokens"].tolist()]
    assert (sum(token <= ord("d") for token in seen), sum(token >= ord("w") for token in seen)) == (20, 60)
    assert [part["source"] for part in result.report()] == [sources[0].files[0], sources[1].files[0]]


def test_held_out_rows_are_fitted_in_the_order_of_their_files(tmp_path):
    path, texts = lines(tmp_path)
    rows = fitting(path, eval_fraction=0.5).eval.rows
    longest = [max((text for text in texts_of({n: a[None] for n, a in row.items()})), key=len) for row in single(all_of(rows))]
    assert set(itertools.chain(texts_of(all_of(rows)))) < set(texts)
    assert [texts.index(text) for text in longest] == sorted(texts.index(text) for text in longest)


def single(batch):
    """Yield the rows of a batch one by one."""
    for at in range(len(batch["tokens"])):
        yield {name: array[at] for name, array in batch.items()}


def test_the_start_says_how_much_is_padding(tmp_path):
    path, texts = lines(tmp_path)
    result = fitting(path, seq_len=16)
    share = 1 - sum(len(text) + 1 for text in texts) / (16 * len(result.train.rows))
    assert f" rows of 16, {share:.2%} padding, 0.0% of documents cut; " in result.describe(8)
    assert result.report() == [{"source": str(path), "rows": len(result.train.rows), "padding": pytest.approx(share), "cut": 0.0}]


def test_rows_of_two_parts_are_counted_by_each():
    mixture = Mixture([fitted([3, 2], 4), fitted([4, 2], 4)], (1.0, 1.0))
    assert mixture.token_counts(np.array([3, 0, 2, 1])).tolist() == [2, 3, 4, 2]
