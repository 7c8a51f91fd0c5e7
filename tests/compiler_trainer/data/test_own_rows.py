"""Users' datasets: their rows, once per epoch, split for validation, mixed and checked."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from short_runs import options

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, DataConfig, EvalConfig, WeightedSource
from compiler_trainer.config.validate import validate
from compiler_trainer.data.datasets import DatasetRows, build_datasets, check_labels, check_vocabulary, split_numbers
from compiler_trainer.training import trainer


class Numbers:
    """A dataset in which row n is n, n + 1, ..."""

    vocab_size = 50

    def __init__(self, rows=10, length=4, **further):
        self.rows, self.length, self.further = rows, length, further

    def __len__(self):
        return self.rows

    def __getitem__(self, number):
        return {"tokens": torch.arange(self.length) + number, **{name: torch.tensor(value) for name, value in self.further.items()}}


class Uneven(Numbers):
    def __getitem__(self, number):
        return {"x": np.zeros(2 if number else 3, np.float32)}


class Plain(Numbers):
    def __getitem__(self, number):
        return {"x": np.ones(2, np.float32)}


class Listed(Numbers):
    def __getitem__(self, number):
        return [1, 2]


def data(kind="Numbers", **changes):
    arguments = changes.pop("arguments", {})
    return DataConfig("custom", _target_=f"test_own_rows.{kind}", arguments=arguments, **changes)


def built(cfg, batch=4):
    return build_datasets(cfg, 4, batch)


def firsts(loader, batches):
    return [int(row[0]) for _ in range(batches) for row in loader.next()["tokens"]]


def test_each_row_is_read_once_an_epoch_and_some_are_held_out():
    result = built(data(eval_fraction=0.2), 4)
    (train,), (held_out,) = result.train.rows.parts, result.eval.rows.parts
    assert sorted([*train.numbers, *held_out.numbers]) == list(range(10)) and len(held_out) == 2
    seen = firsts(result.train, 4)
    assert sorted(seen[:8]) == sorted(seen[8:]) == list(train.numbers) and seen[:8] != seen[8:]
    assert result.vocab_size == 50 and result.below == {"tokens": 50, "positions": 4}


def test_labels_and_positions_that_a_row_lacks_end_with_its_documents():
    (part,) = built(data(arguments={"documents": [0, 0, 1, 1]})).train.rows.parts
    batch = part.batch(np.array([0]))
    first = int(part.numbers[0])
    assert {name: array.tolist() for name, array in batch.items()} == {
        "tokens": [[first + i for i in range(4)]],
        "labels": [[first + 1, -100, first + 3, -100]],
        "positions": [[0, 1, 0, 1]],
        "documents": [[0, 0, 1, 1]],
    }
    assert all(array.dtype == np.int64 for array in batch.values())


def test_a_loader_goes_on_where_it_stood_and_refuses_other_rows():
    whole, cut = built(data()).train, built(data()).train
    firsts(whole, 2), firsts(cut, 2)
    second = built(data()).train
    second.load_state_dict(cut.state_dict())
    assert firsts(second, 3) == firsts(whole, 3)
    for other in ({"rows": 11}, {"documents": [0, 0, 0, 1]}):
        with pytest.raises(UserError, match="^data: these rows are"):
            built(data(arguments=other)).train.load_state_dict(cut.state_dict())


def test_sources_are_mixed_by_weight_and_one_may_be_for_validation():
    own = {"name": "custom", "_target_": "test_own_rows.Numbers"}
    sources = (WeightedSource(**own, arguments={"rows": 100}, weight=3.0), WeightedSource(**own, arguments={"rows": 7}, weight=1.0))
    cfg = DataConfig("mixture", sources=sources, validation=(WeightedSource(**own, arguments={"rows": 5}),))
    result = built(cfg, 8)
    result.train.next()
    assert result.train.rows_taken == (6, 2) and sorted(result.eval.rows.parts[0].numbers) == [0, 1, 2, 3, 4]
    assert len(result.train.rows.parts[0]) == 100  # none of it is for validation


@pytest.mark.parametrize("arguments", [{}, {"weight": 1}, {"weight": [1.0]}])
def test_rows_for_validation_have_the_entries_of_training(arguments):
    """A run of 1,000 steps ended at its first evaluation."""
    own = {"name": "custom", "_target_": "test_own_rows.Numbers"}
    training = data(arguments={"weight": 1.0}, validation=(WeightedSource(**own, arguments={"weight": 2.0}),))
    assert built(training).eval
    with pytest.raises(UserError, match="^data.validation: the rows of .*Numbers.* have .*, those of the training data .*weight float32"):
        built(replace(training, validation=(WeightedSource(**own, arguments=arguments),)))


@pytest.mark.parametrize(("count", "fraction", "sizes"), [(10, 0.0, (10, 0)), (10, 0.05, (9, 1)), (1, 0.5, (1, 0)), (10, 1.0, (0, 10)), (2, 0.9, (1, 1))])
def test_halves(count, fraction, sizes):
    train, held_out = split_numbers(count, fraction, [0, 0])
    assert (len(train), len(held_out)) == sizes and sorted([*train, *held_out]) == list(range(count))


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (data(arguments={"length": 5}), r"^data \(test_own_rows.Numbers\): has rows of \[5\] tokens, and train.seq_len=4"),
        (data(arguments={"rows": 0}), "^data._target_: test_own_rows.Numbers has no rows"),
        (data("Listed"), r"^data \(test_own_rows.Listed\): item \d is a list, not a dict of named tensors"),
        (replace(data(), _target_="collections.deque", arguments={}), "^data._target_: collections.deque has no rows"),
        (replace(data(), _target_="builtins.object"), "^data._target_: builtins.object makes a object; it needs __len__ and __getitem__"),
    ],
)
def test_what_is_no_dataset_is_refused(cfg, message):
    with pytest.raises(UserError, match=message):
        built(cfg)


class Entry(Listed):
    """A dataset of rows with one entry of any kind."""

    def __init__(self, value):
        self.value = value

    def __len__(self):
        return 3

    def __getitem__(self, number):
        return {"tokens": np.arange(4), "x": self.value}


@pytest.mark.parametrize(("value", "message"), [
    (torch.ones(2, dtype=torch.bfloat16), "entry 'x' is torch.bfloat16, which NumPy cannot take; make it float32"),
    ("a", "entry 'x' has no numbers, but <U1; make it a tensor, or leave it out"),
    (None, "entry 'x' has no numbers, but object; make it a tensor, or leave it out"),
])
def test_entries_without_numbers_are_named(value, message):
    with pytest.raises(UserError, match=r"^data: item \d: " + re.escape(message)):
        DatasetRows(Entry(value), np.arange(3), 4, "data")


def test_rows_of_other_shapes_are_named():
    with pytest.raises(UserError, match=r"^data \(test_own_rows.Uneven\): item \d has x float32\[\d\], the first x float32\[\d\]"):
        built(data("Uneven", eval_fraction=0.0)).train.rows.batch(np.arange(10))


def test_ids_beyond_the_models_embedding_are_refused():
    with pytest.raises(UserError, match="^model.vocab_size: is 49, but data._target_=test_own_rows.Numbers has 50 tokens"):
        check_vocabulary(built(data()), 49)


def test_rows_without_labels_are_not_evaluated():
    with pytest.raises(UserError, match="^eval.interval: rows of test_own_rows.Plain have no entry `labels`"):
        check_labels(built(data("Plain")))


@pytest.mark.parametrize("cfg", [DataConfig("custom"), DataConfig("stdlib", _target_="a.B")])
def test_a_target_goes_with_custom(cfg):
    with pytest.raises(UserError, match="^data._target_: goes with data=custom, which needs one"):
        validate(Config(data=cfg), 1)


def test_other_rows_are_refused_before_a_folder_is_made(tmp_path):
    cfg = options(tmp_path / "run", data=data("Plain"), eval=EvalConfig(interval=4))
    with pytest.raises(UserError, match="^eval.interval: rows of test_own_rows.Plain"):
        trainer.train(cfg)
    assert not (tmp_path / "run").exists()
