"""Every changed byte of a checkpoint is detected, and crafted ones are refused by name; neither is trained on."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stored_state import blank, build, saved

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import index as index_room
from compiler_trainer.checkpoint import listing
from compiler_trainer.config.errors import UserError

RANK_0, RANK_1 = "rank_00000.safetensors", "rank_00001.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Write a checkpoint of two ranks."""
    return saved(build("two"), tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copy(whole, tmp_path):
    """Return a copy of the checkpoint."""
    return Path(shutil.copytree(whole, tmp_path / "copy" / whole.name))


def said_of(path):
    """Return the line that refuses a checkpoint, the same in a check and in loading it on another mesh."""
    lines = []
    for act in (checkpoint.check, lambda path: checkpoint.load(blank("one"), checkpoint.opened(path))):
        with pytest.raises(UserError) as caught:
            act(path)
        lines.append(str(caught.value))
    assert lines[0] == lines[1] and "\n" not in lines[0]
    return lines[0]


# Accidents


@pytest.mark.parametrize("name", ["index.json", RANK_0, RANK_1])
def test_any_flipped_bit_is_seen(name, copy):
    file, draw = copy / name, random.Random(name)
    content = file.read_bytes()
    spots = [*range(12), *range(len(content) - 4, len(content)), *(draw.randrange(len(content)) for _ in range(24))]
    for at in spots:
        changed = bytearray(content)
        changed[at] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        assert said_of(copy).startswith(str(copy / name))
    file.write_bytes(content)
    checkpoint.check(copy)


@pytest.mark.parametrize("name", ["index.json", RANK_0, RANK_1])
def test_a_file_cut_short_or_grown_is_seen(name, copy):
    file = copy / name
    content = file.read_bytes()
    for changed in [content[: len(content) * tenth // 10] for tenth in range(10)] + [content + b"\0"]:
        file.write_bytes(changed)
        why = f"has {len(changed):,} bytes, and {len(content):,} were written" if "rank" in name else "was changed"
        assert said_of(copy).startswith(f"{file}: {why}")


def test_damage_names_file_and_tensor(copy):
    piece = checkpoint.opened(copy).pieces["model.matrix"][1]
    content = bytearray(piece.file.read_bytes())
    at = content.find(piece.read().numpy().tobytes())
    content[at] ^= 1
    piece.file.write_bytes(content)
    assert said_of(copy) == f"{copy / RANK_1}: model.matrix@4,0 was changed: its SHA-256 differs"


@pytest.mark.parametrize("name", ["index.json", RANK_0, RANK_1])
def test_a_lost_file_is_named(name, copy):
    (copy / name).unlink()
    assert said_of(copy).startswith(str(copy / name) if name != "index.json" else f"{copy}: has lost its index.json")


def test_a_strange_file_is_named_by_a_check(copy):
    (copy / "notes.txt").write_text("mine")
    with pytest.raises(checkpoint.Damaged, match="notes.txt: is not a file of this checkpoint"):
        checkpoint.check(copy)


def test_files_of_two_checkpoints_do_not_mix(copy, tmp_path):
    other = {key: (spec, {r: t.clone() for r, t in local.items()}) for key, (spec, local) in build("two").tensors().items()}
    other["model.matrix"][1][1][0, 0] += 1
    step = build("two")
    step.state = other
    shutil.copy(saved(step, tmp_path) / RANK_1, copy / RANK_1)
    assert said_of(copy).startswith(f"{copy / RANK_1}: its header was changed")


# Malice: an attacker who writes a checkpoint can write its digests too


def rewritten(path, change):
    """Change the index, and renew its digest."""
    contents = json.loads((path / "index.json").read_bytes())["checkpoint"]
    change(contents)
    write(path, json.dumps(contents).encode())


def write(path, text):
    (path / "index.json").write_bytes(index_room.ENVELOPE % (index_room.sha256(text).encode(), text))


def put(*keys):
    """Return a change of one entry, such as `put("step", -5)`."""
    def change(contents):
        *path, last, value = keys
        for key in path:
            contents = contents[key]
        contents[last] = value
    return change


def drop(*keys):
    def change(contents):
        for key in keys[:-1]:
            contents = contents[key]
        del contents[keys[-1]]
    return change


def moved_file(name):
    return lambda contents: contents["files"].update({name: contents["files"].pop(RANK_1)})


CRAFTED = {
    "step below zero": (put("step", -5), "step: -5 must be 0 or more"),
    "step no number": (put("step", "x"), "step: 'x' is not a whole number"),
    "no step": (drop("step"), "step: is missing and has no default"),
    "no data": (drop("data"), "data: is missing and has no default"),
    "a strange entry": (put("run", "rm -rf"), "run: no such option"),
    "another format": (put("format", "other"), "was written in another version's format, other; this version reads compiler-trainer 2"),
    "an absolute path": (moved_file("/etc/passwd"), "files: /etc/passwd must be rank_NNNNN.safetensors"),
    "a path upward": (moved_file("../rank_00001.safetensors"), "files: ../rank_00001.safetensors must be"),
    "a tensor of no file": (put("tensors", "model.new", {"dtype": "float32", "shape": [2]}), "model.new lacks a piece at [0]"),
    "a larger tensor": (put("tensors", "model.matrix", "shape", [8, 6]), "model.matrix lacks a piece at [7, 0]"),
    "a huge tensor": (put("tensors", "model.matrix", "shape", [10**18, 10**18]), "model.matrix lacks a piece at [0, 6]"),
    "a smaller tensor": (put("tensors", "model.matrix", "shape", [6, 6]), "model.matrix@4,0 is F32[3, 6], which is not a part of float32[6, 6]"),
    "fewer dims": (put("tensors", "model.matrix", "shape", [42]), "model.matrix@0,0 is F32[4, 6], which is not a part of float32[42]"),
    "another dtype": (put("tensors", "model.matrix", "dtype", "int32"), "model.matrix@0,0 is F32[4, 6], which is not a part of int32[7, 6]"),
    "no dtype": (put("tensors", "model.matrix", "dtype", "object"), "tensors.model.matrix.dtype: object must be a dtype that checkpoints support"),
    "a tensor less": (drop("tensors", "model.matrix"), "model.matrix@0,0 is not a piece of a tensor of this checkpoint"),
    "a file less": (drop("files", RANK_1), "lacks a piece at [4, 0]"),
    "an endless file": (put("files", RANK_1, "bytes", 10**18), "1,000,000,000,000,000,000 were written"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_index_is_refused_by_name(name, copy):
    change, message = CRAFTED[name]
    rewritten(copy, change)
    assert message in said_of(copy)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"null", b"[1]", b'{"step": ' + b"9" * 9_999 + b"}", b"\xff", b"", b"{}"])
def test_an_index_that_is_none_is_refused(text, copy):
    write(copy, text)
    assert said_of(copy).startswith(f"{copy / 'index.json'}: is not an index of a checkpoint")


def test_an_index_of_any_size_is_not_read(copy, monkeypatch):
    monkeypatch.setattr(index_room, "MOST_BYTES", 100)
    assert said_of(copy).startswith(f"{copy / 'index.json'}: was changed")


def forged(path, tensors, **digests):
    """Write rank 1's file with other pieces, and renew its entry in the index."""
    file = path / RANK_1
    save_file(tensors, file, metadata={key: index_room.sha256(t.numpy()) for key, t in tensors.items()} | digests)
    content = file.read_bytes()
    header = content[: 8 + struct.unpack("<Q", content[:8])[0]]
    rewritten(path, put("files", RANK_1, {"bytes": len(content), "header_sha256": index_room.sha256(header)}))


FORGED = {
    "overlapping pieces": ({"model.matrix@3,0": torch.ones(4, 6)}, "model.matrix has two pieces that overlap, one at [3, 0]"),
    "beyond its end": ({"model.matrix@4,1": torch.ones(3, 6)}, "model.matrix@4,1 is F32[3, 6], which is not a part of float32[7, 6]"),
    "too far to count": ({"model.matrix@" + "9" * 5000 + ",0": torch.ones(3, 6)}, "is not a piece of a tensor"),
    "below its begin": ({"model.matrix@-1,0": torch.ones(3, 6)}, "is not a piece of a tensor"),
    "without a place": ({"model.matrix": torch.ones(3, 6)}, "is not a piece of a tensor"),
    "nothing in it": ({"model.matrix@4,0": torch.ones(0, 6)}, "model.matrix@4,0 is F32[0, 6], which is not a part"),
    "another's digest": ({"model.matrix@4,0": torch.ones(3, 6)}, "lacks a piece"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_pieces_are_refused_by_name(name, copy):
    tensors, message = FORGED[name]
    forged(copy, tensors)
    assert message in said_of(copy)


def test_a_piece_without_a_digest_is_refused(copy):
    save_file({"model.matrix@4,0": torch.ones(3, 6)}, copy / RANK_1)
    content = (copy / RANK_1).read_bytes()
    header = content[: 8 + struct.unpack("<Q", content[:8])[0]]
    rewritten(copy, put("files", RANK_1, {"bytes": len(content), "header_sha256": index_room.sha256(header)}))
    assert "model.matrix@4,0 is not a piece of a tensor of this checkpoint" in said_of(copy)


def test_a_name_that_is_of_another_step_is_refused(copy):
    other = copy.rename(copy.with_name("step_00000099"))
    assert "is of step 3, not of the step in its name; rename it back" in said_of(other)


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda path: path.symlink_to(path)])
def test_what_is_no_folder_is_damage_and_goes_when_it_is_in_the_way(make, tmp_path):
    path = tmp_path / "step_00000004"
    make(path)
    assert "step_00000004: is not a folder" in said_of(path)
    for name in ("step_00000004.damaged", "step_00000005.tmp", "step_00000004.old.tmp"):
        make(tmp_path / name)
    listing.set_aside(path, "damaged")
    listing.clear(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000004.damaged"]
    listing.discard(tmp_path / "step_00000004.damaged")
    assert not [*tmp_path.iterdir()]


def test_digits_of_other_scripts_make_no_name(tmp_path):
    (tmp_path / "step_0000000\u0663").mkdir()
    assert checkpoint.complete(tmp_path) == []


class Bomb:
    """An object that runs a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["index.json", RANK_0, RANK_1, ".metadata"])
def test_a_pickle_runs_nothing(name, copy, tmp_path):
    mark = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(mark))
    (copy / name).write_bytes(bomb)
    if name == ".metadata":
        (copy / "index.json").unlink()
    elif name != "index.json":
        rewritten(copy, put("files", name, {"bytes": len(bomb), "header_sha256": index_room.sha256(bomb)}))
    assert str(copy) in said_of(copy) and not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()
