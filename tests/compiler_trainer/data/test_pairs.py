"""Preference pairs: a row has both answers, each after its prompt, and labels only where they differ."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from byte_tokenizer import write_tokenizer
from tokenizers import Tokenizer

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data import tokenized
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.stored import ALL

ASKED = [{"role": "user", "content": "a?"}]
OPENED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}, *ASKED]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("good", "bad!"))


@pytest.fixture
def tokenizer(tmp_path):
    return write_tokenizer(tmp_path)


def options(tokenizer, **changes):
    return DataConfig(**{"name": "text", "tokenizer": tokenizer, "chat": True, "pairs": True, "eval_fraction": 0.0, **changes})


def written(folder, *records):
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return (str(folder / "a.jsonl"),)


def texts(batch, row, tokenizer):
    """Return the texts of a row's documents and labels, by document."""
    backend, result = Tokenizer.from_file(tokenizer), []
    for document in (0, 1):
        there = batch["documents"][row] == document
        labels = batch["labels"][row][there]
        ids = (batch["tokens"][row][there], labels[labels != -100])
        result.append(tuple(backend.decode(each.tolist(), skip_special_tokens=False) for each in ids))
    return result


SAME = [
    {"prompt": "a?", "chosen": "good", "rejected": "bad!"},
    {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},
    {"prompt": "left out, for the answers have their own", "chosen": ASKED + GOOD, "rejected": ASKED + BAD},
]


@pytest.mark.parametrize("record", SAME, ids=["texts", "messages", "whole", "beside"])
def test_a_row_is_both_answers_after_their_prompt(record, tokenizer, tmp_path):
    result = build_datasets(options(tokenizer, files=written(tmp_path, record)), 100, 1)
    batch = result.train.rows.batch(np.arange(1))
    prompt = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"
    expected = [(f"{prompt}{output}<|im_end|>\n<|endoftext|>", f"{output}<|im_end|>\n") for output in ("good", "bad!")]
    assert texts(batch, 0, tokenizer) == expected
    starts = np.flatnonzero(np.diff(batch["documents"][0], prepend=-1))  # padding has document -1
    assert batch["documents"][0, starts].tolist() == [0, 1, -1] and not batch["positions"][0, starts].any()
    assert (batch["labels"][0][batch["documents"][0] == -1] == -100).all() and batch["pairs"].tolist() == [1]


@pytest.mark.parametrize("seq_len", [200, 75], ids=["whole", "cut"])
def test_an_unrelated_answer_is_that_of_another_pair_after_the_same_prompt(seq_len, tokenizer, tmp_path):
    records = [{"prompt": "a?", "chosen": "good", "rejected": "b"}, {"prompt": "next", "chosen": "no", "rejected": "never"}]
    rows = build_datasets(options(tokenizer, files=written(tmp_path, *records)), seq_len, 1).train.rows.parts[0]
    rows.reference = np.zeros((2, 3), np.float32)
    batch = rows.batch(np.arange(2))
    for row, own in enumerate(rows.batch(np.array([i]))["tokens"][0] for i in range(2)):  # alone as in a batch
        assert (own == batch["tokens"][row]).all()
    backend, found = Tokenizer.from_file(tokenizer), set()
    for documents, tokens, labels, positions in zip(*(batch[name] for name in ("documents", "tokens", "labels", "positions"))):
        there = documents == 2
        assert (positions[there] == np.arange(there.sum())).all()
        ids = (tokens[there], labels[there][labels[there] != -100])
        found.add(tuple(backend.decode(each.tolist(), skip_special_tokens=False) for each in ids))
    start = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    whole = {(start.format("a?", "no") + "<|endoftext|>", "no<|im_end|>\n"), (start.format("next", "good") + "<|endoftext|>", "good<|im_end|>\n")}
    assert (found == whole) == (seq_len == 200)
    assert all(any(text.startswith(part) and label.startswith(part_of_label) for text, label in whole) for part, part_of_label in found)
    assert batch["reference_unrelated"].shape == (2,)


