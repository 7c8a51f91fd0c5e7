"""Datasets of the `datasets` library, from a local folder, without a network."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data import hub_rows, sources
from compiler_trainer.data.datasets import build_datasets


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Write a folder with two splits, and forbid network access."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub_rows.load_split.cache_clear()
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows = [f"{split} {i}" for i in range(3000)]
        pq.write_table(pa.table({"text": rows, "id": range(3000)}), tmp_path / "data" / f"{split}.parquet")
    return tmp_path / "data"


def tokens(path, **options):
    cfg = DataConfig(name="hf_dataset", path=str(path), eval_fraction=0.0, **options)
    return build_datasets(cfg, 8, 1).parts[0].train.corpus.tokens


@pytest.mark.sample(1)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_split_gives_every_row_in_order(dataset, split, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 10_000)
    expected = [byte for i in range(3000) for byte in [*f"{split} {i}".encode(), 256]]
    assert tokens(dataset, split=split).tolist() == expected


def test_a_part_of_a_split_is_another_corpus(dataset):
    few, all_of_them = tokens(dataset, split="train[:10]"), tokens(dataset, split="train")
    assert len(few) == 10 * len("train 0 ") < len(all_of_them)
    assert np.array_equal(few, all_of_them[: len(few)])


@pytest.mark.parametrize(("options", "message"), [
    ({"split": "dev"}, "data.path: .* cannot be loaded: .*dev"),
    ({"text_column": "body"}, 'data.path: has no column "body"; there are text, id'),
    ({"text_column": "id"}, 'row 0: field "id" is int, not a string'),
])
def test_what_is_not_there_is_named(dataset, options, message):
    with pytest.raises(UserError, match=message) as error:
        tokens(dataset, **options)
    assert "\n" not in str(error.value)


def test_without_the_library_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    hub_rows.load_split.cache_clear()
    with pytest.raises(UserError, match=r"hf_dataset needs datasets \(.*\); pip install '.*\[hf\]'"):
        tokens(tmp_path)


SAVED = {
    "one": (False, "train", 3000),
    "splits": (True, "test", 3000),
    "a part": (True, "train[:10%]", 300),
    "rows": (False, "train[100:150]", 50),
}


@pytest.mark.parametrize(("several", "split", "count"), SAVED.values(), ids=SAVED)
def test_a_folder_of_save_to_disk_is_loaded(several, split, count, dataset, tmp_path):
    library = hub_rows.datasets()
    whole = library.load_dataset(str(dataset))
    (whole if several else whole["train"]).save_to_disk(str(tmp_path / "saved"))
    result = tokens(tmp_path / "saved", split=split)
    first = 100 if "100:" in split else 0
    assert (result == 256).sum() == count and bytes(result[:20].astype(np.uint8)).startswith(f"{split[:4].strip('[')}".encode()[:4])
    assert bytes(result.tolist()[: result.tolist().index(256)]).endswith(f" {first}".encode())


@pytest.mark.parametrize(("split", "message"), [("valid", "data.split: is valid, and the folder has train, test"), ("train[:1]+test[:1]", "give a single part")])
def test_a_split_that_a_saved_folder_does_not_have_is_refused(split, message, dataset, tmp_path):
    hub_rows.datasets().load_dataset(str(dataset)).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match=message.replace("[", "\\[")):
        tokens(tmp_path / "saved", split=split)
