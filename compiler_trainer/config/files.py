"""Files as input, taken at no more than their word: regular ones, of text, of numbers that others can compute with."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import LARGEST, convert


def is_remote(name: str) -> bool:
    """Whether a name is that of something in a store, s3://bucket/name."""
    return "://" in name


def text_of(path: Path) -> str:
    """The text of a file; raises UserError naming it where it is none that ends, cannot be read, or is not UTF-8."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(str(path), "is not a file; name one, or move it away")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(str(path), f"is not UTF-8: {error.reason} at byte {error.start}") from error


def put(path: Path, text: str) -> None:
    """Write a file under its name once it is whole, whatever was there; raises UserError where that cannot be."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        partial.unlink(missing_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise UserError(str(path), f"cannot be written: {error.strerror}; move away what is there") from error


def json_of(path: Path, kind: Any = Any) -> Any:
    """What a JSON file holds, of a type as `convert` has them; raises UserError naming file and field."""
    return as_json(text_of(path), str(path), kind)


def lines_of(path: Path, kind: Any = Any) -> list[Any]:
    """What each line of a file of JSON holds; a last line that was cut short is none. Raises UserError as `json_of`."""
    lines = (line for line in text_of(path).splitlines(keepends=True) if line.endswith("\n"))
    return [as_json(line, f"{path}, line {number}", kind) for number, line in enumerate(lines, 1)]


def as_json(text: str, where: str, kind: Any) -> Any:
    """What a text says, as it is written."""
    try:
        value = json.loads(text, parse_int=whole, parse_float=finite, parse_constant=finite)
        convert(kind, value, "")
        return value
    except ValueError as error:
        raise UserError(where, f"cannot be read: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(where, "cannot be read: it is nested too deep") from error
    except UserError as error:
        field = f"{error.where}: " if error.where else ""
        raise UserError(where, f"is not what a run writes: {field}{error.message}") from error


def whole(digits: str) -> int:
    """A whole number that int64 holds."""
    if len(digits) > 20 or abs(int(digits)) > LARGEST:
        raise ValueError(f"{digits[:20]} is more than {LARGEST:,}")
    return int(digits)


def finite(text: str) -> float:
    """A number that is one."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is not a number")
    return value