def test_what_both_conversations_say_has_no_labels(tokenizer, tmp_path):
    result = build_datasets(options(tokenizer, files=written(tmp_path, {"prompt": OPENED, "chosen": GOOD, "rejected": BAD})), 200, 1)
    assert [output for _, output in texts(result.train.rows.batch(np.arange(1)), 0, tokenizer)] == ["good<|im_end|>\n", "bad!<|im_end|>\n"]


def test_pairs_stay_together_whatever_is_held_out(tokenizer, tmp_path):
    records = [{"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(60)]
    pq.write_table(pa.Table.from_pylist([{**record, "messages": ASKED + GOOD} for record in records]), tmp_path / "a.parquet")
    cfg = options(tokenizer, files=(str(tmp_path / "a.parquet"),), eval_fraction=0.2)
    result, seen = build_datasets(cfg, 100, 1), []
    for rows in (result.train.rows, result.eval.rows):
        batch = rows.batch(np.arange(len(rows)))
        for row in range(len(rows)):
            (_, chosen), (_, rejected) = texts(batch, row, tokenizer)
            assert chosen.startswith("yes ") and rejected == chosen.replace("yes", "no")
            seen.append(chosen)
    assert len(seen) == len(set(seen)) == 60 and 4 < len(result.eval.rows) < 24


def test_tokens_made_ahead_say_that_they_are_pairs(tokenizer, tmp_path):
    source = options(tokenizer, files=written(tmp_path, SAME[0], SAME[0]))
    tokenized.write(source, tmp_path / "out", ALL)
    there = {"name": "tokens", "tokens": str(tmp_path / "out")}
    rows = [build_datasets(cfg, 100, 1).train.rows.batch(np.arange(2)) for cfg in (source, options(tokenizer, **there))]
    assert all((rows[0][name] == rows[1][name]).all() for name in rows[0])
    with pytest.raises(UserError, match="data.pairs: is false, but .* was made with true"):
        build_datasets(options(tokenizer, **there, pairs=False), 100, 1)


LONG = {"prompt": "a?", "chosen": "good" * 20, "rejected": "bad!"}


def test_a_pair_longer_than_a_row_is_refused_or_left_out(tokenizer, tmp_path):
    files = written(tmp_path, SAME[0], LONG, SAME[0])
    with pytest.raises(UserError, match="1 of 3 pairs are longer than rows of 100 tokens, the longest has 1\\d\\d"):
        build_datasets(options(tokenizer, files=files), 100, 1)
    result = build_datasets(options(tokenizer, files=files, bad_records="skip"), 100, 1)
    assert len(result.train.rows) == 2
    assert "33.3% of pairs are longer than train.seq_len=100 and left out" in result.describe(10)


@pytest.mark.parametrize(
    "record, message",
    [
        ({"prompt": "a?", "completion": "b"}, 'has no "chosen" and "rejected"'),
        ({"chosen": "b", "rejected": "c"}, 'has no "prompt", and field "chosen" begins with the answer'),
        ({"prompt": "a?", "chosen": "b", "rejected": "b"}, 'field "chosen" has no text of the assistant that differs from the other'),
        ({"prompt": "a?", "chosen": ["b"], "rejected": "b"}, 'field "chosen" is not a list of objects'),
        ({"prompt": "a?", "chosen": None, "rejected": "b"}, 'field "chosen" is null'),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, 'field "prompt" is int'),
        ({"chosen": ASKED, "rejected": ASKED + BAD}, 'field "chosen" has no text of the assistant'),
    ],
    ids=range(7),
)
def test_a_record_that_is_no_pair_is_refused_with_its_line(record, message, tokenizer, tmp_path):
    files = written(tmp_path, SAME[0], record)
    with pytest.raises(UserError, match=f"a.jsonl:2: {message}"):
        build_datasets(options(tokenizer, files=files), 100, 1)


def test_one_pair_alone_cannot_be_held_out(tokenizer, tmp_path):
    with pytest.raises(UserError, match="data.eval_fraction: there is only one record"):
        build_datasets(options(tokenizer, files=written(tmp_path, SAME[0]), eval_fraction=0.1), 100, 1)
