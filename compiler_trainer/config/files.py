"""Input files, read without trust: regular files of text, with numbers in the range of int64 and finite floats."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import LARGEST, convert


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


def put(path: Path, text: str) -> None:
    """Write a file atomically, replacing any file of that name; raise UserError if that fails."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        partial.unlink(missing_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise UserError(str(path), f"cannot be written: {error.strerror}; move the file of that name away") from error


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
        raise UserError(where, f"cannot be read: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(where, "cannot be read: it is nested too deep") from error
    except UserError as error:
        field = f"{error.where}: " if error.where else ""
        raise UserError(where, f"is not in the format that a run writes: {field}{error.message}") from error


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
