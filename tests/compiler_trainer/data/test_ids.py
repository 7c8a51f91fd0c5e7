"""Token ids made by other tools: every kind of file gives the same documents, and invalid ids are refused."""

from __future__ import annotations

import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data import sources, worker
from compiler_trainer.data.datasets import build_datasets

END = 256  # end of document of the byte tokenizer
DOCUMENTS = [[i % 250, *range(i % 40)] for i in range(200)]


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """Use an empty cache, and pieces of a hundred bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    monkeypatch.setattr(worker, "IDS_AT_ONCE", 7)
    monkeypatch.setattr("compiler_trainer.data.ids.IDS_AT_ONCE", 13)
    monkeypatch.setattr("compiler_trainer.data.workers.ALONE", 10_000)


def read(path, **options):
    """Return the documents of a file, without their closing tokens."""
    cfg = DataConfig(name="text", files=(str(path),), eval_fraction=0.0, text_column="ids", **options)
    (part,) = build_datasets(cfg, 8, 1).parts
    (volume,) = part.tokens.volumes
    offsets, tokens = (volume.array(name, kind) for name, kind in (("offsets", np.int64), ("tokens", np.uint16)))
    result = [tokens[a:b].tolist() for a, b in zip(offsets, offsets[1:])]
    assert all(document[-1] == END and END not in document[:-1] for document in result)
    return [document[:-1] for document in result]


def megatron(path, sequences, bounds, dtype=np.uint16, code=8):
    """Write files as Megatron-LM's `IndexedDatasetBuilder` does."""
    sizes = np.array([len(each) for each in sequences], np.int32)
    pointers = np.concatenate(([0], np.cumsum(sizes[:-1], dtype=np.int64))) * np.dtype(dtype).itemsize
    path.with_suffix(".bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code) + struct.pack("<QQ", len(sizes), len(bounds))
    path.with_suffix(".idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + np.array(bounds, np.int64).tobytes())
    return path.with_suffix(".bin")


def of_megatron(folder):
    return megatron(folder / "a", DOCUMENTS, range(201))


def of_megatron_with_ends_in_int32(folder):
    return megatron(folder / "a", [[*document, END] for document in DOCUMENTS], range(201), np.int32, 4)


def of_megatron_in_sentences(folder):
    halves = [half for document in DOCUMENTS for half in (document[:1], document[1:])]
    return megatron(folder / "a", halves, range(0, 401, 2))


def stream(end=True):
    return np.concatenate([[*document, END] for document in DOCUMENTS])[: None if end else -1]


def of_numpy(folder):
    np.save(folder / "a.npy", stream().astype(np.int64))
    return folder / "a.npy"


def of_memory_map(folder):
    mapped = np.memmap(folder / "a.bin", np.uint16, "w+", shape=stream().shape)
    mapped[:] = stream()
    mapped.flush()
    return folder / "a.bin"


def of_memory_map_with_an_open_end(folder):
    stream(end=False).astype(np.uint16).tofile(folder / "a.bin")
    return folder / "a.bin"


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_raw_ids_of_a_wider_dtype_are_refused_with_the_one_to_write(dtype, tmp_path):
    stream().astype(dtype).tofile(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"a.bin: is read as uint16, but every second .* 1,000 ids is 0, .*ids.astype\(numpy.uint16\)"):
        read(tmp_path / "a.bin")
    np.zeros(15, np.uint16).tofile(tmp_path / "a.bin")  # too few to tell
    assert read(tmp_path / "a.bin") == [[0] * 15]


def of_parquet(folder):
    pq.write_table(pa.table({"id": range(200), "ids": DOCUMENTS}), folder / "a.parquet", row_group_size=9)
    return folder / "a.parquet"


def of_parquet_in_large_lists(folder):
    pq.write_table(pa.table({"ids": pa.array(DOCUMENTS, pa.large_list(pa.uint16()))}), folder / "a.parquet")
    return folder / "a.parquet"


def arrow(new):
    def write(folder):
        table = pa.table({"ids": pa.array(DOCUMENTS, pa.list_(pa.int32()))})
        with pa.OSFile(str(folder / "a.arrow"), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
        return folder / "a.arrow"
    return write


def of_lines(folder):
    (folder / "a.jsonl").write_text("".join(json.dumps({"ids": document}) + "\n" for document in DOCUMENTS))
    return folder / "a.jsonl"


WRITERS = {
    "megatron": of_megatron, "megatron, int32 with ends": of_megatron_with_ends_in_int32, "megatron, sentences": of_megatron_in_sentences,
    "numpy": of_numpy, "memory map": of_memory_map, "memory map, open end": of_memory_map_with_an_open_end,
    "parquet": of_parquet, "parquet, large lists": of_parquet_in_large_lists,
    "arrow": arrow(pa.ipc.new_file), "arrow stream": arrow(pa.ipc.new_stream), "lines": of_lines,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_kind_of_file_gives_every_document_once(write, tmp_path):
    (tmp_path / "data").mkdir()
    assert read(write(tmp_path / "data")) == DOCUMENTS


def test_text_in_arrow_is_text(tmp_path):
    table = pa.table({"ids": ["a", "", "bc"]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    assert read(tmp_path / "a.arrow") == [[97], [98, 99]]


def test_a_folder_gives_those_bins_that_have_an_index(tmp_path):
    (tmp_path / "data").mkdir()
    of_megatron(tmp_path / "data")
    (tmp_path / "data" / "pytorch_model.bin").write_bytes(b"weights")
    assert read(tmp_path / "data") == DOCUMENTS


def no_id(folder, value):
    np.save(folder / "a.npy", np.array([1, value, END, 2]))
    return folder / "a.npy"


BAD = {
    "beyond the vocabulary": (lambda f: no_id(f, 257), "a.npy: token 0: has id 257; the tokenizer has 257; set data.tokenizer to theirs"),
    "below 0": (lambda f: no_id(f, -5), "a.npy: token 0: has id -5; the tokenizer has 257"),
    "floats": (lambda f: np.save(f / "a.npy", np.ones(3)) or f / "a.npy", r"a.npy: is float64\[3\]; ids must be integers in one dim"),
    "rows": (lambda f: np.save(f / "a.npy", np.ones((2, 3), int)) or f / "a.npy", r"a.npy: is int64\[2, 3\]; ids must be"),
    "pickled": (lambda f: np.save(f / "a.npy", np.array([{}])) or f / "a.npy", "a.npy: cannot be read as int64 ids: .*Python objects"),
    "half an id": (lambda f: (f / "a.bin").write_bytes(b"abc") and f / "a.bin", "a.bin: cannot be read as uint16 ids: "),
    "lists of lists": (lambda f: (f / "a.jsonl").write_text('{"ids": [[1]]}') and f / "a.jsonl", 'a.jsonl:1: field "ids" is a list, but not of token ids'),
    "lists of text": (lambda f: (f / "a.jsonl").write_text('{"ids": ["a"]}') and f / "a.jsonl", 'a.jsonl:1: field "ids" is a list, but not of token ids'),
    "no arrow": (lambda f: (f / "a.arrow").write_text("text") and f / "a.arrow", "a.arrow: is not readable Arrow: "),
}


@pytest.mark.parametrize(("write", "message"), BAD.values(), ids=BAD)
def test_what_is_no_id_is_named(write, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read(write(tmp_path))


@pytest.mark.parametrize("damage", [lambda c: c[:60], lambda c: b"x" + c[1:], lambda c: c[:17] + b"\x06" + c[18:], lambda c: c[:-8] + b"\0" * 8])
def test_a_damaged_index_is_named(damage, tmp_path):
    index = of_megatron(tmp_path).with_suffix(".idx")
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(UserError, match="a.idx: is not an index of Megatron: "):
        read(tmp_path / "a.bin")


def test_bad_ids_are_skipped_and_counted_where_that_is_asked_for(tmp_path):
    assert read(no_id(tmp_path, 999), bad_records="skip") == [[2]]
