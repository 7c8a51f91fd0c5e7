"""Damage a file of a run in every way that it may differ from the written one."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from compiler_trainer.checkpoint.index import ENVELOPE, ENVELOPE_PATTERN, FILE, sha256
from compiler_trainer.checkpoint.listing import remove
from tests.nightly.odd.files import BOMB, DEEP, DIGITS

Act = Callable[[Path], object]
BRACKETS = "[" * DEEP + "]" * DEEP
PICKLE = b"\x80\x04cposix\nsystem\n(S'touch RAN'\ntR."
GONE, MARK = "", "a value to be replaced"
VALUES = (  # as JSON, which is also YAML
    GONE, "null", "true", "0", "-1", "1.5", "1e300", "1e999", "NaN", "-Infinity", str(10**12), str(2**63), "9" * DIGITS,
    '""', '"x"', '"../../x"', '"/dev/zero"', '"<script>alert(1)</script>"', '"a\\nb"', '"\\ud800"', '"${model.dim}"',
    '"???"', f'"{"x" * 100_000}"', "[]", "{}", "[1, 2]", '{"a": 1}', '[{"a": [null]}]', BRACKETS,
)  # fmt: skip
TEXTS = {
    "a list": "[]\n", "a number": "5\n", "null": "null\n", "a text": '"x"\n', "no keys": "{}\n",
    "other keys": '{"<script>": 1}\n', "brackets": BRACKETS + "\n", "braces": '{"a":' * DEEP + "1" + "}" * DEEP + "\n",
    "digits": "9" * DIGITS + "\n", "NaN": "NaN\n", "half": '{"a": [1,\n',
}  # fmt: skip
YAMLS = {
    "a bomb": BOMB, "a cycle": "a: &a {b: *a}\n", "tabs": "train:\n\tsteps: 1\n", "a date": "train: 2020-01-01\n",
    "python": "!!python/object/apply:os.system ['touch RAN']\n", "two documents": "train: {}\n---\ntrain: {}\n",
    "itself": "train: {steps: '${train.steps}'}\n", "numbers as names": "1: 2\nnull: 3\n[1, 2]: 4\n",
    "twice": "train: {steps: 1}\ntrain: {steps: 2}\n",
}  # fmt: skip


class Damage(NamedTuple):
    """A way to damage a file: its name, the action, and True if nothing usable is left."""

    name: str
    act: Act
    is_total: bool = True


def damages(path: Path, draw: random.Random) -> Iterator[Damage]:
    """Yield ways to damage the intact file at a path."""
    yield from damages_of_any_file()
    if path.name == FILE:
        yield from (Damage(name, replace_content(text)) for name, text in TEXTS.items())
        yield from (Damage(f"{name}, signed", replace_content(sign(text))) for name, text in TEXTS.items())
        body = json.loads(ENVELOPE_PATTERN.fullmatch(path.read_bytes())[2])  # type: ignore[index]
        yield from (Damage(f"{name}, signed", replace_content(sign(text)), False) for name, text in change_one_field(body, draw, 120))
    elif path.suffix == ".safetensors":
        for name, header, size in headers(path, draw):
            yield Damage(name, set_header(header, size), "optim." not in name)  # not every command reads these
    elif path.suffix == ".yaml":
        yield from (Damage(name, replace_content(text)) for name, text in (TEXTS | YAMLS).items())
        options = yaml.safe_load(path.read_text())
        yield from (Damage(name, replace_content(text), False) for name, text in change_one_field(options, draw, 250))
    elif path.suffix == ".jsonl":
        yield from (Damage(name, replace_content(text)) for name, text in TEXTS.items() if text.endswith("\n"))
        first, *others = path.read_text().splitlines(keepends=True)
        for name, text in change_one_field(json.loads(first), draw, 40):
            yield Damage(name, replace_content(text + "\n" + "".join(others)), False)
    elif path.suffix == ".json":
        yield from (Damage(name, replace_content(text)) for name, text in TEXTS.items())
        yield from (Damage(name, replace_content(text), False) for name, text in change_one_field(json.loads(path.read_text()), draw, 40))
    else:
        yield from (Damage(f"line {at} odd", odd_line(at, draw.choice(VALUES)), False) for at in range(0, 100, 7))


def damages_of_any_file() -> Iterator[Damage]:
    """Yield ways to damage a file of any kind."""
    yield from removals()
    yield Damage("empty", replace_content(""))
    yield Damage("cut", lambda path: os.truncate(path, path.stat().st_size // 2))
    yield Damage("zeros", replace_content("\0" * 1000))
    yield Damage("a pickle", replace_content(PICKLE))
    yield Damage("not UTF-8", lambda path: path.write_bytes(b"a: \xff\n" + path.read_bytes()))


def removals() -> Iterator[Damage]:
    """Yield ways to remove a file or folder, or to replace it with something else."""
    yield Damage("missing", remove)
    yield Damage("a folder", replace_with(Path.mkdir))
    yield Damage("a FIFO", replace_with(os.mkfifo))
    yield Damage("a loop", replace_with(link_to_itself))
    yield Damage("a link to nothing", replace_with(lambda path: path.symlink_to("nothing")))
    yield Damage("a link to /dev/zero", replace_with(lambda path: path.symlink_to("/dev/zero")))


def folders() -> Iterator[Damage]:
    """Yield ways to damage a checkpoint folder and its parent folder."""
    names = {
        "a file": "step_00000007", "17 digits": "step_" + "9" * 17, "other digits": "step_0000000\u0663",
        "markup": "step_<script>", "a newline": "step_00000007\nerror: x", "half a name": "step_",
    }  # fmt: skip
    for kind, name in names.items():
        yield Damage(f"with {kind} next to it", create_next_to(name, Path.touch), False)
    for number in ("00000007", "00000002.tmp", "00000007.tmp", "00000002.old.tmp", "00000002.damaged"):
        at = f"step_{number}"
        yield Damage(f"{at} a file", create_next_to(at, Path.touch), False)
        yield Damage(f"{at} a folder", create_next_to(at, Path.mkdir), False)
        yield Damage(f"{at} a FIFO", create_next_to(at, os.mkfifo), False)
        yield Damage(f"{at} a loop", create_next_to(at, link_to_itself), False)
        yield Damage(f"{at} a copy", create_next_to(at, copy_checkpoint), False)
    yield Damage("no UTF-8", lambda path: os.mkdir(os.fsencode(path.parent) + b"/step_0000\xff"), False)
    yield Damage("renamed", lambda path: path.rename(path.with_name("step_00000009")))
    yield Damage("a file more", lambda path: (path / "evil.py").touch())
    yield Damage("all without an index", in_parent(remove_indices))
    yield Damage("all renamed", lambda path: path.parent.rename(path.parent.with_name("<b>")))
    replacements: dict[str, Act] = {"file": Path.touch, "FIFO": os.mkfifo, "loop": link_to_itself}
    for kind, make in replacements.items():
        yield Damage(f"a {kind}", replace_with(make))
        yield Damage(f"all of them a {kind}", in_parent(replace_with(make)))


# ---- acts ---------------------------------------------------------------------------------------------


def replace_content(content: str | bytes) -> Act:
    """Replace the content."""
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def replace_with(make: Act) -> Act:
    """Replace the file or folder with a new one."""

    def act(path: Path) -> None:
        remove(path)
        make(path)

    return act


def link_to_itself(path: Path) -> None:
    """Create a link to itself."""
    path.symlink_to(path)


def copy_checkpoint(path: Path) -> None:
    """Copy the newest checkpoint."""
    shutil.copytree(path.with_name("step_00000002"), path)


def remove_indices(path: Path) -> None:
    """Remove the index of every checkpoint."""
    for file in path.glob(f"*/{FILE}"):
        file.unlink()


def create_next_to(name: str, make: Act) -> Act:
    """Create a file or folder with a name in the same folder."""
    return lambda path: make(path.with_name(name))


def in_parent(act: Act) -> Act:
    """Apply the action to the parent folder."""
    return lambda path: act(path.parent)


def odd_line(number: int, value: str) -> Act:
    """Replace the second half of a line with a value, or remove the line."""

    def act(path: Path) -> None:
        lines = path.read_text().splitlines(keepends=True)
        line = lines[number % len(lines)]
        lines[number % len(lines)] = line[: len(line) // 2] + value + "\n" if value else ""
        path.write_text("".join(lines))

    return act


def set_header(header: bytes, size: int) -> Act:
    """Replace the header of a file of pieces, with a declared size, and record its digest in the index."""

    def act(path: Path) -> None:
        content = path.read_bytes()
        pieces = content[8 + int.from_bytes(content[:8], "little") :]
        start = struct.pack("<Q", size) + header
        path.write_bytes(start + pieces)
        index = path.parent / FILE
        body = json.loads(ENVELOPE_PATTERN.fullmatch(index.read_bytes())[2])  # type: ignore[index]
        body["files"][path.name] = {"bytes": len(start + pieces), "header_sha256": sha256((start + pieces)[: 8 + size])}
        index.write_bytes(sign(json.dumps(body)))

    return act


# ---- contents -----------------------------------------------------------------------------------------


def headers(path: Path, draw: random.Random) -> Iterator[tuple[str, bytes, int]]:
    """Yield (name, header, declared length) of a file of pieces."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    for declared in (0, 1, size - 1, size + 1, 2**31, 2**40):
        yield f"header of {declared:,} bytes", content[8 : 8 + size], declared
    for name, text in (*TEXTS.items(), *change_one_field(json.loads(content[8 : 8 + size]), draw, 60)):
        yield f"header {name}", text.encode(), len(text.encode())


def change_one_field(document: Any, draw: random.Random, count: int) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a JSON document with one odd field, evenly over the outermost fields."""
    places: dict[Any, list[tuple[Any, ...]]] = {}
    for place in fields(document):
        places.setdefault(place[0], []).append(place)
    for number in range(count):
        place, value = draw.choice(places[draw.choice([*places])]), VALUES[number % len(VALUES)]
        other = copy.deepcopy(document)
        *outer, last = place
        group = other
        for key in outer:
            group = group[key]
        if value == GONE:
            del group[last]
        else:
            group[last] = MARK
        yield f"{'.'.join(map(str, place))}={value[:30] or 'gone'}", json.dumps(other).replace(f'"{MARK}"', value)


def fields(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field of a document, as keys and indices."""
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield (*path, key)
            yield from fields(value, (*path, key))


def sign(body: str) -> bytes:
    """Return an index with a correct digest of any body."""
    return ENVELOPE % (sha256(body.encode()).encode(), body.encode())
