"""Every token once, every row once per epoch, exact resumption, and one clear line for bad input."""

from __future__ import annotations

import collections
import errno
import gzip
import json
import math
import os
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.filesize import decimal
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data.corpus import Corpus, hash_arrays, split
from compiler_trainer.data.datasets import build_datasets, check_vocabulary
from compiler_trainer.data.loader import Loader, Mixture
from compiler_trainer.data.packing import pack
from compiler_trainer.data.readers import READERS, ReadOptions, Span, read_table
from compiler_trainer.data.records import Conversation, Fields, text_fields
from compiler_trainer.data.sources import source_of
from compiler_trainer.data.tokenizers import ByteTokenizer, build_tokenizer
from compiler_trainer.places.cache import Cache

EOD = ByteTokenizer.end_of_document
TEXTS = st.lists(st.text("abc", min_size=1, max_size=12), min_size=1, max_size=8)
SEQ_LENS = st.integers(2, 9)


def for_all(*strategies):
    """Run the test on the same hundred examples each time, without a deadline."""
    return lambda test: settings(deadline=None, derandomize=True)(given(*strategies)(test))


def corpus_of(texts):
    ids = [np.array([*text.encode(), EOD], np.uint16) for text in texts]
    tokens, offsets = np.concatenate(ids), np.cumsum([0, *map(len, ids)])
    return Corpus(tokens, offsets, EOD, hash_arrays(tokens, offsets))


def documents(cfg):
    """Yield every document of a config's only source."""
    read_options = ReadOptions(text_fields(cfg.text_column), cfg.document_separator, ByteTokenizer(), Cache(Path("cache")))
    for span in source_of(cfg, cfg.seed, Cache(Path("cache"))).spans:
        yield from (record.read().content for record in READERS[span.reader](span, read_options))


def all_rows(texts, seq_len, order=None):
    rows = pack(corpus_of(texts), np.arange(len(texts)) if order is None else order, seq_len)
    return rows.batch(np.arange(len(rows)))


def text_config(*files, **changes):
    return DataConfig(name="text", files=tuple(map(str, files)), **{"eval_fraction": 0.0, **changes})


def numbered_loader(rows, batch_size, seed):
    """Return a loader whose row i starts with token 2 * i."""
    corpus = Corpus(np.arange(2 * rows + 1, dtype=np.uint16), np.array([0, 2 * rows + 1]), EOD, str(rows))
    return Loader(Mixture([pack(corpus, np.arange(1), seq_len=2)]), batch_size, seed)


def row_numbers(batch):
    return (batch["tokens"][:, 0] // 2).tolist()


# Packing


@for_all(TEXTS, SEQ_LENS, st.randoms(use_true_random=False))
def test_rows_equal_a_walk_token_by_token(texts, seq_len, random):
    order = random.sample(range(len(texts)), len(texts))
    stream = [(token, d) for d in order for token in [*texts[d].encode(), EOD]]
    expected = collections.defaultdict(list)
    for start in range(0, len(stream) - 1, seq_len):
        row = stream[start : start + seq_len + 1]
        row += [(EOD, None)] * (seq_len + 1 - len(row))
        owners = [owner for _, owner in row]
        numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
        expected["tokens"].append([token for token, _ in row[:-1]])
        expected["labels"].append([t if o is not None and o == p else -100 for (_, p), (t, o) in pairwise(row)])
        expected["positions"].append([i - owners.index(owner) for i, owner in enumerate(owners[:-1])])
        expected["documents"].append([-1 if owner is None else numbers[owner] for owner in owners[:-1]])
    rows = all_rows(texts, seq_len, np.array(order))
    assert {name: array.tolist() for name, array in rows.items()} == expected
    assert all(array.dtype == np.int64 for array in rows.values())


@for_all(TEXTS, SEQ_LENS)
def test_each_token_is_a_target_once_except_the_first_of_a_document(texts, seq_len):
    labels = all_rows(texts, seq_len)["labels"]
    targets = collections.Counter(labels[labels != -100].tolist())
    assert targets == collections.Counter(token for text in texts for token in [*text.encode()[1:], EOD])


@for_all(TEXTS, SEQ_LENS)
def test_no_row_is_without_a_label(texts, seq_len):
    assert (all_rows(texts, seq_len)["labels"] != -100).any(axis=1).all()


def test_a_row_by_hand():
    rows = all_rows(["abc", "d", "ef"], 6)
    assert rows["tokens"].tolist() == [[97, 98, 99, EOD, 100, EOD], [101, 102, EOD, EOD, EOD, EOD]]
    assert rows["labels"].tolist() == [[98, 99, EOD, -100, EOD, -100], [102, EOD, -100, -100, -100, -100]]
    assert rows["positions"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]]
    assert rows["documents"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, -1, -1, -1]]


