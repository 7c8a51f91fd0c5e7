"""Tokens on disk: made once, complete or absent, the same however the work is split and shared."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sweeps import quick
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig, SourceConfig
from compiler_trainer.data import readers, sources, workers
from compiler_trainer.data.corpus import map_volume
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.readers import Span
from compiler_trainer.data.records import Fields
from compiler_trainer.data.stored import summary
from compiler_trainer.data.tokenizers import build_tokenizer, next_cut, parts
from compiler_trainer.data.worker import Recipe
from compiler_trainer.places import folders as stored_folders
from compiler_trainer.places.cache import Cache, cache_of

ROOT = Path(__file__).parents[3]
TEXT = Path(json.__file__).read_text() + Path(json.decoder.__file__).read_text() + "naïve 列 ünïcödé\n\n\n  end\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Use an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compiler-trainer" / "tokens"


@pytest.fixture
def small_pieces(monkeypatch):
    """Make pieces so small that processes share a few kilobytes."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(workers, "ALONE", 0)


def bpe(path, pre_tokenizer, normalizer=None):
    """Train a tokenizer.json on the text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<|endoftext|>"]
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(path))
    return str(path)


TOKENIZERS = {
    "bytes": lambda path: "bytes",
    "byte level": lambda path: bpe(path, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "words with a mark before": lambda path: bpe(path, pre_tokenizers.Metaspace(prepend_scheme="always", split=True)),
    "one word": lambda path: bpe(path, pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
    "a mark before every text": lambda path: bpe(path, pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Prepend("_")),
}


def corpus(*files, **options):
    """Return the tokens of files as they are on disk."""
    cfg = DataConfig(name="text", files=tuple(map(str, files)), **{"eval_fraction": 0.0, **options})
    part = build_datasets(cfg, 8, 1).parts[0]
    (volume,) = part.tokens.volumes
    return map_volume(volume, build_tokenizer(cfg.tokenizer), cfg.chat), volume


def documents_of(corpus):
    return [corpus.tokens[a:b].tolist() for a, b in itertools.pairwise(corpus.offsets)]


# Cuts


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_parts_of_a_text_give_the_tokens_of_the_whole(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("compiler_trainer.data.tokenizers.PART_BYTES", 700)
    tokenizer = build_tokenizer(TOKENIZERS[kind](tmp_path / "tokenizer.json"))
    result = list(parts(TEXT, tokenizer.encode))
    assert "".join(result) == TEXT and (len(result) > 10) == (kind != "a mark before every text")
    assert np.concatenate(tokenizer.encode(result)).tolist() == tokenizer.encode([TEXT])[0].tolist()


def test_a_text_without_white_space_is_not_cut():
    content = b"x" * 5000
    assert next_cut(content, 100, 1000, build_tokenizer("bytes").encode) == len(content)


# The same corpus however it is made


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_read_once_if_nothing_near_a_border_of_its_pieces_is_a_cut(stream, tmp_path, small_pieces):
    def encode(texts):
        return [np.array([*map(hash, re.findall(r"\w+|[^\w\s]+\s*|\s+", text))]) for text in texts]

    text = "some plain words of text " * 39 + "a;\n" * 400 + "some plain words of text " * 90
    (tmp_path / "a.txt").write_text(text)
    source = SourceConfig("text", files=(str(tmp_path / "a.txt"),))
    cache = Cache(tmp_path, 2**30)
    spans = (sources.stream_of if stream else sources.source_of)(source, 0, cache).spans
    options = readers.ReadOptions(Fields("text"), None, SimpleNamespace(encode=encode), cache)
    documents = [record.read() for span in spans for record in readers.READERS[span.reader](span, options)]
    assert "".join(document.content for document in documents) == text and len(documents) > 3
    assert sum(document.begins for document in documents) == sum(document.ends for document in documents) == 1


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.sample(1)
def test_pieces_of_one_long_text_join_to_its_tokens(kind, tmp_path, small_pieces):
    name = TOKENIZERS[kind](tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text(TEXT)
    result, stored = corpus(tmp_path / "a.txt", tokenizer=name)
    tokenizer = build_tokenizer(name)
    assert documents_of(result) == [[*tokenizer.encode([TEXT])[0].tolist(), tokenizer.end_of_document]]
    assert summary(stored).documents == 1


LINES = [f"line {i} " + "é" * (i % 70) for i in range(200)] + ["", "last"]


def write_jsonl(folder):
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in LINES))
    return folder / "a.jsonl", {}


def write_open_jsonl(folder):
    (folder / "a.jsonl").write_text("\n\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in LINES))
    return folder / "a.jsonl", {}


def write_gzip(folder):
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": line}) + "\n" for line in LINES)
    return folder / "a.jsonl.gz", {}


def write_zstd(folder):
    with pa.output_stream(str(folder / "a.jsonl.zst"), compression="zstd") as file:
        file.write("".join(json.dumps({"text": line}) + "\n" for line in LINES).encode())
    return folder / "a.jsonl.zst", {}


def write_parquet(folder):
    pq.write_table(pa.table({"id": range(len(LINES)), "text": LINES}), folder / "a.parquet", row_group_size=9)
    return folder / "a.parquet", {}


def write_other_column(folder):
    pq.write_table(pa.table({"body": LINES}), folder / "a.parquet")
    return folder / "a.parquet", {"text_column": "body"}


def write_separated(folder):
    (folder / "a.txt").write_text("<|end|>".join(LINES) + "<|end|>")
    return folder / "a.txt", {"document_separator": "<|end|>"}


def write_separated_open(folder):
    (folder / "a.txt").write_text("\n\n".join(LINES))
    return folder / "a.txt", {"document_separator": "\n\n"}


def write_files(folder):
    for i, line in enumerate(LINES):
        (folder / f"{i:04}.txt").write_text(line)
    return folder, {}


WRITERS = [write_jsonl, write_open_jsonl, write_gzip, write_zstd, write_parquet, write_other_column, write_separated, write_separated_open, write_files]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.sample(2)
def test_every_kind_of_file_gives_every_document_once(write, tmp_path, small_pieces):
    (tmp_path / "data").mkdir()
    path, options = write(tmp_path / "data")
    result, stored = corpus(path, **options)
    assert documents_of(result) == [[*line.encode(), 256] for line in LINES if line]
    assert (summary(stored).documents, summary(stored).empty, summary(stored).skipped) == (len(LINES), 1, 0)


def test_a_document_is_where_it_was_wherever_pieces_begin(tmp_path, monkeypatch):
    path, options = write_separated(tmp_path)
    for size in (64, 65, 66, 67, 68, 69, 70, 71, 5000):
        monkeypatch.setattr(sources, "PIECE_BYTES", size)
        monkeypatch.setattr(workers, "ALONE", 10_000)
        result, _ = corpus(path, cache=str(tmp_path / str(size)), **options)
        assert documents_of(result) == [[*line.encode(), 256] for line in LINES if line]


# Once, and whole


def test_a_second_start_reads_nothing(tmp_path, monkeypatch):
    path, _ = write_jsonl(tmp_path)
    first, stored = corpus(path)
    monkeypatch.setattr("compiler_trainer.data.stored.tokenize", None)
    second, repeated = corpus(path)
    assert second.fingerprint == first.fingerprint and repeated == stored
    assert np.array_equal(second.tokens, first.tokens) and np.array_equal(second.offsets, first.offsets)


def changed_file(path, options):
    path.write_text(path.read_text().replace("line 7 ", "line 8 "))


def changed_time(path, options):
    os.utime(path, ns=(1, 1))


def changed_column(path, options):
    options["text_column"] = "other"


def changed_separator(path, options):
    options["document_separator"] = "x"


def changed_tokenizer(path, options):
    bpe(Path(options["tokenizer"]), pre_tokenizers.Whitespace())


@pytest.mark.parametrize("change", [changed_file, changed_time, changed_column, changed_separator, changed_tokenizer])
def test_whatever_decides_the_tokens_makes_them_anew(change, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line, "other": "o"}) + "\n" for line in LINES))
    options = {"tokenizer": bpe(tmp_path / "tokenizer.json", pre_tokenizers.ByteLevel())}
    _, before = corpus(tmp_path / "a.jsonl", **options)
    change(tmp_path / "a.jsonl", options)
    _, after = corpus(tmp_path / "a.jsonl", **options)
    assert after.folder != before.folder


def test_the_fingerprint_is_of_the_content(tmp_path):
    path, _ = write_jsonl(tmp_path)
    first, _ = corpus(path)
    moved, _ = corpus(path.rename(tmp_path / "b.jsonl"))
    changed_file(tmp_path / "b.jsonl", {})
    other, _ = corpus(tmp_path / "b.jsonl")
    assert first.fingerprint == moved.fingerprint != other.fingerprint


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def altered(file):
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


def altered_with_its_time_kept(file):
    at = file.stat()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "kept.json"])
@pytest.mark.parametrize("damage", [cut, altered, altered_with_its_time_kept, Path.unlink])
def test_a_damaged_cache_is_made_anew_and_said(damage, name, tmp_path, capsys):
    path, _ = write_jsonl(tmp_path)
    before, stored = corpus(path)
    expected = documents_of(before)
    damage(stored.folder / name)
    result, _ = corpus(path)
    assert documents_of(result) == expected
    assert f"{stored.folder} was truncated or changed, and is made again\n" in capsys.readouterr().out
    assert not list(stored.folder.parent.glob("*.part"))


def test_of_a_large_array_blocks_are_compared_its_ends_among_them(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_folders, "BLOCK_BYTES", 8)
    file = tmp_path / "array"
    file.write_bytes(bytes(3000))
    whole, seen = stored_folders.sample_digest(file), []
    for at in range(3000):
        file.write_bytes(bytes(at) + b"x" + bytes(2999 - at))
        seen.append(stored_folders.sample_digest(file) != whole)
    assert sum(seen) == 64 * 8 and seen[0] and seen[2999]
    file.write_bytes(bytes(512))  # a small file is compared completely
    whole = stored_folders.sample_digest(file)
    for at in range(512):
        file.write_bytes(bytes(at) + b"x" + bytes(511 - at))
        assert stored_folders.sample_digest(file) != whole


def test_a_cache_that_holds_too_much_loses_what_was_long_unused_and_nothing_else(tmp_path, cache, monkeypatch, capsys):
    path, _ = write_jsonl(tmp_path)
    folders = [corpus(path, text_column=column)[1].folder for column in ("text",)]
    for separator in ("x", "y"):
        (tmp_path / f"{separator}.txt").write_text("some text")
        folders.append(corpus(tmp_path / f"{separator}.txt")[1].folder)
    (cache / "of others").mkdir()
    for number, folder in enumerate((folders[0], folders[2])):
        for each in (folder, *folder.iterdir()):
            os.utime(each, (1000 + number, 1000 + number))
    (tmp_path / "z.txt").write_text("more text")
    folders.append(corpus(tmp_path / "z.txt", cache_gib=300 / 2**30)[1].folder)
    left = set(cache.iterdir())
    assert {folders[1], folders[3], cache / "of others"} < left and not {folders[0], folders[2]} & left
    assert f"{cache} had more than 300 bytes: the longest unused " in capsys.readouterr().out


def test_two_that_want_the_same_corpus_make_it_once(tmp_path, monkeypatch, capsys):
    path, _ = write_jsonl(tmp_path)
    made, start = [], threading.Event()

    def slow(*args):
        made.append(start.set())
        time.sleep(0.5)
        workers.tokenize(*args)

    monkeypatch.setattr("compiler_trainer.data.stored.tokenize", slow)
    other = threading.Thread(target=lambda: start.wait() and corpus(path))
    other.start()
    corpus(path)
    other.join()
    assert len(made) == 1 and "waiting for another process" in capsys.readouterr().out


def test_one_that_waits_for_another_that_gives_up_makes_the_corpus(tmp_path, monkeypatch, cache):
    path, _ = write_jsonl(tmp_path)
    waits, output = threading.Event(), []

    def gives_up(*args):
        monkeypatch.setattr("compiler_trainer.data.stored.tokenize", workers.tokenize)
        assert waits.wait(30)
        raise UserError("first", "gives up")

    def say(text, flush):
        output.append(text)
        waits.set()

    monkeypatch.setattr("compiler_trainer.data.stored.tokenize", gives_up)
    monkeypatch.setattr("compiler_trainer.places.folders.print", say, raising=False)
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(corpus, path) for _ in range(2)]
    errors = [str(job.exception()) for job in both if job.exception()]
    assert errors == ["first: gives up"] and "waiting for another process" in output[0]
    assert not list(cache.glob("*.part"))


def test_a_file_that_cannot_be_opened_or_changes_is_named(tmp_path, monkeypatch):
    path, _ = write_jsonl(tmp_path)

    def touched(*args):
        workers.tokenize(*args)
        os.utime(path, ns=(1, 1))

    with monkeypatch.context() as patch:
        patch.setattr("compiler_trainer.data.stored.tokenize", touched)
        with pytest.raises(UserError, match="a.jsonl: changed while it was being read; start again"):
            corpus(path)

    def gone(*args):
        path.unlink()
        workers.tokenize(*args)

    monkeypatch.setattr("compiler_trainer.data.stored.tokenize", gone)
    with pytest.raises(UserError, match="a.jsonl: cannot be read: No such file or directory"):
        corpus(path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    path, _ = write_jsonl(tmp_path)
    with pytest.raises(UserError, match="^data.cache: .*file/.*: File exists; choose a writable folder"):
        corpus(path, cache=str(tmp_path / "file"))


# Bad records


def test_bad_records_are_skipped_counted_and_said(tmp_path, small_pieces):
    (tmp_path / "a.jsonl").write_bytes(b"".join(b'{"text": "good"}\n[\n{"text": "\xe9"}\n' for _ in range(100)))
    cfg = DataConfig(name="text", files=(str(tmp_path / "a.jsonl"),), bad_records="skip", eval_fraction=0.0)
    datasets = build_datasets(cfg, 8, 1)
    assert datasets.parts[0].tokens.holds[:4] == (500, 100, 0, 200)
    message = f"200 bad records are skipped, the first is {tmp_path}/a.jsonl:2: is not JSON: Expecting value at column 2"
    assert message in datasets.describe(1)


@pytest.mark.full
def test_the_first_bad_record_stops_with_its_line_and_leaves_nothing(tmp_path, small_pieces, cache):
    lines = [b'{"text": "good"}'] * 1000
    lines[700] = lines[400] = b'{"text": 1}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    for _ in range(3):
        with pytest.raises(UserError, match=r'a.jsonl:401: field "text" is int, not a string'):
            corpus(tmp_path / "a.jsonl")
    assert not list(cache.iterdir())


def test_of_bad_records_in_several_processes_the_first_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "ALONE", 0)
    (tmp_path / "late.jsonl").write_text('{"text": "good"}\n' * 100_000 + "late")
    (tmp_path / "soon.jsonl").write_text("soon")
    pieces = {i: [Span("lines", str(tmp_path / name), 0, 2**24, 1)] for i, name in enumerate(("late.jsonl", "soon.jsonl"))}
    with pytest.raises(UserError, match="late.jsonl:100001: is not JSON"):
        workers.tokenize(Recipe(build_tokenizer("bytes"), "text", None, False, False, Cache(tmp_path)), tmp_path, pieces, lambda spans: None)


def test_a_long_text_is_not_left_with_a_hole(tmp_path, small_pieces):
    (tmp_path / "a.txt").write_bytes(b"some words " * 500 + b"\xe9" + b" and more" * 500)
    with pytest.raises(UserError, match="a.txt: is not UTF-8: byte 0xe9 at offset 5500"):
        corpus(tmp_path / "a.txt", bad_records="skip")


# Interruptions


def start(tmp_path, tokenizer):
    """Start a process that tokenizes a long text."""
    code = f"""
