"""Stored layouts: the same rows as before, in volumes of any size, with tokens read only for a rank's own rows."""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest

from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data import packing as layouts
from compiler_trainer.data import sources
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.loader import Loader, Mixture
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.places.cache import Cache

PACKINGS = ("cut", "fit")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Use an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compiler-trainer" / "tokens"


@pytest.fixture
def volumes(monkeypatch):
    """Split two hundred documents into a few volumes."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 1500)
    monkeypatch.setattr(sources, "VOLUME_BYTES", 3000)
    monkeypatch.setattr("compiler_trainer.data.workers.ALONE", 10_000)


def numbered(folder):
    """Return documents with distinct contents."""
    texts = [chr(97 + i % 26) * (1 + i % 30) + f"{i:03}" for i in range(200)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    os.utime(folder / "a.jsonl", ns=(1, 1))
    return str(folder / "a.jsonl"), texts


def built(path, packing="fit", batch_size=4, **options):
    return build_datasets(DataConfig(name="text", files=(path,), packing=packing, **{"eval_fraction": 0.0, **options}), 40, batch_size)


# The first rows of a commit before layouts were stored, hashed there.
BEFORE = {"cut": ("8129431666b5dce7", "ba7a56365eb5c006"), "fit": ("d405908cca9ade57", "5772d010697bea35")}


@pytest.mark.parametrize("packing", PACKINGS)
def test_samples_and_their_order_are_those_of_earlier_commits(packing):
    options = {"packing": "fit", "eval_fraction": 0.1} if packing == "fit" else {}
    result, digest = build_datasets(DataConfig("synthetic", documents=300, seed=3, **options), 64, 8), hashlib.blake2b(digest_size=8)
    for loader in (result.train, result.eval):
        for _ in range(40):
            batch = loader.next()
            for name in sorted(batch):
                value = batch[name].numpy()
                if name == "documents":  # padding was one more document at that time
                    value = np.where(value == -1, value.max(axis=1, keepdims=True) + 1, value)
                digest.update(value.tobytes())
            digest.update(str(loader.token_count).encode())
    assert (digest.hexdigest(), result.train.rows.fingerprint) == BEFORE[packing]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_second_start_lays_nothing_out(packing, tmp_path, monkeypatch):
    path, _ = numbered(tmp_path)
    before = built(path, packing).train.next()
    monkeypatch.setattr(layouts, "write_layouts", None)
    after = built(path, packing).train.next()
    assert all((after[name] == before[name]).all() for name in before)


def test_whatever_decides_the_rows_lays_them_out_anew(tmp_path, cache):
    path, _ = numbered(tmp_path)
    for count, options in enumerate(({}, {"seed": 1}, {"packing": "cut"}, {"eval_fraction": 0.5}), 2):
        built(path, **options)
        assert len(list(cache.iterdir())) == count


# Volumes


def documents_in(batches):
    """Return the texts that are complete in rows."""
    for batch in batches:
        for tokens, documents, labels in zip(*(batch[name].numpy() for name in ("tokens", "documents", "labels"))):
            for number in np.unique(documents[labels != IGNORED_LABEL]):
                yield bytes(tokens[documents == number][:-1].tolist()).decode()


def test_an_epoch_of_several_volumes_has_each_document_once(tmp_path, volumes):
    path, texts = numbered(tmp_path)
    result = built(path, batch_size=1)
    assert len(result.parts[0].tokens.volumes) > 2
    epochs = [list(documents_in([result.train.next() for _ in range(len(result.train.rows))])) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(texts) and epochs[0] != epochs[1]


def test_which_documents_are_held_out_does_not_depend_on_volumes(tmp_path, monkeypatch, request):
    path, _ = numbered(tmp_path)
    whole = built(path, eval_fraction=0.3).eval
    request.getfixturevalue("volumes")
    parted = built(path, eval_fraction=0.3).eval
    rows = [list(documents_in([loader.next() for _ in range(-(-len(loader.rows) // 4))])) for loader in (whole, parted)]
    assert set(rows[0]) == set(rows[1]) and 30 < len(set(rows[0])) < 90


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_it_goes_on_exactly_at_another_batch_size_in_several_volumes(packing, batch_size, tmp_path, volumes):
    path, _ = numbered(tmp_path)
    ours, restored = built(path, packing).train, built(path, packing, batch_size).train
    for _ in range(30):
        ours.next()
    restored.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    rest = [row for _ in range(6) for row in ours.next()["tokens"].tolist()]
    got = [row for _ in range(24 // batch_size) for row in restored.next()["tokens"].tolist()]
    assert got == rest[: len(got)]


def test_what_is_said_of_several_volumes_is_of_all(tmp_path, volumes, cache):
    path, texts = numbered(tmp_path)
    result = built(path)
    rows, filled = result.train.rows, sum(len(text) + 1 for text in texts)
    assert f"{path}: 200 documents, {filled:,} tokens (bytes); train {filled:,} tokens in {len(rows)} rows of 40, " in result.describe(8)
    assert result.report()[0]["padding"] == pytest.approx(1 - filled / (40 * len(rows)))
    assert rows.token_counts(np.arange(len(rows))).sum() == filled and f"tokens are stored in {cache}, " in result.describe(8)


# Orders


def test_a_long_order_is_kept_and_is_that_of_memory(tmp_path, monkeypatch):
    in_memory = layouts.permutation(1000, [1, 2, 3], Cache(tmp_path))
    assert not list(tmp_path.iterdir()) and sorted(in_memory) == list(range(1000))
    monkeypatch.setattr(layouts, "IN_MEMORY", 999)
    stored = layouts.permutation(1000, [1, 2, 3], Cache(tmp_path))
    assert stored.tolist() == in_memory.tolist() and stored.dtype == np.uint32 and len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(np.random, "default_rng", None)
    assert layouts.permutation(1000, [1, 2, 3], Cache(tmp_path)).tolist() == in_memory.tolist()


def test_batches_are_the_same_where_orders_are_kept(tmp_path, monkeypatch):
    path, _ = numbered(tmp_path)

    def tokens():
        loader = built(path).train
        return [loader.next()["tokens"].tolist() for _ in range(60)]

    in_memory = tokens()
    monkeypatch.setattr(layouts, "IN_MEMORY", 0)
    assert tokens() == in_memory


# Own rows


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_rank_makes_its_own_rows_alone(packing, tmp_path, volumes):
    path, _ = numbered(tmp_path)
    whole, own = (built(path, packing).train for _ in range(2))
    own.next()
    own.reset()
    own.read_only(np.array([1, 3]))
    for _ in range(20):
        expected, result = whole.next(), own.next()
        assert expected.keys() == result.keys() and own.token_count == whole.token_count
        for name, value in result.items():
            assert value.dtype == expected[name].dtype and (value[[1, 3]] == expected[name][[1, 3]]).all()
            assert not value[[0, 2]].any()


def test_no_other_row_is_made(tmp_path):
    path, _ = numbered(tmp_path)
    rows, made = built(path).train.rows.parts[0], []
    batch = rows.batch
    rows.batch = lambda numbers: made.append(len(numbers)) or batch(numbers)
    loader = Loader(Mixture([rows]), 8, seed=0)
    for own in ([5], []):  # a rank without a row makes one, to know the entries
        loader.read_only(np.array(own, np.int64))
        assert loader.batch(np.arange(8))["tokens"].shape == (8, 40)
    assert made == [1, 1]
