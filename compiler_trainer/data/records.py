"""One record, one document: a text, or the messages of a conversation; what is bad about a record that holds none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BYTE_ORDER_MARK = "\ufeff"
Message = dict[str, Any]


Ids = NDArray[np.integer]


class Document(NamedTuple):
    """A text, messages, or token ids; of a text in several parts some do not begin or end it."""

    content: str | list[Message] | Ids
    begins: bool = True
    ends: bool = True


class BadRecord(Exception):
    """Why a record holds no document."""


class Record(NamedTuple):
    """A document to be read, or refused: `read()` raises BadRecord, `where()` names it, which may mean to count."""

    where: Callable[[], str]
    read: Callable[[], Document]


def decoded(content: bytes, offset: int) -> str:
    """The text of bytes, the first of which is number `offset` of its file, without the byte order mark of a file.

    Raises BadRecord where it is not UTF-8.
    """
    try:
        return content.decode().removeprefix("" if offset else BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        bad = f"byte 0x{content[error.start]:02x} at offset {offset + error.start}"
        raise BadRecord(f"is not UTF-8: {bad} ({error.reason}); convert the file first") from error


def from_json(line: bytes, offset: int, column: str | None) -> Document:
    """The document of a line of JSON."""
    try:
        record = json.loads(decoded(line, offset))
    except json.JSONDecodeError as error:
        raise BadRecord(f"is not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise BadRecord("is nested too deep") from error
    except ValueError as error:  # Python's limit of digits
        raise BadRecord("holds a number of too many digits") from error
    if not isinstance(record, dict):
        raise BadRecord("is no object; each line must be one")
    return from_row(record, column)


def columns_of(names: Sequence[str], column: str | None) -> list[str]:
    """Those of a table's columns that make its documents; the last ones that could, where there are none."""
    if column is not None:
        return [column]
    return ["messages"] if "messages" in names else ["prompt", "completion"]


def from_row(row: Mapping[str, Any], column: str | None) -> Document:
    """The document of a row: the text in a column, without one a conversation."""
    if column is None:
        return Document(conversation(row))
    if column not in row:
        raise BadRecord(f'has no field "{column}"; each record must have one, or set data.text_column')
    value = row[column]
    return Document(ids_of(value, column) if isinstance(value, list | np.ndarray) else text_of(value, column))


def conversation(row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row, or those that its prompt and completion stand for."""
    if "messages" in row:
        return messages_of(row["messages"])
    if not row.keys() >= {"prompt", "completion"}:
        raise BadRecord('has neither "messages" nor "prompt" and "completion"')
    prompt, completion = (text_of(row[field], field) for field in ("prompt", "completion"))
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def ids_of(value: list[Any] | Ids, field: str) -> Ids:
    """The token ids in a field."""
    found = np.asarray(value, None if len(value) else np.int64)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise BadRecord(f'field "{field}" is a list, but not of token ids')
    return found


def text_of(value: Any, field: str) -> str:
    """The string in a field."""
    if value is None:
        raise BadRecord(f'field "{field}" is null')
    if isinstance(value, bytes):
        return decoded(value, 0)
    if not isinstance(value, str):
        raise BadRecord(f'field "{field}" is {type(value).__name__}, not a string')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(f"holds \\u{ord(value[error.start]):04x}, half of a surrogate pair") from error
    return value


def messages_of(value: Any) -> list[Message]:
    """The messages of a conversation, each with a role and, unless it calls tools, a text."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise BadRecord('field "messages" is no list of objects')
    return [checked(message, f"messages[{number}]") for number, message in enumerate(value)]


def checked(message: Message, where: str) -> Message:
    """A message whose role and text are strings."""
    fields = ("role",) if message.get("tool_calls") is not None else ("role", "content")
    return message | {field: text_of(message.get(field), f"{where}.{field}") for field in fields}