@pytest.mark.parametrize(("seq_len", "filled", "cut"), [(6, [6, 3], 0), (5, [5, 4], 0), (2, [2, 2, 2, 2], 1 / 3)])
def test_what_is_padding_and_which_documents_are_cut_by_hand(seq_len, filled, cut):
    rows = pack(corpus_of(["abc", "d", "ef"]), np.arange(3), seq_len)
    assert rows.token_counts(np.arange(len(rows))).tolist() == filled and rows.cut_share == cut
    assert rows.padding == 1 - sum(filled) / seq_len / len(filled)


# Order


@for_all(st.integers(1, 20), st.integers(1, 7), st.integers(0, 5))
def test_each_row_comes_once_an_epoch(rows, batch_size, seed):
    loader = numbered_loader(rows, batch_size, seed)
    seen = [row for _ in range(3 * rows) for row in row_numbers(loader.next())]
    for epoch in range(len(seen) // rows):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_order_changes_with_epoch_and_seed():
    def epochs(seed):
        loader = numbered_loader(50, 50, seed)
        return [row_numbers(loader.next()) for _ in range(2)]

    first, second = epochs(0)
    assert first != second and first != sorted(first)
    assert epochs(0) == [first, second] and epochs(1)[0] != first


def test_a_batch_is_of_int64():
    assert all(value.dtype == torch.int64 and value.shape == (5, 2) for value in numbered_loader(9, 5, 0).next().values())


@for_all(st.integers(1, 12), st.integers(1, 7), st.integers(0, 9), st.integers(1, 7))
def test_a_restored_loader_goes_on_exactly(rows, batch_size, done, next_batch_size):
    ours = numbered_loader(rows, batch_size, 0)
    for _ in range(done):
        ours.next()
    restored = numbered_loader(rows, next_batch_size, 0)
    restored.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    rest = [row for _ in range(5 * next_batch_size) for row in row_numbers(ours.next())]
    got = [row for _ in range(5) for row in row_numbers(restored.next())]
    assert got == rest[: len(got)]


def test_the_state_is_that_of_the_last_batch_handed_out_though_the_next_is_made():
    loader = numbered_loader(9, 2, 0)
    loader.next()
    loader.next_batch[1].result()
    assert loader.state_dict()["taken"] == [2]


def test_a_state_of_other_rows_is_refused():
    loader = numbered_loader(9, 2, 0)
    with pytest.raises(UserError, match="^data: these rows are .*, those of the saved data state .*train.seq_len"):
        loader.load_state_dict(numbered_loader(10, 2, 0).state_dict())
    with pytest.raises(UserError, match="^data.seed: is 0, but the saved data state was made with 1"):
        loader.load_state_dict(numbered_loader(9, 2, 1).state_dict())


@pytest.mark.parametrize("change", [{"seq_len": 9}, {"seed": 1}, {"eval_fraction": 0.3}, {"documents": 21}])
def test_whatever_changes_the_rows_changes_their_fingerprint(change):
    def fingerprint(seq_len=8, seed=0, eval_fraction=0.1, documents=20):
        cfg = DataConfig("synthetic", seed=seed, eval_fraction=eval_fraction, documents=documents)
        return build_datasets(cfg, seq_len, 2).train.rows.fingerprint

    assert fingerprint(**change) != fingerprint() == fingerprint()


# Validation documents


@for_all(st.lists(st.text("abc", min_size=3, max_size=12), min_size=1, max_size=60), st.sampled_from([0.05, 0.3, 0.9]))
def test_held_out_tokens_are_not_trained_on(texts, fraction):
    before = corpus_of(texts)
    corpus, trained, held_out = split(before, fraction)
    assert len(trained) and len(held_out)
    assert sorted([*trained, *held_out]) == list(range(len(corpus)))
    assert np.array_equal(corpus.tokens, before.tokens) and set(before.offsets) <= set(corpus.offsets)


def test_the_choice_outlives_a_longer_corpus():
    texts = ["some text"] * 2000
    _, _, few = split(corpus_of(texts[:1000]), 0.1)
    _, _, many = split(corpus_of(texts), 0.1)
    assert few.tolist() == [index for index in many if index < 1000]
    assert 150 < len(many) < 250  # 200, within 3.7 standard deviations


def test_a_single_document_gives_its_end(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 800 + "y" * 200)
    datasets = build_datasets(text_config(tmp_path / "a.txt", eval_fraction=0.2), seq_len=16, global_batch_size=64)
    assert set(datasets.train.next()["tokens"].flatten().tolist()) == {ord("x")}
    assert set(datasets.eval.next()["tokens"].flatten().tolist()) == {ord("y"), EOD}


def test_evaluation_keeps_its_order_and_starts_again():
    datasets = build_datasets(DataConfig("synthetic", documents=40, eval_fraction=0.2), 32, 4)
    first = datasets.eval.next()
    assert torch.equal(first["tokens"], torch.from_numpy(datasets.eval.rows.batch(np.arange(4))["tokens"]))
    assert not torch.equal(datasets.eval.next()["tokens"], first["tokens"])
    datasets.eval.reset()
    assert torch.equal(datasets.eval.next()["tokens"], first["tokens"])


def test_nothing_is_held_out_at_zero():
    datasets = build_datasets(DataConfig("synthetic", documents=3, eval_fraction=0.0), 32, 4)
    assert datasets.describe(8).startswith("synthetic: 3 documents, ")
    assert datasets.eval is None and datasets.parts[0].train.facts.tokens == datasets.parts[0].tokens.holds.tokens
    assert datasets.describe(8).splitlines()[0].endswith("no validation data")


# Sources


def test_stdlib_is_the_interpreters_library_without_tests():
    corpus = corpus_of(documents(DataConfig("stdlib")))
    root = Path(sysconfig.get_paths()["stdlib"])
    content = corpus.tokens.astype(np.uint8).tobytes()
    assert (root / "argparse.py").read_bytes() in content and (root / "json" / "decoder.py").read_bytes() in content
    assert (root / "unittest" / "case.py").read_bytes() in content
    assert b"class TestCase(unittest.TestCase)" not in content
    assert 4 * 2**20 < len(corpus.tokens) < 17 * 2**20 and corpus.tokens.dtype == np.uint16
    assert corpus_of(documents(DataConfig("stdlib"))).fingerprint == corpus.fingerprint


def test_synthetic_text_has_the_entropy_it_states():
    text = list(documents(DataConfig("synthetic", documents=300)))
    pairs = collections.Counter(pair for document in text for pair in pairwise(document))
    firsts = collections.Counter()
    for (first, _), count in pairs.items():
        firsts[first] += count
    nats = -sum(n * math.log(n / firsts[first]) for (first, _), n in pairs.items()) / firsts.total()
    assert abs(nats - 1.06) < 0.01
    assert list(documents(DataConfig("synthetic", documents=310)))[:300] == text
    assert list(documents(DataConfig("synthetic", documents=300, seed=1))) != text


@pytest.fixture
def library(tmp_path):
    texts = ["plain\r\ntext é", "one line", "", "列", "from a table"]
    (tmp_path / "b.txt").write_bytes(texts[0].encode())
    lines = "\n".join(json.dumps({"text": text, "id": 1}) for text in texts[1:3]) + "\n\n"
    (tmp_path / "c.jsonl").write_text(lines)
    (tmp_path / "sub").mkdir()
    pq.write_table(pa.table({"id": [1, 2], "text": texts[3:]}), tmp_path / "sub" / "d.parquet")
    return tmp_path, texts


def test_files_and_globs_give_their_documents_in_order(library):
    folder, texts = library
    assert list(documents(text_config(folder / "*.*", folder / "**" / "*.parquet"))) == texts
    assert list(documents(text_config(folder / "sub" / "d.parquet", folder / "b.txt"))) == [*texts[3:], texts[0]]


def test_the_description_counts_what_was_read_and_left_out(library):
    folder, _ = library
    datasets = build_datasets(text_config(folder / "*.*", folder / "sub" / "*", eval_fraction=0.001), 8, 2)
    name, folder_of_tokens = f"{folder}/*.*, {folder}/sub/*", datasets.parts[0].tokens.where
    assert datasets.describe(12).splitlines() == [
        f"{name}: 5 documents (1 empty), 41 tokens (bytes); train 39 tokens in 5 rows of 8, 2.50% padding, "
        "75.0% of documents cut; validation end of the longest document, 2 tokens in 1 rows of 8, 75.00% padding, "
        "0.0% of documents cut",
        f"note: {name}: fields not used: id (first: {folder}/c.jsonl:1)",
        f"{name}: tokens are stored in {folder_of_tokens}, {decimal(sum(f.stat().st_size for f in folder_of_tokens.iterdir()))}",
        f"{name}: 2.4 epochs when the run ends",
    ]


@pytest.mark.parametrize("name", ["a.txt", "separated.txt", "a.jsonl", "a.jsonl.gz"])
def test_the_byte_order_mark_of_a_file_is_no_text(name, tmp_path):
    content = "\ufeff" + ('{"text": "caf\ufeffé"}\n' if "jsonl" in name else "caf\ufeffé")
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    options = {"document_separator": ";"} if name == "separated.txt" else {}
    assert list(documents(text_config(tmp_path / name, **options))) == ["caf\ufeffé"]


KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.binary())]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("columns", [("text",), ("prompt", "completion")], ids="-".join)
def test_a_column_of_text_is_read_whatever_its_encoding(kind, columns, tmp_path):
    values = pa.array(["é", "b", "é"]).cast(kind.value_type if pa.types.is_dictionary(kind) else kind)
    values = values.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else values
    pq.write_table(pa.table({name: values for name in columns}), tmp_path / "a.parquet")
    span, read_options = Span("table", str(tmp_path / "a.parquet"), 0, 1, 1), ReadOptions(text_fields("text") if columns == ("text",) else Fields("conversation"), None, ByteTokenizer(), Cache(tmp_path))
    result = [record.read().content for record in read_table(span, read_options)]
    texts = [[m["content"] for m in content.messages] if isinstance(content, Conversation) else [content] for content in result]
    assert texts == [[text] * len(columns) for text in ("é", "b", "é")]


