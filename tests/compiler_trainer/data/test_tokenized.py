"""Tokens made ahead: equal to those of a job, made in shares, despite interruptions, and usable anywhere."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from byte_tokenizer import CHATML, write_template, write_tokenizer
from commands import call
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.jobs import as_override
from compiler_trainer.config.schema import DataConfig, WeightedSource
from compiler_trainer.data import sources, stored, tokenized, workers
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.sources import source_of
from compiler_trainer.data.stored import ALL, Share
from compiler_trainer.data.tokenizers import tokenizer_of
from compiler_trainer.places import folders
from compiler_trainer.places.cache import Cache

ROOT = Path(__file__).parents[3]
LINES = [f"line {i} " + "é" * (i % 70) for i in range(400)]


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """Use an empty cache, and pieces of a kilobyte."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(workers, "ALONE", 10_000)


def text(folder, **options):
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    os.utime(folder / "a.jsonl", ns=(1, 1))
    return DataConfig(name="text", files=(str(folder / "a.jsonl"),), **options)


def tokens(folder, **options):
    return DataConfig(name="tokens", tokens=str(folder), **options)


def arrays(folder):
    """Return the bytes of every array below a folder, by volume and name."""
    return {(path.parent.name, path.name): path.read_bytes() for path in folder.rglob("*.bin")}


def batches(cfg, count=30):
    datasets = build_datasets(cfg, 16, 4)
    return [{name: value.tolist() for name, value in loader.next().items()} for loader in (datasets.train, datasets.eval) for _ in range(count)]


@pytest.mark.parametrize("volume_bytes", [2**36, 9000])
def test_what_is_made_ahead_is_what_a_job_makes_and_trains_alike(volume_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "VOLUME_BYTES", volume_bytes)
    cfg = text(tmp_path)
    (part,) = build_datasets(cfg, 16, 4).parts
    made = {name: array for volume in part.tokens.volumes for name, array in arrays(volume.folder).items()}
    tokenized.write(cfg, tmp_path / "out", ALL)
    assert arrays(tmp_path / "out") == made and (len(part.tokens.volumes) > 2) == (volume_bytes == 9000)
    assert batches(tokens(tmp_path / "out")) == batches(cfg)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("volume_bytes", [2**36, 9000])
def test_shares_make_the_same_in_any_order_and_the_last_joins(order, volume_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "VOLUME_BYTES", volume_bytes)
    cfg = text(tmp_path)
    whole = tokenized.write(cfg, tmp_path / "whole", ALL)
    result = [tokenized.write(cfg, tmp_path / "out", Share(number, 3)) for number in order]
    assert result[:2] == [None, None] and result[2].holds == whole.holds
    assert arrays(tmp_path / "out") == arrays(tmp_path / "whole")
    assert tokenized.read(tmp_path / "out") == tokenized.read(tmp_path / "whole")
    assert not list((tmp_path / "out").glob("*.part"))


def test_a_share_makes_its_pieces_and_no_others(tmp_path):
    cfg = text(tmp_path)
    tokenized.write(cfg, tmp_path / "out", Share(1, 3))
    (unfinished,) = (tmp_path / "out").glob("*.part")
    numbers = [int(path.stem) for path in unfinished.glob("*.json")]
    assert sorted(numbers) == list(range(1, len(source_of(cfg, 0, Cache(Path("cache"))).pieces()), 3))
    with pytest.raises(UserError, match="^data.tokens: .*out has no tokens.json; compiler-trainer tokenize --out writes it"):
        batches(tokens(tmp_path / "out"))


KILLED = """
import os, sys, time
from pathlib import Path
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data import sources, tokenized, workers
from compiler_trainer.data.stored import Share
sources.PIECE_BYTES, workers.ALONE = 100_000, 1000
rename, ended = os.replace, []

def replace(source, target):  # after ten pieces, the job waits to be killed, so that it cannot end first
    while len(ended) == 10:
        time.sleep(60)
    rename(source, target)
    if target.endswith(".json"):
        ended.append(target)

os.replace = replace
tokenized.write(DataConfig(name="text", files=(sys.argv[1],)), Path(sys.argv[2]), Share(int(sys.argv[3]), 2, 1))
"""


