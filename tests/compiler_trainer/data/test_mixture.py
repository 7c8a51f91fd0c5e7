"""Several sources: each gives its share of any stretch of rows, and resumes exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, DataConfig, EvalConfig, WeightedSource
from compiler_trainer.config.validate import validate
from compiler_trainer.data.corpus import Corpus
from compiler_trainer.data.datasets import build_datasets, name_of
from compiler_trainer.data.loader import Loader, Mixture
from compiler_trainer.data.packing import pack


def part(number, rows):
    """Return rows that all contain `number`."""
    corpus = Corpus(np.full(2 * rows + 1, number, np.uint16), np.array([0, 2 * rows + 1]), 99, f"{number}-{rows}")
    return pack(corpus, np.arange(1), seq_len=2)


def owners(batch):
    return batch["tokens"][:, 0].tolist()


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=9), st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_after_any_number_of_rows_each_part_has_given_its_share_to_within_one(weights, counts):
    check_shares(weights, counts)


def test_shares_hold_where_the_part_that_is_furthest_behind_is_not_the_one_to_take():
    check_shares([58.24, 1.0, 9.59, 51.43, 24.31, 153.11, 132.78, 3.75], [200])


def check_shares(weights, counts):
    mixture = Mixture([part(i, 3) for i in range(len(weights))], weights)
    taken = np.zeros(len(weights), np.int64)
    for count in counts:
        for turn in mixture.draw(taken, count):
            taken[turn] += 1
            assert (abs(taken - taken.sum() * mixture.weights) < 1 + 1e-9).all()


def test_turns_do_not_depend_on_how_many_are_asked_for_at_once():
    mixture = Mixture([part(i, 3) for i in range(3)], (0.5, 0.3, 0.2))
    at_once = mixture.draw(np.zeros(3, int), 60)
    split = mixture.draw(np.bincount(at_once[:17], minlength=3), 43)
    assert at_once[17:].tolist() == split.tolist()


def test_two_epochs_of_one_part_take_each_of_its_rows_twice():
    loader = Loader(Mixture([part(0, 6), part(1, 30)], (1, 3)), 4, seed=0)
    seen = [row for _ in range(12) for row in owners(loader.next())]
    assert seen.count(0) == 12 and seen.count(1) == 36
    numbers = [loader._rows(0, np.arange(start, start + 6)).tolist() for start in (0, 6)]
    assert sorted(numbers[0]) == sorted(numbers[1]) == list(range(6)) and numbers[0] != numbers[1]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_it_goes_on_exactly_at_another_batch_size(batch_size):
    def fresh(size):
        corpus = Corpus(np.arange(200, dtype=np.uint16), np.array([0, 90, 200]), 999, "both")
        return Loader(Mixture([pack(corpus, np.array([i]), 2) for i in range(2)], (0.3, 0.7)), size, seed=1)

    ours, restored = fresh(4), fresh(batch_size)
    for _ in range(30):
        ours.next()
    restored.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    rest = [row for _ in range(10) for row in owners(ours.next())]
    got = [row for _ in range(40 // batch_size) for row in owners(restored.next())]
    assert got == rest[: len(got)]


def test_other_weights_are_other_rows():
    states = [Loader(Mixture([part(0, 6), part(1, 6)], weights), 2, 0).state_dict() for weights in ((1, 1), (2, 2), (1, 2))]
    assert states[0] == states[1] != states[2]


def mixed(folder, **options):
    """Return a config of two files, the second with three times the weight."""
    (folder / "a.txt").write_text("a" * 41)
    (folder / "b.jsonl").write_text(json.dumps({"body": "b" * 401}))
    files = [WeightedSource(files=(str(folder / "a.txt"),)), WeightedSource(files=(str(folder / "b.jsonl"),), text_column="body", weight=3.0)]
    return DataConfig(name="mixture", sources=tuple(files), eval_fraction=0.0, **options)


def test_sources_of_one_name_are_told_apart(tmp_path):
    files = (str(tmp_path / "a.jsonl"),)
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "a" * 9, "body": "b" * 9}) + "\n") * 2)
    sources = tuple(WeightedSource(files=files, text_column=column) for column in ("text", "body", "text"))
    datasets = build_datasets(DataConfig(name="mixture", sources=sources, eval_fraction=0.5), 4, 2)
    for loader in (datasets.train, datasets.eval):
        assert list(loader.rows.names) == [files[0], f"{files[0]} (2)", f"{files[0]} (3)"]
    hub = [name_of(WeightedSource("hf_dataset", path="a/b", configuration=name)) for name in ("en", "de", None)]
    assert hub == ["a/b, en (train)", "a/b, de (train)", "a/b (train)"]


def test_files_are_mixed_and_how_often_each_is_seen_is_said(tmp_path):
    datasets = build_datasets(mixed(tmp_path), seq_len=4, global_batch_size=8)
    output = datasets.describe(100).splitlines()
    assert f"{tmp_path}/a.txt: 2.27 epochs when the run ends" in output  # 25 of 11 rows
    assert f"{tmp_path}/b.jsonl: 0.743 epochs when the run ends" in output  # 75 of 101 rows
    seen = [row for _ in range(10) for row in owners(datasets.train.next())]
    assert (seen.count(ord("a")), seen.count(ord("b"))) == (20, 60)
    assert f"{tmp_path}/a.txt: 2.27 epochs when the run ends" in datasets.describe(20).splitlines()  # 20 + 5 of 11


def test_each_source_holds_its_own_part_out(tmp_path):
    datasets = build_datasets(DataConfig(**{**vars(mixed(tmp_path)), "eval_fraction": 0.2}), 4, 8)
    assert {*owners(datasets.eval.next())} == {ord("a"), ord("b")}


REFUSED = {
    "sources without mixture": ({"sources": (WeightedSource(files=("a.txt",)),)}, "data.sources"),
    "mixture without sources": ({"name": "mixture"}, "data.sources"),
    "mixture of mixtures": ({"name": "mixture", "sources": (WeightedSource(name="mixture"),)}, "data.sources"),
    "files beside": ({"name": "mixture", "files": ("b.txt",), "sources": (WeightedSource(files=("a.txt",)),)}, "data.files"),
    "source without files": ({"name": "mixture", "sources": (WeightedSource(),)}, "data.files"),
    "dataset without path": ({"name": "hf_dataset"}, "data.path"),
    "path without dataset": ({"path": "x"}, "data.path"),
    "chat of the library": ({"chat": True, "tokenizer": "t.json"}, "data.chat"),
    "chat of bytes": ({"name": "text", "files": ("a.jsonl",), "chat": True}, "data.chat"),
}


@pytest.mark.parametrize(("options", "where"), REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_fit_are_refused(options, where):
    with pytest.raises(UserError, match=f"^{where}: "):
        validate(Config(data=DataConfig(**options), eval=EvalConfig(interval=None)), 1)
