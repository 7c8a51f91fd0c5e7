"""Hostile files, written once and passed to many commands."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(b)}: &{chr(b)} [{', '.join([f'*{chr(b - 1)}'] * 9)}]\n" for b in range(ord("b"), ord("j"))
)
DEEP = 100_000  # brackets
DIGITS = 5_000
WORDS: dict[str, object] = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def make(folder: Path) -> dict[str, list[str]]:
    """Write the files; return paths by purpose: text, tokenizer, folder (of a model), yaml, place (to write to)."""
    folder.mkdir(parents=True)
    return {
        "text": texts(folder),
        "tokenizer": tokenizers(folder),
        "folder": models(folder),
        "yaml": yamls(folder),
        "place": places(folder),
    }


def texts(folder: Path) -> list[str]:
    """Return paths of files that are not text, never end, or do not exist."""
    contents = {
        "empty.txt": b"",
        "one.txt": b"x",
        "latin.txt": "caf\xe9".encode("latin-1"),
        "zeros.txt": bytes(1000),
        "deep.jsonl": b"[" * DEEP + b"]" * DEEP + b"\n",
        "nested.jsonl": b'{"text": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
        "digits.jsonl": b'{"text": ' + b"9" * DIGITS + b"}\n",
        "number.jsonl": b'{"text": 5}\n',
        "null.jsonl": b'{"text": null}\n{"text": "a"}\n',
        "cut.jsonl": b'{"text": "a"}\n{"text": "b',
        "surrogate.jsonl": b'{"text": "\\ud800"}\n' * 100,
        "torn.parquet": b"PAR1" + bytes(50) + b"PAR1",
        "torn.json": b"{",
    }
    paths = [write_file(folder / name, content) for name, content in contents.items()]
    pq.write_table(pa.table({"text": pa.array([1, 2, 3])}), folder / "numbers.parquet")
    pq.write_table(pa.table({"other": pa.array(["a"])}), folder / "other.parquet")
    os.mkfifo(folder / "pipe.txt")
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    (folder / "nothing").mkdir()
    (folder / "closed").mkdir()
    write_file(folder / "closed/text.txt", b"text")
    os.chmod(folder / "closed", 0)
    named = ["numbers.parquet", "other.parquet", "pipe.txt", "loop.txt", "nothing", "closed", "gone.txt", "x" * 300]
    return [*paths, *(str(folder / name) for name in named), "/dev/zero", "/dev/null", "/", "''"]


def tokenizers(folder: Path) -> list[str]:
    """Return paths of tokenizers without words or with a huge id, and of files that are not tokenizers."""
    contents: dict[str, object] = {
        "no_words.json": WORDS | {"model": {"type": "BPE", "vocab": {}, "merges": []}},
        "no_unknown.json": WORDS | {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
        "gaps.json": WORDS | {"model": {"type": "WordLevel", "vocab": {"a": 2**40}, "unk_token": "a"}},
        "a_list.json": [],
        "a_number.json": 5,
        "other.json": {"model": {"type": "pickle"}},
    }
    paths = [write_file(folder / name, json.dumps(content).encode()) for name, content in contents.items()]
    paths.append(write_file(folder / "torn_words.json", b'{"version"'))
    return [*paths, str(folder / "gone.json"), str(folder), "/dev/zero"]


def models(folder: Path) -> list[str]:
    """Return model folders that are damaged, far too large, or ask to run code."""
    llama = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 257}
    configs: dict[str, object] = {
        "keyless": {},
        "unknown": {"model_type": "no_such_model"},
        "huge": llama | {"hidden_size": 10**12},
        "wide": llama | {"vocab_size": 10**12},
        "deep": llama | {"num_hidden_layers": 10**12},
        "negative": llama | {"hidden_size": -32},
        "words": llama | {"hidden_size": "many"},
        "code": {"model_type": "own", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
        "list": [],
    }
    paths = []
    for name, config in configs.items():
        (folder / name).mkdir()
        write_file(folder / name / "config.json", json.dumps(config).encode())
        write_file(folder / name / "evil.py", f"open({str(folder / 'RAN')!r}, 'w').close()".encode())
        paths.append(str(folder / name))
    weights = {
        "no_weights": None,
        "torn_weights": b"\x10",
        "long_header": struct.pack("<Q", 2**60) + b"{}",
        "no_tensors": struct.pack("<Q", 2) + b"{}",
        "pickled": b"\x80\x04cos\nsystem\n(S'touch " + str(folder / "RAN").encode() + b"'\ntR.",
    }
    for name, content in weights.items():
        (folder / name).mkdir()
        write_file(folder / name / "config.json", json.dumps(llama).encode())
        if content is not None:
            file = "pytorch_model.bin" if name == "pickled" else "model.safetensors"
            write_file(folder / name / file, content)
        paths.append(str(folder / name))
    return [*paths, str(folder / "gone"), str(folder / "one.txt"), "/proc/self", "''"]


def yamls(folder: Path) -> list[str]:
    """Return config folders whose `odd.yaml` is invalid or takes forever to read."""
    contents = {
        "bomb": BOMB.encode(),
        "latin": "# @package _global_\nrun: {dir: caf\xe9}\n".encode("latin-1"),
        "torn": b"train: {steps: ",
        "tabs": b"train:\n\tsteps: 1\n",
        "number": b"5\n",
        "python": b"!!python/object/apply:os.system ['touch " + str(folder / "RAN").encode() + b"']\n",
        "cycle": b"a: &a {b: *a}\n",
        "deep": b"[" * 5000,
    }
    paths = []
    for name, content in contents.items():
        (folder / "yaml" / name / "odd").mkdir(parents=True)
        write_file(folder / "yaml" / name / "odd/odd.yaml", content)
        paths.append(str(folder / "yaml" / name))
    return paths


def places(folder: Path) -> list[str]:
    """Return paths that cannot be written."""
    return [str(folder / "one.txt"), str(folder / "one.txt/below"), "/proc/x", "/dev/null/x", "/sys/x", "''",
            str(folder / ("y" * 300)), str(folder / "loop.txt/x"), "/" + "z/" * 3000]  # fmt: skip


def write_file(path: Path, content: bytes) -> str:
    """Write a file and return its path."""
    path.write_bytes(content)
    return str(path)