def test_killed_twice_the_digests_are_those_of_an_undisturbed_run(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("".join(f"{i} is a number. " for i in range(300_000)))
    monkeypatch.setattr(sources, "PIECE_BYTES", 100_000)
    cfg = DataConfig(name="text", files=(str(tmp_path / "a.txt"),))
    tokenized.write(cfg, tmp_path / "whole", ALL)

    def start(number):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "a.txt"), str(tmp_path / "out"), str(number)]
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})

    def pieces():
        return len(list((tmp_path / "out").glob("*.part/*.json")))

    for _ in range(2):
        before, jobs, end = pieces(), [start(number) for number in range(2)], time.monotonic() + 60
        while pieces() < before + 4 and time.monotonic() < end:
            time.sleep(0.002)
        for job in jobs:
            job.send_signal(signal.SIGKILL)
        assert all(job.wait() == -signal.SIGKILL for job in jobs) and pieces() >= before + 4
    for number in range(2):
        tokenized.write(cfg, tmp_path / "out", Share(number, 2))
    assert arrays(tmp_path / "out") == arrays(tmp_path / "whole")


def test_tokens_that_moved_are_read_and_those_that_were_cut_or_altered_are_refused(tmp_path):
    tokenized.write(text(tmp_path), tmp_path / "out", ALL)
    before = batches(tokens(tmp_path / "out"))
    shutil.copytree(tmp_path / "out", tmp_path / "moved", copy_function=shutil.copyfile)
    shutil.rmtree(tmp_path / "out")
    assert batches(tokens(tmp_path / "moved")) == before
    (file,) = (tmp_path / "moved").glob("*/tokens.bin")
    content = file.read_bytes()
    for damaged in (content[:-2], b"x" + content[1:]):
        file.unlink()  # a thread may still read the mapped files
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="moved/[0-9a-f]*: is missing, truncated or changed; copy it again"):
            batches(tokens(tmp_path / "moved"))


def test_tokens_of_two_folders_are_mixed_by_weight(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name * 1000)
        tokenized.write(DataConfig(name="text", files=(str(tmp_path / name),)), tmp_path / f"of {name}", ALL)
    parts = [WeightedSource(name="tokens", tokens=str(tmp_path / f"of {name}"), weight=weight) for name, weight in (("a", 3.0), ("b", 1.0))]
    loader = build_datasets(DataConfig("mixture", sources=tuple(parts)), 16, 8).train
    assert [chr(token) for token in loader.next()["tokens"][:, 0].tolist()].count("a") == 6


def tokenizer(path):
    made = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.add_special_tokens(["</s>"])
    made.save(str(path))
    return str(path)


def test_tokens_of_another_tokenizer_or_kind_are_refused(tmp_path):
    tokenized.write(text(tmp_path), tmp_path / "out", ALL)
    other = tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="^data.tokenizer: is .*json, but .*out was made with bytes, which differs from it"):
        batches(tokens(tmp_path / "out", tokenizer=other))
    (tmp_path / "chat_template.jinja").write_text("x")
    manifest = json.loads((tmp_path / "out" / "tokens.json").read_text()) | {"chat": True}
    (tmp_path / "out" / "tokens.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="^data.chat: is false, but .*out was made with true; set it to true"):
        batches(tokens(tmp_path / "out"))


def test_tokens_of_another_chat_template_are_refused_unless_they_are_of_an_earlier_version(tmp_path):
    path, chats = write_tokenizer(tmp_path), tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    chats.write_text(json.dumps({"messages": messages}) + "\n")
    options = {"tokenizer": path, "chat": True, "eval_fraction": 0.0}
    tokenized.write(DataConfig(name="text", files=(str(chats),), **options), tmp_path / "out", ALL)
    assert build_datasets(tokens(tmp_path / "out", **options), 64, 1)
    write_template(tmp_path, CHATML.replace("<|im_start|>", "["))
    with pytest.raises(UserError, match="^data.tokenizer: has another chat template than the one that made .*out; set it to"):
        build_datasets(tokens(tmp_path / "out", **options), 64, 1)
    manifest = json.loads((tmp_path / "out/tokens.json").read_text())
    (tmp_path / "out/tokens.json").write_text(json.dumps({key: value for key, value in manifest.items() if key != "templates"}))
    assert build_datasets(tokens(tmp_path / "out", **options), 64, 1)


def test_labels_of_tokens_are_compared_as_they_are_written(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "label": "Yes"}\n{"text": "b", "label": "no"}\n')
    options = {"name": "text", "records": "classes", "cache": str(tmp_path / "cache")}
    tokenized.write(DataConfig(files=(str(path),), labels=("Yes", "no"), **options), tmp_path / "out", ALL)
    theirs = DataConfig(**options | {"name": "tokens"}, tokens=str(tmp_path / "out"), labels=("yes", "no"))
    with pytest.raises(UserError, match=r"^data.labels: is \['yes','no'\], but .*out was made with \['Yes','no'\]; set it to \['Yes','no'\]$"):
        batches(theirs)


def test_a_folder_of_other_tokens_is_not_written_over(tmp_path):
    cfg = text(tmp_path)
    tokenized.write(cfg, tmp_path / "out", ALL)
    before = arrays(tmp_path / "out")
    assert tokenized.write(cfg, tmp_path / "out", ALL).holds.documents == 400  # a second call makes nothing
    os.utime(tmp_path / "a.jsonl", ns=(2, 2))
    with pytest.raises(UserError, match="^--out: .*out holds tokens of other data, other options, or earlier versions of files"):
        tokenized.write(cfg, tmp_path / "out", ALL)
    assert arrays(tmp_path / "out") == before


def test_what_ahead_is_no_job_for_is_refused(tmp_path):
    with pytest.raises(UserError, match="^data.tokens: are already tokens"):
        tokenized.write(tokens(tmp_path), tmp_path / "out", ALL)
    with pytest.raises(UserError, match="^data.sources: are several; tokenize each into its own folder"):
        tokenized.write(DataConfig("mixture", sources=(WeightedSource(files=("a",)),)), tmp_path / "out", ALL)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="^--out: .*file: .*; choose a writable folder"):
        tokenized.write(text(tmp_path), tmp_path / "file", ALL)