from compiler_trainer.config.schema import DataConfig, SourceConfig
from compiler_trainer.data import readers, sources
sources.PIECE_BYTES = {sources.PIECE_BYTES}
from compiler_trainer.data.datasets import build_datasets
build_datasets(DataConfig(name="text", files=({str(tmp_path / "a.txt")!r},), tokenizer={tokenizer!r}), 8, 1)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(holds, seconds=60):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def long_text(tmp_path, monkeypatch):
    """Write a text of many pieces; return the name of its tokenizer."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 300_000)
    (tmp_path / "a.txt").write_text((TEXT + "\n") * (20 * sources.PIECE_BYTES // len(TEXT)))
    return bpe(tmp_path / "tokenizer.json", pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.mark.full
@pytest.mark.parametrize("number", quick([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], 1))
def test_an_interrupted_start_ends_with_its_processes_and_the_next_goes_on(number, tmp_path, long_text, cache, capsys):
    job = start(tmp_path, long_text)
    until(lambda: list(cache.glob("*.part/*.json")))
    children = psutil.Process(job.pid).children()
    began = time.monotonic()
    os.kill(job.pid, number)
    job.communicate()
    assert job.returncode not in (0, None) and time.monotonic() - began < 5
    assert children
    psutil.wait_procs(children, timeout=30)
    assert not [child for child in children if child.is_running()]
    assert len(list(cache.glob("*.part"))) == 1
    result, _ = corpus(tmp_path / "a.txt", tokenizer=long_text)
    assert "resuming in" in capsys.readouterr().out
    tokenizer = build_tokenizer(long_text)
    text = (tmp_path / "a.txt").read_text()
    assert result.tokens[:-1].tolist() == np.concatenate(tokenizer.encode(list(parts(text, tokenizer.encode)))).tolist()


def test_a_process_ends_at_once_when_nobody_can_ask_it_any_more(tmp_path, long_text):
    (tmp_path / "b.txt").write_text(TEXT * (20 * 2**20 // len(TEXT)))
    with workers.processes(1, Recipe(build_tokenizer(long_text), "text", None, False, False, Cache(tmp_path)), tmp_path) as (process,):
        workers.ask(process, [0, [Span("text", str(tmp_path / "b.txt"), 0, 20 * 2**20, 1)]])
        until(lambda: list(tmp_path.glob("*.tokens")))
        process.stdin.close()
        assert process.wait(timeout=5) == 0
    assert not list(tmp_path.glob("000*.json"))


def test_a_process_that_dies_is_an_error_and_no_hang(tmp_path, long_text, cache):
    job = start(tmp_path, long_text)
    until(lambda: list(cache.glob("*.part/*.tokens")))
    psutil.Process(job.pid).children()[0].kill()
    _, stderr = job.communicate(timeout=60)
    assert "a tokenizing process ended with exit code -9" in stderr and job.returncode == 1


def test_no_name_of_a_tokenizer_is_refused_by_its_option():
    with pytest.raises(UserError, match="is empty; give \"bytes\" or the path") as caught:
        build_tokenizer("")
    assert caught.value.place == "data.tokenizer"


@pytest.mark.full
def test_processes_that_start_at_once_make_a_folder_once(tmp_path):
    script = f"""