BAD_FILES = {
    "empty file": ("a.txt", b"", "a.txt: the corpus is empty: 1 documents, none with a token"),
    "latin-1": ("a.txt", b"caf\xe9 au lait", "a.txt: is not UTF-8: byte 0xe9 at offset 3"),
    "latin-1 line": ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', "a.jsonl:2: is not UTF-8: byte 0xe9 at offset 24"),
    "a conversation": ("a.jsonl", b'{"messages": []}\n', "a.jsonl:1: has OpenAI messages, and no field 'text'; set data.chat=true"),
    "a pair": ("a.jsonl", b'{"prompt": "", "chosen": "", "rejected": ""}\n', "a.jsonl:1: has preference pairs, and no field 'text'; set data.chat=true data.pairs=true"),
    "no text field": ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', 'a.jsonl:2: has no field "text"'),
    "number as text": ("a.jsonl", b'{"text": 3}', 'a.jsonl:1: field "text" is int, not a string'),
    "bare string": ("a.jsonl", b'"text"', "a.jsonl:1: is not an object; each line must be one"),
    "broken json": ("a.jsonl", b'\n{"text": ', "a.jsonl:2: is not JSON: Expecting value at column 10"),
    "half a pair": ("a.jsonl", b'{"text": "\\ud83d"}', "a.jsonl:1: holds \\ud83d, an unpaired surrogate"),
    "not parquet": ("a.parquet", b"hello, world", "a.parquet: is not readable parquet: Parquet magic bytes not found"),
    "extension": ("a.md", b"text", "a.md: unknown extension '.md'; data.files takes .txt, .jsonl, .csv, .tsv (also with .gz or .zst), .parquet, "),
    "nested deep": ("a.jsonl", b'{"text": ' + b"[" * 100_000, "a.jsonl:1: is nested too deep"),
    "long number": ("a.jsonl", b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "a.jsonl:1: contains a number with too many digits"),
    "not gzip": ("a.jsonl.gz", b'{"text": "a"}', "a.jsonl.gz: cannot be read: "),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_named_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        build_datasets(text_config(tmp_path / name), 8, 2)
    assert str(error.value).startswith(f"{tmp_path}/{message}") and "\n" not in str(error.value)


BAD_TABLES = {
    "no column": ({"body": ["a"]}, ': needs one column "text"; it has body'),
    "numbers": ({"text": [1]}, ': column "text" is int64, neither strings nor lists of token ids'),
    "latin-1": ({"text": [b"caf\xe9"]}, ": row 0: is not UTF-8: byte 0xe9 at offset 3 (unexpected end of data); convert the file first"),
    "null": ({"text": ["a", None]}, ': row 1: field "text" is null'),
}


@pytest.mark.parametrize(("columns", "message"), BAD_TABLES.values(), ids=BAD_TABLES.keys())
def test_a_bad_table_is_named_in_one_line(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UserError) as error:
        build_datasets(text_config(tmp_path / "a.parquet"), 8, 2)
    assert str(error.value) == f"{tmp_path / 'a.parquet'}{message}"


def test_bad_paths_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "empty" / "fifo")
    cases = {
        (tmp_path / "b.txt",): "b.txt: no such file (data.files)",
        (tmp_path / "*.jsonl",): "*.jsonl: the glob matches no file (data.files)",
        (tmp_path / "empty",): "empty: no file below it ends in .txt, .jsonl, .csv, .tsv (also with .gz or .zst), .parquet, .arrow, .feather, .npy, .bin",
        (tmp_path / "empty" / "fifo",): "fifo: is not a regular file; copy its content into one",
        ("/dev/zero",): "/dev/zero: is not a regular file",
        ("",): "data.files: contains an empty name; give a file, a folder or a glob",
        (tmp_path / ("x" * 300),): "cannot be read: File name too long",
        (tmp_path / "a.txt", tmp_path / "*.txt"): "a.txt: is listed twice in data.files; each document may occur once",
    }
    for files, message in cases.items():
        with pytest.raises(UserError) as error:
            build_datasets(text_config(*files), 8, 2)
        assert message in str(error.value)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    def denied(folder):
        raise PermissionError(errno.EACCES, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(UserError, match=f"^{tmp_path}: cannot be read: Permission denied"):
        build_datasets(text_config(tmp_path), 8, 2)


def test_a_folder_gives_its_files_in_order(library):
    folder, texts = library
    (folder / "notes.md").write_text("no document")
    assert list(documents(text_config(folder))) == texts


def test_a_glob_does_not_hide_a_file_named_like_one(tmp_path):
    (tmp_path / "a[1].txt").write_text("text")
    assert list(documents(text_config(tmp_path / "a[1].txt"))) == ["text"]


# Tokenizers


@pytest.fixture
def tokenizer_file(tmp_path):
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "hello": 1, "world": 7}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_file_gives_whole_documents(tokenizer_file, tmp_path):
    (tmp_path / "a.txt").write_text("hello world hello there")
    datasets = build_datasets(text_config(tmp_path / "a.txt", tokenizer=str(tokenizer_file)), 8, 1)
    end = Tokenizer.from_file(str(tokenizer_file)).token_to_id("<|endoftext|>")
    assert datasets.parts[0].train.corpus.tokens.tolist() == [1, 7, 1, 0, end]
    assert datasets.vocab_size == max(end, 7) + 1


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    tokenizer = Tokenizer(WordLevel({"low": 0, "high": 100_000}, unk_token="low"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "high"}\n' * 600)
    cfg = text_config(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "tokenizer.json"))
    corpus = build_datasets(cfg, 8, 1).parts[0].train.corpus
    assert corpus.tokens.dtype == np.uint32
    assert corpus.tokens.reshape(600, 2).tolist() == [[100_000, corpus.end_of_document]] * 600


