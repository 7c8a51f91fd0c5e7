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


Columns = str | tuple[str, ...]  # what of a record makes its document: the text in one column, or several
CONVERSATION = ("messages", "prompt", "completion")
PAIR = ("prompt", "chosen", "rejected")


class Pair(NamedTuple):
    """Two conversations of which one was preferred; so many messages of both are the same."""

    chosen: list[Message]
    rejected: list[Message]
    shared: int


class Document(NamedTuple):
    """A text, messages, token ids, or a pair, two documents; of a text in several parts some do not begin or end it."""

    content: str | list[Message] | Ids | Pair
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


def from_json(line: bytes, offset: int, columns: Columns) -> Document:
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
    return from_row(record, columns)


def columns_of(names: Sequence[str], columns: Columns) -> list[str]:
    """Those of a table's columns that make its documents; the last ones that could, where there are none."""
    if isinstance(columns, str):
        return [columns]
    if columns == PAIR:
        return [name for name in PAIR if name != "prompt" or name in names]
    return ["messages"] if "messages" in names else ["prompt", "completion"]


def from_row(row: Mapping[str, Any], columns: Columns) -> Document:
    """The document of a row: the text in a column, a conversation, or a pair of them."""
    if not isinstance(columns, str):
        return Document(pair(row) if columns == PAIR else conversation(row))
    if columns not in row:
        raise BadRecord(f'has no field "{columns}"; each record must have one, or set data.text_column')
    value = row[columns]
    return Document(ids_of(value, columns) if isinstance(value, list | np.ndarray) else text_of(value, columns))


def conversation(row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row, or those that its prompt and completion stand for."""
    if "messages" in row:
        return messages_of(row["messages"])
    if not row.keys() >= {"prompt", "completion"}:
        raise BadRecord('has neither "messages" nor "prompt" and "completion"')
    prompt, completion = (text_of(row[field], field) for field in ("prompt", "completion"))
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def pair(row: Mapping[str, Any]) -> Pair:
    """The two conversations of a row: its prompt, if it has one, with either answer."""
    if not row.keys() >= {"chosen", "rejected"}:
        raise BadRecord('has no "chosen" and "rejected", the answers of a preference pair')
    chosen, rejected = (with_prompt(row, answers_of(row[field], field), field) for field in ("chosen", "rejected"))
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    for field, messages in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in messages[shared:]):
            raise BadRecord(f'field "{field}" holds nothing of the assistant that the other answer has not, too')
    return Pair(chosen, rejected, shared)


def answers_of(value: Any, field: str) -> list[Message]:
    """The messages of an answer, which may be its text alone."""
    if isinstance(value, list):
        return messages_of(value, field)
    return [{"role": "assistant", "content": text_of(value, field)}]


def with_prompt(row: Mapping[str, Any], answer: list[Message], field: str) -> list[Message]:
    """An answer after its prompt; one that begins with another role has it in itself."""
    if not answer or answer[0]["role"] != "assistant":
        return answer
    if (prompt := row.get("prompt")) is None:
        raise BadRecord(f'has no "prompt", and field "{field}" begins with the answer')
    asked = messages_of(prompt, "prompt") if isinstance(prompt, list) else None
    return (asked or [{"role": "user", "content": text_of(prompt, "prompt")}]) + answer


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


def messages_of(value: Any, field: str = "messages") -> list[Message]:
    """The messages of a conversation, each with a role and, unless it calls tools, a text."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise BadRecord(f'field "{field}" is no list of objects')
    return [checked(message, f"{field}[{number}]") for number, message in enumerate(value)]


def checked(message: Message, where: str) -> Message:
    """A message whose role and text are strings."""
    fields = ("role",) if message.get("tool_calls") is not None else ("role", "content")
    return message | {field: text_of(message.get(field), f"{where}.{field}") for field in fields}