import sys, time
from pathlib import Path
from compiler_trainer.places.cache import Cache, get_or_make
def make(folder):
    (folder / "a.bin").write_bytes(b"x")
    with open({str(tmp_path / "made")!r}, "a") as file:
        file.write("x")
    time.sleep(0.2)
while time.time() < float(sys.argv[1]):
    time.sleep(0.001)
get_or_make(Cache(Path({str(tmp_path / "cache")!r})), ["key"], make)
"""
    start = str(time.time() + 4)
    jobs = [subprocess.Popen([sys.executable, "-c", script, start], env=os.environ | {"PYTHONPATH": str(ROOT)}) for _ in range(6)]
    assert [job.wait() for job in jobs] == [0] * 6 and (tmp_path / "made").read_text() == "x"
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_lock_that_is_removed_at_any_moment_is_not_the_one_at_its_path(tmp_path, monkeypatch):
    """A process that asked whether the file exists, and then for its state, failed if it was removed in between."""
    path = tmp_path / "lock"
    with open(path, "w") as lock:
        assert stored_folders.is_at(lock, path)
        path.unlink()
        monkeypatch.setattr(Path, "exists", lambda self: True)
        assert not stored_folders.is_at(lock, path)
        path.touch()
        assert not stored_folders.is_at(lock, path)


def test_a_corpus_whose_shards_are_being_removed_is_made_again(tmp_path, monkeypatch):
    (path := tmp_path / "a.txt").write_text("some words. " * 20_000)
    monkeypatch.setattr(sources, "PIECE_BYTES", 50_000)
    unlink, count = Path.unlink, iter(range(3))

    def dies(self, missing_ok=False):
        if ".part" in str(self) and next(count, None) is None:
            raise KeyboardInterrupt
        unlink(self, missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", dies)
        corpus(path)
    _, stored = corpus(path)
    assert summary(stored).tokens == path.stat().st_size + 1


def test_a_user_without_a_home_needs_a_cache(tmp_path, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert cache_of(DataConfig(cache=str(tmp_path))).folder == tmp_path
    with pytest.raises(UserError, match="^data.cache: is not set, and this user has no home directory; give a folder"):
        cache_of(DataConfig())
