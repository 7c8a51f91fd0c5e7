"""Input files, read without trust: regular files of text, with numbers in the range of int64 and finite floats.

YAML config files are checked before use, because with aliases a small file may stand for endlessly many values.
"""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.config.options import LARGEST, convert

PACKAGE = Path(__file__).resolve().parents[1]
# conf/ is next to the package in a clone, inside it if installed.
CONF = next(path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if (path / "train.yaml").is_file())


def is_remote(name: str) -> bool:
    """Return True if a name is in an object store, as s3://bucket/name."""
    return "://" in name


def text_of(path: Path) -> str:
    """Return the text of a file; raise UserError if it is not a regular file, cannot be read, or is not UTF-8."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(str(path), "is not a file; name one, or move it away")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(str(path), f"is not UTF-8: {error.reason} at byte {error.start}") from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, replacing any file of that name; raise UserError if that fails."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        partial.unlink(missing_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        is_in_the_way = error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
        fix = "move the file of that name away" if is_in_the_way else "make room, or get the right to write there"
        raise UserError(str(path), f"cannot be written: {error.strerror}; {fix}") from error


def json_of(path: Path, kind: Any = Any) -> Any:
    """Return the contents of a JSON file, checked to be of `kind`; raise UserError naming file and field."""
    return as_json(text_of(path), str(path), kind)


def lines_of(path: Path, kind: Any = Any) -> list[Any]:
    """Return the contents of each line of a JSON lines file. A truncated last line is left out.

    Raises UserError as `json_of` does.
    """
    lines = (line for line in text_of(path).splitlines(keepends=True) if line.endswith("\n"))
    return [as_json(line, f"{path}, line {number}", kind) for number, line in enumerate(lines, 1)]


def as_json(text: str, where: str, kind: Any) -> Any:
    """Return the value of a JSON text, checked to be of `kind`; raise UserError."""
    try:
        value = json.loads(text, parse_int=int64, parse_float=finite_float, parse_constant=finite_float)
        convert(kind, value, "")
        return value
    except ValueError as error:
        raise UserError(where, f"cannot be read: {one_line(error)}") from error
    except RecursionError as error:
        raise UserError(where, "cannot be read: it is nested too deep") from error
    except UserError as error:
        field = f"{error.place}: " if error.place else ""
        raise UserError(where, f"is not in the format that a run writes: {field}{error.message}") from error


def ends_of_answers(folder: Path) -> tuple[int, ...]:
    """Return the ids that end an answer of a model's folder: eos_token_id of generation_config.json, or config.json.

    Raises UserError if a file is not a JSON object.
    """
    for path in (folder / "generation_config.json", folder / "config.json"):
        try:  # a model's numbers may be infinite
            token_ids = json.loads(text_of(path)).get("eos_token_id") if path.is_file() else None
        except (ValueError, AttributeError) as error:
            raise UserError(str(path), f"is not a JSON object: {one_line(error)}") from error
        token_ids = token_ids if isinstance(token_ids, list) else [token_ids]
        if ids := tuple(i for i in token_ids if isinstance(i, int)):
            return ids
    return ()


def int64(digits: str) -> int:
    """Return an integer in the range of int64; raise ValueError."""
    if len(digits) > 20 or abs(int(digits)) > LARGEST:
        raise ValueError(f"{digits[:20]} is more than {LARGEST:,}")
    return int(digits)


def finite_float(text: str) -> float:
    """Return a finite number; raise ValueError."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is not a number")
    return value


# ---- YAML ----------------------------------------------------------------------------------------------


MOST = 100_000  # values in a file, aliases written out
INT, DIGITS = "tag:yaml.org,2002:int", 400  # most digits of a number; a float has at most 309
LEVELS = 3  # of nested groups


def check_folder(folder: Path) -> None:
    """Check the configs in a folder of the user's choices; raise UserError naming the file."""
    for level in range(LEVELS):
        for path in sorted(folder.glob("*/" * level + "*.yaml")):
            check_yaml(path)


def check_yaml(path: Path) -> None:
    """Raise UserError unless a file holds options, and not too many."""
    try:
        root = yaml.compose(text_of(path), yaml.SafeLoader)
        count = size(root, {}) if root is not None else 0
    except yaml.YAMLError as error:
        raise UserError(str(path), f"is not valid YAML: {one_line(error)}") from error
    except RecursionError as error:
        raise UserError(str(path), "is nested too deep, or contains itself") from error
    except OverflowError as error:
        raise UserError(str(path), f"{error}, more than a number may have") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UserError(str(path), "holds no options; write name: value")
    if count > MOST:
        raise UserError(str(path), f"has {count:,} values with aliases expanded; at most {MOST:,} are read")


def load_yaml(path: Path) -> dict[str, Any]:
    """Return the options in a file; raise UserError naming it."""
    check_yaml(path)
    try:
        options: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise UserError(str(path), f"cannot be read as a config: {one_line(error)}") from error
    return options


def size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values that a node stands for.

    Raises RecursionError if the node contains itself, OverflowError if a number is too large.
    """
    if isinstance(node, yaml.ScalarNode) and node.tag == INT and len(node.value) > DIGITS:
        raise OverflowError(f"line {node.start_mark.line + 1}: {node.value[:20]}... has {len(node.value):,} digits")
    if id(node) not in sizes:
        sizes[id(node)] = 0
        values = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = [size(n, sizes) for value in values for n in (value if isinstance(value, tuple) else (value,))]
        if 0 in parts:
            raise RecursionError
        sizes[id(node)] = 1 + sum(parts)
    return sizes[id(node)]