def test_bad_tokenizers_are_named(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "endless.json"))
    empty = Tokenizer(WordLevel({}))
    empty.add_special_tokens(["</s>"])
    empty.save(str(tmp_path / "empty.json"))
    cases = {
        "missing": "no such file",
        "broken": "is not a tokenizer.json: ",
        "endless": "does not say which token ends a document; set data.eos_token (it has no special token)",
        "empty": "has an empty vocabulary",
    }
    for name, message in cases.items():
        path = tmp_path / f"{name}.json"
        with pytest.raises(UserError) as error:
            build_tokenizer(str(path))
        assert str(error.value).startswith(f"{path}: {message}") and "\n" not in str(error.value)


def test_a_text_that_a_tokenizer_has_no_tokens_for_is_refused(tmp_path):
    tokenizer = Tokenizer(WordLevel({"known": 0}))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("unknown")
    with pytest.raises(UserError, match="tokenizer.json: cannot tokenize: .*UNK"):
        build_datasets(text_config(tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json")), 8, 2)


def test_a_vocabulary_beyond_the_model_is_refused():
    datasets = build_datasets(DataConfig("synthetic", documents=3), 8, 1)
    check_vocabulary(datasets, 257)
    with pytest.raises(UserError, match="^model.vocab_size: is 256, but data.tokenizer=bytes has 257 tokens"):
        check_vocabulary(datasets, 256)


def test_the_vocabulary_of_a_stream_is_the_tokenizers(tmp_path):
    (tmp_path / "a.txt").write_text("a text of some tokens\n" * 9)
    datasets = build_datasets(text_config(tmp_path / "a.txt", stream=True, eval_fraction=0.0), 8, 1)
    with pytest.raises(UserError, match="^model.vocab_size: is 256, but data.tokenizer=bytes has 257 tokens"):
        check_vocabulary(datasets, 256)
    with pytest.raises(UserError, match="^data.tokenizer: is bytes, 257 tokens, for a vocabulary of 32,000"):
        check_vocabulary(datasets, 32_000)