def test_the_verb_says_what_to_train_with(tmp_path, capsys):
    path = text(tmp_path).files[0]
    call("tokenize", "data=text", f"data.files=[{path}]", "--out", str(tmp_path / "out"), "--shard", "0/2")
    assert capsys.readouterr().out.startswith("share 0/2 is done; the share that finishes last joins all")
    call("tokenize", "data=text", f"data.files=[{path}]", "--out", str(tmp_path / "out"), "--shard", "1/2", "--processes", "1")
    count, digest = sum(len(line.encode()) + 1 for line in LINES), tokenized.read(tmp_path / "out").digest
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"{count:,} tokens of 400 documents in {tmp_path / 'out'}, digest {digest}",
        f"train with: compiler-trainer data=tokens data.tokens={tmp_path / 'out'} data.tokenizer=bytes",
    ]


@pytest.mark.parametrize(("record", "options"), [
    ({"text": "a", "label": "Yes, it is"}, ["loss=classify", "data.records=classes", "data.labels=['Yes, it is',no]"]),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, ["data.chat=true", "data.train_on=last"]),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1}, ["loss=reward", "data.chat=true", "data.pairs=true", "data.margins=true"]),
])
def test_the_printed_options_take_the_tokens(record, options, tmp_path, capsys):
    folder = tmp_path / "it's (1)"
    folder.mkdir()
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|endoftext|>"}))
    (folder / "a.jsonl").write_text(json.dumps(record) + "\n")
    paths = {"data.files": [str(folder / "a.jsonl")], "data.tokenizer": str(folder / "tokenizer.json")}
    job = ["data=text", *(f"{name}={as_override(value)}" for name, value in paths.items()), *options]
    assert call("tokenize", *job, f"--out={folder / 'out'}", "--processes=1") == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("compiler-trainer ")[2])
    cfg = to_config(compose(words)).data
    assert tokenized.open_folder(Path(cfg.tokens), tokenizer_of(cfg), cfg).holds.documents == (2 if cfg.pairs else 1)


@pytest.mark.parametrize("shard", ["2/2", "1", "0/0", "-1/2", "a/b"])
def test_a_share_that_there_is_not_is_refused(shard, tmp_path, capsys):
    assert call("tokenize", f"--out={tmp_path}", f"--shard={shard}") == 2
    assert capsys.readouterr().err == f"error: --shard: {shard} is not a share; give I/N, I from 0 to N - 1, as 0/4\n"


def test_those_that_share_keep_out_who_makes_all(tmp_path):
    folder = tmp_path / "x.part"
    with folders.hold_lock(folders.lock_of(folder), shared=True), folders.hold_lock(folders.lock_of(folder), shared=True):
        other = subprocess.Popen([sys.executable, "-c", f"""
from pathlib import Path
from compiler_trainer.places import folders
with folders.hold_lock(folders.lock_of(Path({str(folder)!r}))):
    print("in", flush=True)
"""], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline().startswith("waiting for another process")
    assert other.stdout.readline() == "in\n" and other.wait() == 0


def test_pieces_that_are_there_are_joined_without_reading_again(tmp_path, monkeypatch):
    cfg = text(tmp_path)
    for number in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(stored, "is_complete", lambda *args: False)
            assert tokenized.write(cfg, tmp_path / "out", Share(number, 2)) is None
    monkeypatch.setattr(workers.Worker, "tokenize", None)
    assert tokenized.write(cfg, tmp_path / "out", ALL).holds.documents == 400
