"""Data, models and tokenizers in an object store, behind https and on the hub work as on disk, by bounded copies."""

from __future__ import annotations

import errno
import functools
import gzip
import http.server
import json
import struct
import threading
from dataclasses import replace
from pathlib import Path

import folders
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from doc_places import tokenizer
from object_store import BUCKET

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, DataConfig, FolderConfig
from compiler_trainer.data import sources, tokenized, workers
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.stored import ALL
from compiler_trainer.models.subject import subject
from compiler_trainer.places import cache, copies
from compiler_trainer.places.folders import load_folder, make_folder
from compiler_trainer.places.store import LIBRARIES, Entry, Place, entry_of

LINES = [f"line {i} " + "é" * (i % 40) for i in range(300)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Use an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compiler-trainer" / "tokens"


def tokens(*files, **options):
    cfg = DataConfig(name="text", files=tuple(map(str, files)), **{"eval_fraction": 0.0, **options})
    return build_datasets(cfg, 8, 1).parts[0].train.corpus.tokens.tolist()


def corpus(folder: Path) -> Path:
    """Write a file of each kind with the same lines."""
    folder.mkdir()
    objects = "".join(json.dumps({"text": line}) + "\n" for line in LINES)
    (folder / "a.txt").write_text("\n".join(LINES))
    (folder / "b.jsonl").write_text(objects)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(objects.encode()))
    table = pa.table({"text": LINES})
    pq.write_table(table, folder / "d.parquet", row_group_size=70)
    with pa.OSFile(str(folder / "e.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, 50)
    feather.write_feather(table, folder / "e.feather")
    (folder / "e.csv.gz").write_bytes(gzip.compress("\n".join(["text", *LINES]).encode()))
    (folder / "e.txt.zst").write_bytes(pa.compress("\n".join(LINES).encode(), codec="zstd", asbytes=True))
    np.save(folder / "f.npy", np.arange(200, dtype=np.int64) % 257)
    (folder / "deep").mkdir()
    ids = np.array([1, 2, 3, 4, 5], np.uint16)
    (folder / "deep/g.bin").write_bytes(ids.tobytes())
    sizes, bounds = np.array([3, 2], np.int32), np.array([0, 1, 2], np.int64)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(bounds))
    parts = (sizes, np.array([0, 6], np.int64), bounds)
    (folder / "deep/g.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    return folder


def test_a_folder_of_a_store_gives_the_tokens_of_that_folder_on_a_disk(tmp_path, store):
    folder = corpus(tmp_path / "corpus")
    url = store.put(folder, "corpus")
    assert tokens(url) == tokens(folder) and len(tokens(folder)) > 5 * sum(map(len, LINES))
    assert tokens(f"{url}/*.jsonl*", f"{url}/a.txt") == tokens(f"{folder}/*.jsonl*", folder / "a.txt")


@pytest.mark.parametrize("key", ["ETag", "sha", "modificationTime", "modified"])
def test_a_file_that_changes_at_equal_size_is_another(key):
    first, second = (entry_of("x://y/a", {"size": 5, key: value}) for value in ("a", "b"))
    assert first != second


def test_a_store_without_versions_is_named_once(capsys):
    assert entry_of("x://y/a", {"size": 5}) == entry_of("x://y/b", {"size": 5})
    assert capsys.readouterr().err.count("x://y does not say when files changed") == 1


def test_every_file_of_a_folder_is_compared(tmp_path):
    def make(folder):
        (folder / "locks.jsonl").write_text("abc")
        (folder / "lock-0-of-2").touch()

    assert [*make_folder(tmp_path / "made", make).folder.glob("*")]
    (tmp_path / "made/lock-0-of-2").unlink()
    assert load_folder(tmp_path / "made")
    (tmp_path / "made/locks.jsonl").write_text("damaged")
    assert load_folder(tmp_path / "made") is None


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EACCES, "Permission denied", "TO")])
def test_a_disk_that_refuses_a_copy_is_no_store_that_does_not_answer(error, tmp_path, monkeypatch):
    place, to = Place("memory://x/y"), tmp_path / "a"
    error.filename = str(to) if error.filename else None
    monkeypatch.setattr(type(place.fs), "get_file", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(UserError, match=f"^{to}: cannot be written: {error.strerror}; free some space"):
        place.get("a", to)


@pytest.mark.full
def test_processes_that_tokenize_copy_what_they_read(tmp_path, store, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 4000)
    folder = corpus(tmp_path / "shared")
    url, expected = store.put(folder, "shared"), tokens(f"{folder}/*.jsonl*", folder / "d.parquet")
    monkeypatch.setattr(workers, "ALONE", 0)
    assert tokens(f"{url}/*.jsonl*", f"{url}/d.parquet") == expected


def test_tokens_and_a_tokenizer_of_a_store(tmp_path, store):
    (tmp_path / "tok").mkdir()
    tokenizer().save(str(tmp_path / "tok/tokenizer.json"))
    (tmp_path / "tok/tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (tmp_path / "tok/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    named = store.put(tmp_path / "tok", "tok") + "/tokenizer.json"
    cfg = DataConfig(name="text", files=(str(tmp_path / "a.txt"),), tokenizer=named, eval_fraction=0.0)
    tokenized.write(cfg, tmp_path / "tokens", ALL)
    url = store.put(tmp_path / "tokens", "tokens")
    there = build_datasets(replace(cfg, name="tokens", files=(), tokens=url), 8, 1)
    assert there.parts[0].train.corpus.tokens.tolist() == tokens(tmp_path / "a.txt", tokenizer=named)
    assert there.parts[0].name == url


def test_an_object_that_is_another_is_read_anew(tmp_path, store):
    (tmp_path / "a.txt").write_text("before")
    url = store.put(tmp_path / "a.txt", "changes.txt")
    before = tokens(url)
    (tmp_path / "a.txt").write_text("after!")
    store.put(tmp_path / "a.txt", "changes.txt")
    assert bytes(before[:-1]) == b"before" and bytes(tokens(url)[:-1]) == b"after!"


def test_the_cache_is_bounded_and_says_what_makes_room(tmp_path, store, own_cache, monkeypatch, capsys):
    urls = []
    for number in range(4):
        (tmp_path / "a.txt").write_text(f"{number}" * 10_000)
        urls.append(store.put(tmp_path / "a.txt", f"bounded/{number}.txt"))
    room = cache.Cache(own_cache, 35_000)
    paths = [Path(copies.file_here(url, room)) for url in urls[:3]]
    assert [path.read_text()[0] for path in paths] == ["0", "1", "2"]
    with pytest.raises(UserError, match="^data.cache_gib: 35.0 kB have no room for .*bounded, 10.0 kB: .* in the last 10 minutes"):
        copies.file_here(urls[3], room)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "UNREAD_S", 0)
        assert Path(copies.file_here(urls[3], room)).read_text() == "3" * 10_000
    assert [path.exists() for path in paths] == [False, True, True]
    assert f"{own_cache} had more than 35.0 kB: the longest unused 10." in capsys.readouterr().out
    assert copies.file_here(urls[1], room) == str(paths[1])
    with pytest.raises(UserError, match="^data.cache_gib: "):  # recently read copies stay
        copies.file_here(urls[0], room)


def test_a_copy_that_did_not_come_whole_or_was_altered_is_none(tmp_path, store, own_cache, monkeypatch):
    (tmp_path / "a.txt").write_text("content")
    url, room = store.put(tmp_path / "a.txt", "cut.txt"), cache.Cache(own_cache)
    with monkeypatch.context() as patch:
        patch.setattr(Place, "get", lambda place, name, to: to.write_text("cont"))
        with pytest.raises(UserError, match="cut.txt: came with 4 of 7 bytes"):
            copies.file_here(url, room)
    path = Path(copies.file_here(url, room))
    path.write_text("CONTENT")
    assert Path(copies.file_here(url, room)).read_text() == "content"


def test_a_model_of_a_store_has_the_values_of_that_folder(store):
    folder = folders.folder("llama")
    url = store.put(folder, "models/llama")
    for init in ("weights", "random"):
        here, there = (subject(Config(model=FolderConfig(str(path), init=init))) for path in (folder, url))
        assert there.name == f"llama in {url}"
        for (name, a), (_, b) in zip(here.initial(), there.initial(), strict=True):
            assert torch.equal(a[()], b[()]), name


def test_a_name_that_leads_out_of_its_folder_is_refused(tmp_path, store):
    with pytest.raises(UserError, match="^s3://bucket/a/../../evil.json: leads out of its folder"):
        copies.copy_files(Place(f"{BUCKET}/a"), {"../../evil.json": Entry(1, 1)}, cache.Cache(tmp_path / "cache"))
    assert not list(tmp_path.rglob("evil.json"))


@pytest.mark.parametrize(("name", "message"), [
    (f"{BUCKET}/none.txt", "none.txt: is not there; check its name"),
    (f"{BUCKET}/none/*.txt", "the glob matches no file"),
    ("s3://another/a.txt", "another/a.txt: is not there"),
    ("nowhere://a/b.txt", "nowhere://a/b.txt: is not in a store that fsspec knows: s3"),
    (f"{BUCKET}/kinds", "no file below it ends in .txt"),
    (f"{BUCKET}/kinds/a.pdf", "unknown extension '.pdf'"),
])
def test_what_is_not_there_is_named(name, message, tmp_path, store):
    (tmp_path / "a.pdf").write_text("pdf")
    store.put(tmp_path / "a.pdf", "kinds/a.pdf")
    with pytest.raises(UserError, match=message) as error:
        tokens(name)
    assert "\n" not in str(error.value)


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    def lacks(url):
        raise ImportError("Install gcsfs to access Google Storage")

    monkeypatch.setattr("fsspec.core.url_to_fs", lacks)
    with pytest.raises(UserError, match="^gs://b/a.txt: needs gcsfs; pip install gcsfs$"):
        tokens("gs://b/a.txt")
    assert LIBRARIES["s3"] == "s3fs"


def test_a_store_that_does_not_answer_is_named(tmp_path, store):
    (tmp_path / "a.txt").write_text("text")
    url = store.put(tmp_path / "a.txt", "quiet.txt")
    store.stop()
    try:
        with pytest.raises(UserError, match="^s3://bucket/quiet.txt: cannot be reached: EndpointConnectionError: Could not connect"):
            tokens(url)
    finally:
        store.start()
    assert bytes(tokens(url)[:-1]) == b"text"


def test_files_behind_http(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served/a.txt").write_text("over http")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "served")
    handler.log_message = lambda *args: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.txt"
        assert bytes(tokens(url)[:-1]) == b"over http"
        server.shutdown()


# ---- the hub --------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Use an own cache of the hub, and no network."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_model_of_the_hubs_cache_trains_without_a_network(hub):
    folder = folders.folder("llama")
    folders.cached(hub, "org/small", folder)
    here, there = (subject(Config(model=FolderConfig(path))) for path in (str(folder), "org/small"))
    assert there.name == "llama in org/small" and there.vocab_size == here.vocab_size
    for (name, a), (_, b) in zip(here.initial(), there.initial(), strict=True):
        assert torch.equal(a[()], b[()]), name


def test_a_folder_of_that_name_comes_first(hub, tmp_path, monkeypatch):
    folders.cached(hub, "org/small", folders.folder("llama"))
    monkeypatch.chdir(tmp_path)
    folders.model("qwen3").save_pretrained(tmp_path / "org/small")
    assert subject(Config(model=FolderConfig("org/small"))).name == "qwen3 in org/small"


def test_what_the_hubs_cache_has_in_part_is_not_taken_for_the_whole(hub):
    folder = folders.folder("llama")
    left_out = sorted(file.name for file in folder.glob("*.safetensors"))[-1]
    folders.cached(hub, "org/part", folder, left_out)
    with pytest.raises(UserError, match="^model.path: the hub's cache has only a part of org/part, in .*; download it"):
        subject(Config(model=FolderConfig("org/part")))
    with pytest.raises(UserError, match="^model.path: org/none is neither a folder here nor in the hub's cache, .*HF_TOKEN"):
        subject(Config(model=FolderConfig("org/none")))
    assert subject(Config(model=FolderConfig("org/part", init="random"))).name == "llama in org/part"


def test_a_tokenizer_of_the_hubs_cache(hub, tmp_path):
    (tmp_path / "tok").mkdir()
    tokenizer().save(str(tmp_path / "tok/tokenizer.json"))
    (tmp_path / "tok/tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    folders.cached(hub, "org/tok", tmp_path / "tok")
    (tmp_path / "a.txt").write_text("text")
    named = str(tmp_path / "tok/tokenizer.json")
    assert tokens(tmp_path / "a.txt", tokenizer="org/tok/tokenizer.json") == tokens(tmp_path / "a.txt", tokenizer=named)
