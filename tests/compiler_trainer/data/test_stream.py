"""Streams: the rows of stored tokens without their store, in windows, resumed exactly."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from byte_tokenizer import write_tokenizer
from flaky_server import flaky

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig, WeightedSource
from compiler_trainer.config.validate import validate
from compiler_trainer.data import preview, sources, tokenized
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.stored import ALL
from compiler_trainer.data.windows import BEGIN, Place, WindowReader, Windows
from compiler_trainer.data.worker import Worker
from compiler_trainer.places import ranges

SIZE, SEQ_LEN = 4, 48


@pytest.fixture
def here(monkeypatch):
    """Read windows in this process, and none ahead; return the places that were read."""
    places = []

    def ask(self, folder, place):
        places.append((str(self.recipe.cache.folder), place))
        if not hasattr(self, "reader"):
            self.reader = WindowReader(self.recipe, self.source.spans, self.tokens)
        return self.reader.write(str(folder), *place)

    monkeypatch.setattr(Windows, "ask", ask)
    monkeypatch.setenv("LOCAL_RANK", "1")
    return places


def texts(count, first=0):
    return [{"text": f"document {i} " + "ab" * (i * 7 % 19)} for i in range(first, first + count)]


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def options(tmp_path, files, **changes):
    defaults = {"name": "text", "eval_fraction": 0.0, "cache": str(tmp_path / "cache"), "stream": True}
    return DataConfig(**{**defaults, "files": tuple(map(str, files)), **changes})


def stored_options(cfg):
    return DataConfig(**{**{name: getattr(cfg, name) for name in cfg.__dataclass_fields__}, "stream": False, "stream_window": 2**23})


def batches(cfg, count, state=None, size=SIZE, seq_len=SEQ_LEN):
    """Return some batches, and the state before each of them and after the last one."""
    loader = build_datasets(cfg, seq_len, size).train
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    taken, states = [], [loader.state_dict()]
    for _ in range(count):
        taken.append({name: entry.numpy() for name, entry in loader.next().items()})
        states.append(loader.state_dict())
    return taken, states


def assert_equal(first, second):
    assert len(first) == len(second)
    for number, (a, b) in enumerate(zip(first, second)):
        assert a.keys() == b.keys()
        for name in a:
            assert np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype, (number, name)


# ---- the rows of stored data ---------------------------------------------------------------------------


def write_jsonl(folder):
    return [lines(folder / "a.jsonl", texts(40)), lines(folder / "b.jsonl", texts(25, 40))]


def write_gz(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(open(lines(folder / "x", texts(40))).read().encode()))
    return [folder / "a.jsonl.gz", lines(folder / "b.jsonl", texts(25, 40))]


def write_parquet(folder):
    pq.write_table(pa.Table.from_pylist(texts(60)), folder / "a.parquet", row_group_size=17)
    return [folder / "a.parquet"]


def write_csv(folder):
    with open(folder / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["text"])
        writer.writeheader()
        writer.writerows(texts(60))
    return [folder / "a.csv"]


def write_texts(folder):
    for i in range(9):
        (folder / f"{i}.txt").write_text(f"text {i}, " + "words and words " * i * 5)
    return [folder]


def write_ids(folder):
    pq.write_table(pa.table({"ids": [list(range(i, i + 20)) for i in range(50)]}), folder / "a.parquet")
    return [folder / "a.parquet"]


def write_chats(folder):
    chats = [[{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "no" * (i % 5 + 1)}] for i in range(30)]
    return [lines(folder / "a.jsonl", [{"messages": chat * (i % 2 + 1)} for i, chat in enumerate(chats)])]


def write_pairs(folder):
    return [lines(folder / "a.jsonl", [{"prompt": f"a{i}?", "chosen": "good" * (i % 3 + 1), "rejected": "bad"} for i in range(30)])]


def write_classes(folder):
    return [lines(folder / "a.jsonl", [{"text": f"text {i}", "label": ["no", "yes"][i % 2]} for i in range(90)])]


def write_triplets(folder):
    return [lines(folder / "a.jsonl", [{"query": f"q{i}", "positive": f"yes {i}", "negative": "no"} for i in range(30)])]


KINDS = {
    "jsonl": (write_jsonl, {}),
    "gz": (write_gz, {}),
    "parquet": (write_parquet, {"packing": "fit"}),
    "csv": (write_csv, {}),
    "txt": (write_texts, {}),
    "separated": (write_texts, {"document_separator": " and "}),
    "ids": (write_ids, {"text_column": "ids"}),
    "chat": (write_chats, {"chat": True}),
    "last answers": (write_chats, {"chat": True, "train_on": "last", "packing": "cut"}),
    "pairs": (write_pairs, {"chat": True, "pairs": True}),
    "classes": (write_classes, {"records": "classes", "labels": ("no", "yes")}),
    "triplets": (write_triplets, {"records": "triplets"}),
}


@pytest.mark.parametrize(("write", "changes"), KINDS.values(), ids=KINDS)
def test_a_window_with_all_documents_gives_the_rows_of_stored_tokens_in_their_order(write, changes, tmp_path, here):
    (tmp_path / "data").mkdir()
    tokenizer = write_tokenizer(tmp_path) if "chat" in changes else "bytes"
    cfg = options(tmp_path, write(tmp_path / "data"), tokenizer=tokenizer, **changes)
    seq_len = 150 if "pairs" in changes else SEQ_LEN
    count = len(build_datasets(stored_options(cfg), seq_len, 1).train.rows)
    expected, _ = batches(stored_options(cfg), count, size=1, seq_len=seq_len)
    result, states = batches(cfg, count, size=1, seq_len=seq_len)
    assert count > 8 and here == [(cfg.cache, BEGIN)]
    assert_equal(result, expected)
    assert any((batch["labels"] != -100).any() for batch in result)
    assert states[-1]["windows"] == [[1, count, 0, 0, ""]]


def documents(batch):
    """Return the tokens of each document of a batch whose rows have whole ones."""
    for tokens, numbers in zip(batch["tokens"], batch["documents"]):
        for number in range(numbers.max() + 1):
            yield bytes(tokens[numbers == number].astype(np.uint8))


def one_pass(cfg):
    """Return the documents of the rows of a pass, in order, and the places of its windows."""
    rows = build_datasets(cfg, 128, 1).train.rows.parts[0]
    result, windows, window = [], [], rows.window(0)
    while True:
        numbers = np.arange(window.start.row, window.following.row)
        result += documents(rows.batch(numbers)) if len(numbers) else []
        windows.append(window.start.place)
        if window.following.place == BEGIN:
            return result, windows, window.following.row
        window = rows.open(window.following)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_gz, write_csv], ids=["jsonl", "parquet", "gz", "csv"])
@pytest.mark.parametrize("window", [1, 100, 700, 2**23])
def test_a_pass_has_each_document_once(write, window, tmp_path, here, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 500)  # several spans
    cfg = options(tmp_path, write(tmp_path), stream_window=window, packing="fit")
    result, places, _ = one_pass(cfg)
    expected, _, _ = one_pass(options(tmp_path, cfg.files, packing="fit"))
    assert Counter(result) == Counter(expected) and len(set(result)) == len(result) >= 60
    assert len(set(places)) == len(places) and (len(places) > 2) == (window < 2**23)
    assert places == sorted(places)


def test_windows_of_one_token_keep_the_order_of_files(tmp_path, here):
    cfg = options(tmp_path, [lines(tmp_path / "a.jsonl", texts(20))], stream_window=1, packing="fit")
    result, places, rows = one_pass(cfg)
    assert [text.decode().split()[1] for text in (t[:12] for t in result)] == [str(i) for i in range(20)]
    assert rows == 20


def test_a_window_has_little_more_tokens_than_asked_for(tmp_path, here):
    cfg = options(tmp_path, [lines(tmp_path / "a.jsonl", texts(300))], stream_window=1000)
    rows = build_datasets(cfg, SEQ_LEN, SIZE).train.rows.parts[0]
    assert 1000 <= rows.window(0).summary.tokens < 2000


def test_further_passes_have_the_documents_in_other_orders(tmp_path, here):
    cfg = options(tmp_path, [lines(tmp_path / "a.jsonl", texts(60))], stream_window=500, packing="fit")
    first, _, rows = one_pass(cfg)
    stream = build_datasets(cfg, 128, 1).train.rows.parts[0]
    second = [*documents(stream.batch(np.arange(rows, 2 * rows)))]
    assert Counter(first) == Counter(second) and first != second


def test_a_batch_may_have_several_passes(tmp_path, here):
    cfg = options(tmp_path, [lines(tmp_path / "a.jsonl", texts(3))], stream_window=20, packing="fit")
    (batch,), (_, state) = batches(cfg, 1, size=64)
    counts = Counter(documents(batch))
    assert len(counts) == 3 and sum(counts.values()) >= 64 and max(counts.values()) - min(counts.values()) <= 1
    loader = build_datasets(cfg, SEQ_LEN, 64).train
    loader.read_only(np.array([50, 63]))  # the rows of a rank
    mine = loader.next()
    assert all(np.array_equal(mine[name][[50, 63]], batch[name][[50, 63]]) for name in batch)
    assert loader.state_dict() == state


# ---- resuming ------------------------------------------------------------------------------------------


RESUMED = {"jsonl": write_jsonl, "gz": write_gz, "parquet": write_parquet, "chat": write_chats}


@pytest.mark.parametrize("write", RESUMED.values(), ids=RESUMED)
def test_a_resumed_stream_gives_the_same_rows_from_any_step(write, tmp_path, here, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 700)
    chat = {"chat": True, "tokenizer": write_tokenizer(tmp_path)} if write is write_chats else {}
    (tmp_path / "data").mkdir()
    cfg = options(tmp_path, write(tmp_path / "data"), stream_window=450, **chat)
    count = 32
    expected, states = batches(cfg, count)
    numbers = [state["windows"][0] for state in states]
    passes = sum(a[2] > b[2] for a, b in zip(numbers, numbers[1:]))
    offsets = {state["taken"][0] - window[1] for state, window in zip(states, numbers)}
    assert passes >= 1 and numbers[-1][0] > 4 and {0} < offsets  # in windows, at their borders, and in a second pass
    assert len({window[2] for window in numbers}) > 1 or write is write_chats  # in several spans
    for step in range(count):
        resumed = options(tmp_path, cfg.files, stream_window=450, cache=str(tmp_path / f"other{step}"), **chat)
        after, _ = batches(resumed, min(3, count - step), states[step])
        assert_equal(after, expected[step : step + 3])
        first = next(place for cache, place in here if cache == resumed.cache)
        assert first == Place(*numbers[step][2:4])  # no window before it is read


def test_records_before_the_window_are_skipped_unparsed(tmp_path, here, monkeypatch):
    cfg = options(tmp_path, [lines(tmp_path / "a.jsonl", texts(200))], stream_window=600)
    expected, states = batches(cfg, 20)
    parsed = []
    original = Worker.parts
    monkeypatch.setattr(Worker, "parts", lambda self, record, shard: parsed.append(1) or original(self, record, shard))
    after, _ = batches(options(tmp_path, cfg.files, stream_window=600, cache=str(tmp_path / "other")), 1, states[16])
    assert_equal(after, expected[16:17])
    start = states[16]["windows"][0][3]  # of its window: earlier records are skipped
    assert start > 50 and 0 < len(parsed) <= 200 - start


def test_a_resumed_stream_may_have_another_batch_size(tmp_path, here):
    cfg = options(tmp_path, write_jsonl(tmp_path), stream_window=450)
    expected, states = batches(cfg, 12)
    after, _ = batches(cfg, 12, states[6], size=2)
    joined = [{name: np.concatenate((a[name], b[name])) for name in a} for a, b in zip(after[::2], after[1::2])]
    assert_equal(joined, expected[6:])


def test_a_mixture_of_streams_is_drawn_by_weight_and_resumed(tmp_path, here):
    a, b = (lines(tmp_path / f"{name}.jsonl", texts(50, first)) for name, first in (("a", 0), ("b", 500)))
    parts = tuple(WeightedSource(files=(path,), weight=weight) for path, weight in ((a, 3.0), (b, 1.0)))
    cfg = options(tmp_path, [], name="mixture", sources=parts, stream_window=500)
    expected, states = batches(cfg, 40)
    assert states[-1]["taken"] == [120, 40] and len(states[-1]["windows"]) == 2
    for step in (1, 17, 38):
        after, _ = batches(cfg, 2, states[step])
        assert_equal(after, expected[step : step + 2])


def test_a_file_with_other_records_is_noticed(tmp_path, here):
    path = lines(tmp_path / "a.jsonl", texts(60))
    cfg = options(tmp_path, [path], stream_window=450)
    _, states = batches(cfg, 5)
    content = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(content.replace("document", "dOcument"))
    with pytest.raises(UserError, match="a.jsonl: has other records than when the checkpoint was saved"):
        batches(cfg, 1, states[1])
    lines(tmp_path / "a.jsonl", texts(61))
    with pytest.raises(UserError, match="data: these rows are .*, those of the saved data state"):
        batches(cfg, 1, states[1])


@pytest.mark.parametrize("windows", [[[0, 0, 0]], [[0, 0, -1, 0, ""]], [[0, 9, 0, 0, ""]], [], [[0, 0, 0, 0, 5]], [7], [[0, 0, 0, 0, "", 1]]])
def test_a_damaged_state_is_refused(windows, tmp_path, here):
    cfg = options(tmp_path, write_jsonl(tmp_path))
    _, (state, _) = batches(cfg, 1)
    with pytest.raises(ValueError, match="is not the position of a window|shorter than argument"):
        batches(cfg, 1, {**state, "windows": windows})


# ---- bad input -----------------------------------------------------------------------------------------


def test_a_bad_record_in_a_later_window_stops_the_run_or_is_counted(tmp_path, here, capsys):
    records = texts(60)
    records[50] = {"body": "no text"}
    cfg = options(tmp_path, [lines(tmp_path / "a.jsonl", records)], stream_window=450)
    _, states = batches(cfg, 4)
    with pytest.raises(UserError, match=r'a.jsonl:51: has no field "text"'):
        batches(cfg, 40)
    result, _ = batches(options(tmp_path, cfg.files, stream_window=450, bad_records="skip"), 40)
    assert len(result) == 40
    assert "1 bad records of window" in (out := capsys.readouterr().out) and "the first is" in out and "a.jsonl:51" in out


@pytest.mark.parametrize("change", ["removed", "written"])
def test_a_file_that_changes_while_training_ends_it_with_a_line(change, tmp_path, here):
    files = write_jsonl(tmp_path)
    loader = build_datasets(options(tmp_path, files, stream_window=450), SEQ_LEN, SIZE).train
    loader.next()
    if change == "removed":
        os.remove(files[1])
    else:
        lines(tmp_path / "b.jsonl", texts(5, 800))
    with pytest.raises(UserError, match=r"b.jsonl: (cannot be read: No such file|changed while it was being read)") as error:
        for _ in range(40):
            loader.next()
    assert "\n" not in str(error.value)


def test_files_without_any_row_are_refused(tmp_path, here):
    cfg = options(tmp_path, [lines(tmp_path / "a.jsonl", [{"text": ""}] * 9)])
    with pytest.raises(UserError, match="a.jsonl: no record has a label; give it other records"):
        batches(cfg, 1)


def test_notes_of_records_are_printed_once(tmp_path, here, capsys):
    records = [{**record, "source": "web"} for record in texts(60)]
    batches(options(tmp_path, [lines(tmp_path / "a.jsonl", records)], stream_window=450), 40)
    assert capsys.readouterr().out.count("fields not used: source (first: ") == 1


REFUSED = {
    "held out": ("data=stdlib data.stream=true", "data.stream: true with data.eval_fraction=0.05, and no share of a stream"),
    "epochs": ("data=stdlib data.eval_fraction=0 eval.interval=null data.stream=true train.steps=2epochs", "the length of a stream is not known"),
    "tokens": ("data=tokens data.tokens=x data.eval_fraction=0 eval.interval=null data.stream=true", "not data=tokens"),
    "dpo": ("loss=dpo data=text data.files=[a] data.pairs=true data.chat=true data.tokenizer=x data.eval_fraction=0 eval.interval=null "
            "data.stream=true model.attention=documents", "whose reference model reads all answers before training"),
    "window": ("data=stdlib data.stream_window=5", "data.stream_window: 5 is for data.stream=true"),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_go_with_a_stream_are_refused_in_a_line(overrides, message):
    with pytest.raises(UserError) as error:
        validate(to_config(compose(overrides.split())), 1)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_stream_is_not_tokenized_ahead(tmp_path):
    with pytest.raises(UserError, match="data.stream: reads files without storing their tokens"):
        tokenized.write(options(tmp_path, write_jsonl(tmp_path)), tmp_path / "out", ALL)


def test_check_data_reads_the_head_of_a_stream(tmp_path, store):
    lines(tmp_path / "a.jsonl", texts(40))
    url = store.put(tmp_path / "a.jsonl", "head/a.jsonl")
    reader = preview.Reader(options(tmp_path, [url]), preview.KINDS)
    assert reader.scan(5).samples == 5
    assert not (tmp_path / "cache" / "copies").exists()


# ---- stores --------------------------------------------------------------------------------------------


REMOTE = {"jsonl": write_jsonl, "gz": write_gz, "parquet": write_parquet, "csv": write_csv, "txt": write_texts}


@pytest.mark.parametrize("kind", REMOTE)
def test_files_of_a_store_are_read_where_they_are(kind, tmp_path, store, here):
    folder = tmp_path / "data"
    folder.mkdir()
    REMOTE[kind](folder)
    url = store.put(folder, f"stream/{kind}")
    there, _ = batches(options(tmp_path, [url], stream_window=450), 20)
    expected, _ = batches(options(tmp_path, [folder], stream_window=450), 20)
    assert_equal(there, expected)
    assert not (tmp_path / "cache" / "copies").exists()


def test_files_of_a_store_that_have_no_parts_are_refused(tmp_path, store):
    (tmp_path / "a.npy").write_bytes(b"x")
    url = store.put(tmp_path / "a.npy", "parts/a.npy")
    with pytest.raises(UserError, match="a.npy: cannot be read in parts; data.stream reads .txt, .jsonl, .csv, .tsv, .txt.gz"):
        build_datasets(options(tmp_path, [url]), SEQ_LEN, SIZE)


@pytest.mark.parametrize("kind", REMOTE)
def test_a_server_that_fails_now_and_then_changes_nothing(kind, tmp_path, here, monkeypatch):
    monkeypatch.setattr(ranges, "WAITS_S", (0.0,) * 5)
    folder = tmp_path / "data"
    folder.mkdir()
    REMOTE[kind](folder)
    names = sorted(path.name for path in folder.iterdir() if path.suffix != "")
    with flaky(folder, 10**9) as (url, server):
        datasets = build_datasets(options(tmp_path, [f"{url}/{name}" for name in names], stream_window=450), SEQ_LEN, SIZE)
        server.every = 4
        result = [{k: v.numpy() for k, v in datasets.train.next().items()} for _ in range(20)]
        assert server.failures >= 3
    expected, _ = batches(options(tmp_path, [folder / name for name in names], stream_window=450), 20)
    assert_equal(result, expected)
    assert not (tmp_path / "cache" / "copies").exists()


def test_a_server_that_stays_down_ends_the_run_with_a_line(tmp_path, here, monkeypatch):
    monkeypatch.setattr(ranges, "WAITS_S", (0.0,) * 5)
    write_jsonl(tmp_path)
    with flaky(tmp_path, 10**9) as (url, server):
        loader = build_datasets(options(tmp_path, [f"{url}/a.jsonl", f"{url}/b.jsonl"], stream_window=450), SEQ_LEN, SIZE).train
        loader.next()
        server.is_down = True
        with pytest.raises(UserError, match=r"b.jsonl: cannot be reached: .* \(tried 6 times\)") as error:
            for _ in range(40):
                loader.next()
        assert "\n" not in str(error.value)


# ---- datasets of the hub -------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Write a dataset of four files, and forbid the network."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "set").mkdir()
    for number in range(4):
        pq.write_table(pa.Table.from_pylist(texts(30, 30 * number)), tmp_path / "set" / f"train-{number}.parquet", row_group_size=11)
    return str(tmp_path / "set")


def test_a_dataset_of_the_hub_is_streamed_and_resumed(hub, tmp_path, here):
    cfg = options(tmp_path, [], name="hf_dataset", path=hub, stream_window=450)
    expected, states = batches(cfg, 40)
    files = [f"{hub}/train-{number}.parquet" for number in range(4)]
    assert_equal(expected[:1], batches(options(tmp_path, files, stream_window=450), 1)[0])
    assert {state["windows"][0][2] for state in states} == {0, 1, 2, 3}
    for step in (3, 11, 20, 33):
        after, _ = batches(options(tmp_path, [], name="hf_dataset", path=hub, stream_window=450, cache=str(tmp_path / f"c{step}")), 3, states[step])
        assert_equal(after, expected[step : step + 3])
    assert not (tmp_path / "hub").exists()  # nothing was downloaded or prepared


def test_a_part_of_a_split_is_no_stream(hub, tmp_path):
    with pytest.raises(UserError, match=r"data.split: is train\[:10%\], and a stream has whole splits only"):
        build_datasets(options(tmp_path, [], name="hf_dataset", path=hub, split="train[:10%]"), SEQ_LEN, SIZE)


@pytest.mark.full
def test_the_librarys_own_shuffle_buffer_is_lost_when_it_is_resumed(hub):
    """The reason for windows of our own. If this fails, the library may have become exact."""
    import datasets

    def shuffled():
        return datasets.load_dataset(hub, split="train", streaming=True).shuffle(seed=0, buffer_size=20)

    whole, first, stream, resumed = [row["text"] for row in shuffled()], [], shuffled(), shuffled()
    for row in islice(stream, 50):
        first.append(row["text"])
        state = stream.state_dict()
    resumed.load_state_dict(state)
    assert first == whole[:50] and sorted(whole) == sorted(record["text"] for record in texts(120))
    assert sorted(first + [row["text"] for row in resumed]) != sorted(whole)


# ---- processes -----------------------------------------------------------------------------------------


RANK = """
import hashlib, json, sys
from pathlib import Path
import numpy as np
import torch.distributed as dist
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data.datasets import build_datasets
rank, ranks, steps = (int(a) for a in sys.argv[1:4])
values, out = json.loads(sys.argv[4]), sys.argv[5]
loader = build_datasets(DataConfig(**{**values, "files": tuple(values["files"])}), 48, 8).train
own, rows = np.arange(8 * rank // ranks, 8 * (rank + 1) // ranks), []
loader.read_only(own)
dist.init_process_group("gloo", init_method=f"file://{out}.ranks", rank=rank, world_size=ranks)
for _ in range(steps):
    dist.barrier()
    batch = loader.next()
    digests = (b"".join(batch[name][row].numpy().tobytes() for name in sorted(batch)) for row in own)
    rows.append([hashlib.sha1(digest).hexdigest() for digest in digests])
Path(f"{out}.{rank}").write_text(json.dumps([rows, loader.state_dict()]))
"""


def ranks_of(count, cfg, out, steps=30):
    """Return the rows of each step, from `count` processes of a machine at the same time, and their states."""
    values = {name: getattr(cfg, name) for name in ("name", "files", "eval_fraction", "cache", "stream", "stream_window")}
    jobs = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(count), str(steps), json.dumps(values), str(out)],
                         env=os.environ | {"LOCAL_RANK": str(rank), "RANK": str(rank)})
        for rank in range(count)
    ]  # fmt: skip
    assert [job.wait(timeout=300) for job in jobs] == [0] * count
    results = [json.loads(open(f"{out}.{rank}").read()) for rank in range(count)]
    rows = [[row for own in step for row in own] for step in zip(*(rows for rows, _ in results))]
    return rows, [state for _, state in results]


@pytest.mark.full
def test_processes_of_a_machine_get_the_same_rows_on_any_number_of_ranks(tmp_path):
    files = write_jsonl(tmp_path)
    expected, (state,) = ranks_of(1, options(tmp_path, files, stream_window=450), tmp_path / "one")
    assert len({row for step in expected for row in step}) > 200
    for count in (2, 4):
        cache = tmp_path / f"cache{count}"
        cfg = options(tmp_path, files, stream_window=450, cache=str(cache))
        assert ranks_of(count, cfg, tmp_path / str(count)) == (expected, [state] * count)
        assert len([path for path in (cache / "windows").iterdir() if path.is_dir()]) <= 8


def test_a_reading_process_that_is_killed_is_started_again(tmp_path):
    cfg = options(tmp_path, [lines(tmp_path / "a.jsonl", texts(400))], stream_window=1000)
    expected, _ = batches(cfg, 40)
    loader = build_datasets(options(tmp_path, cfg.files, stream_window=1000, cache=str(tmp_path / "other")), SEQ_LEN, SIZE).train
    windows, result, killed = loader.rows.parts[0].windows, [], set()
    for _ in range(40):
        result.append({name: entry.numpy() for name, entry in loader.next().items()})
        with windows.lock:  # it waits for the next request
            if len(killed) < 3 and windows.process is not None and windows.process.pid not in killed:
                killed.add(windows.process.pid)
                windows.process.kill()
    assert_equal(result, expected)
    assert len(killed) > 1


def test_windows_are_deleted_behind_the_run(tmp_path):
    cfg = options(tmp_path, [lines(tmp_path / "a.jsonl", texts(2000))], stream_window=450)
    _, states = batches(cfg, 120)
    assert states[-1]["windows"][0][0] > 15
    left = [path for path in (tmp_path / "cache" / "windows").iterdir() if path.suffix == ""]
    assert 0 < len(left) <= 5
