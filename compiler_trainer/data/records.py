"""Parse one record into one document: a text, or the messages of a conversation; or explain why it has none."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

BYTE_ORDER_MARK = "\ufeff"
Message = dict[str, Any]
Ids = NDArray[np.integer]
ASSISTANT = "assistant"


class Fields(NamedTuple):
    """The fields of a record that make up its document.

    These are a text, or ids, in `column`; or the messages of a `conversation` or of a `pair` of them, with those
    `names` that the chat template uses apart from messages.
    """

    kind: Literal["text", "conversation", "pair"]
    column: str = "text"
    names: frozenset[str] = frozenset()

    def required(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the fields that a record with the fields `names` needs; the last alternative if it has neither."""
        if self.kind == "text":
            return (self.column,)
        if self.kind == "pair":
            return ("prompt", "chosen", "rejected") if "prompt" in names else ("chosen", "rejected")
        return ("messages",) if "messages" in names else ("prompt", "completion")

    def used_names(self, names: Collection[str]) -> list[str]:
        """Return the fields to read of a record with the fields `names`, in order; missing required ones come last."""
        required = self.required(names)
        needed = {*required, *(self.names if self.kind != "text" else ())}
        return [*(name for name in names if name in needed), *(name for name in required if name not in names)]


def text_fields(column: str) -> Fields:
    return Fields("text", column)


class Conversation(NamedTuple):
    """Messages, and the chat template's other variables; answers among the `first` messages are not labels."""

    messages: list[Message]
    names: dict[str, Any] = {}
    first: int = 0

    @property
    def labelled(self) -> list[int]:
        """The numbers of the messages that are labels."""
        numbers = range(self.first, len(self.messages))
        return [i for i in numbers if self.messages[i]["role"] == ASSISTANT and is_counted(self.messages[i])]


class Pair(NamedTuple):
    """Two conversations, of which one was preferred."""

    chosen: Conversation
    rejected: Conversation


class Document(NamedTuple):
    """A text, a conversation, token ids, or a pair, which is two documents.

    `begins` and `ends` are False for a part of a text that does not begin or end it. `unused` are fields of the record
    that are not part of the document.
    """

    content: str | Conversation | Ids | Pair
    begins: bool = True
    ends: bool = True
    unused: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """The line that names unused fields, if there are any."""
        return [one_line(f"fields not used: {', '.join(self.unused)}")] if self.unused else []


class BadRecord(Exception):
    """The reason why a record has no document, in one line of bounded length."""

    def __init__(self, reason: str):
        super().__init__(one_line(reason))


def one_line(text: str, limit: int = 400) -> str:
    """Return a text on one line, with its middle cut out if it is longer than `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit // 2]} ... {line[-limit // 2 :]}"


class Record(NamedTuple):
    """A document to be read: `read()` returns it or raises BadRecord; `where()` returns its name.

    `where()` may have to count the lines of a file.
    """

    where: Callable[[], str]
    read: Callable[[], Document]


def decode(content: bytes, offset: int) -> str:
    """Decode bytes, the first of which has offset `offset` in its file, and remove the file's byte order mark.

    Raises BadRecord if they are not UTF-8.
    """
    try:
        return content.decode().removeprefix("" if offset else BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at offset {offset + error.start}"
        raise BadRecord(f"is not UTF-8: {byte} ({error.reason}); convert the file first") from error


def from_json(line: bytes, offset: int, fields: Fields) -> Document:
    """Return the document of a line of JSON."""
    try:
        record = json.loads(decode(line, offset))
    except json.JSONDecodeError as error:
        raise BadRecord(f"is not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise BadRecord("is nested too deep") from error
    except ValueError as error:  # Python limits the digits of a number
        raise BadRecord("contains a number with too many digits") from error
    if not isinstance(record, dict):
        raise BadRecord("is not an object; each line must be one")
    return from_row(record, fields)


def from_table_row(row: Mapping[str, Any], fields: Fields, columns: Sequence[str] = ()) -> Document:
    """Return the document of a row of a table that has `columns`.

    Arrow gives each struct all keys that any row has, null if a row lacks one; such keys are removed.
    """
    values = row if fields.kind == "text" else {name: without_nulls(value) for name, value in row.items()}
    return from_row(values, fields, columns)


def without_nulls(value: Any) -> Any:
    """Return a value without keys that are null, at any depth."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def from_row(row: Mapping[str, Any], fields: Fields, columns: Sequence[str] = ()) -> Document:
    """Return the document of a row: the text in a column, a conversation, or a pair of them.

    `columns` are all fields of the record, if the row has only those to read.
    """
    used_names = fields.used_names(row)
    unused = tuple(name for name in columns or row if name not in used_names and row.get(name, "") is not None)
    content = content_of(row, fields)
    if isinstance(content, Pair) and row.get("prompt") is not None and not begins_with(content, row["prompt"]):
        unused = (*unused, "prompt")
    return Document(content, unused=unused)


def begins_with(content: Pair, prompt: Any) -> bool:
    """Return True if a conversation of a pair begins with the prompt; otherwise each has a prompt of its own."""
    prompt_messages = field_messages("user", prompt, "prompt")
    return any(conversation.messages[: len(prompt_messages)] == prompt_messages for conversation in content)


def content_of(row: Mapping[str, Any], fields: Fields) -> str | Conversation | Ids | Pair:
    """Return the content of a row's document."""
    if fields.kind == "pair":
        return pair(row, fields)
    if fields.kind == "conversation":
        return conversation(row, fields)
    if fields.column not in row:
        raise BadRecord(f'has no field "{fields.column}"; each record must have one, or set data.text_column')
    value = row[fields.column]
    return ids_of(value, fields.column) if isinstance(value, list | np.ndarray) else text_of(value, fields.column)


def conversation(row: Mapping[str, Any], fields: Fields) -> Conversation:
    """Return the messages of a row, or its prompt and completion, of which only the completion is labels."""
    if "messages" in row:
        return Conversation(messages_of(row["messages"]), names_of(row, fields))
    if not row.keys() >= {"prompt", "completion"}:
        raise BadRecord(f'has neither "messages" nor "prompt" and "completion"{list_fields(row)}')
    prompt = field_messages("user", row["prompt"], "prompt")
    answer = field_messages(ASSISTANT, row["completion"], "completion")
    return Conversation(prompt + answer, names_of(row, fields), len(prompt))


def list_fields(row: Mapping[str, Any]) -> str:
    """Return a suffix for messages that lists the fields of a row."""
    return f"; its fields are {', '.join(list(row)[:8])}" if row else ""


def names_of(row: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Return the chat template's variables apart from messages: tools, documents and others that it names."""
    names = {name: row[name] for name in fields.names if row.get(name) is not None}
    extra = names.pop("chat_template_kwargs", {})
    if not isinstance(extra, dict):
        raise BadRecord('field "chat_template_kwargs" is not an object')
    names |= extra
    for field in ("tools", "documents"):
        if field in names:
            names[field] = objects_in(names[field], field)
    return names


def objects_in(value: Any, field: str) -> list[dict[str, Any]]:
    """Return a list of objects, which may be given as a JSON string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRecord(f'field "{field}" is a string, but not JSON: {error}') from error
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRecord(f'field "{field}" is not a list of objects')
    return value


def pair(row: Mapping[str, Any], fields: Fields) -> Pair:
    """Return the two conversations of a row: its prompt, if it has one, with each answer.

    Messages that both conversations share at the start are not labels.
    """
    if not row.keys() >= {"chosen", "rejected"}:
        raise BadRecord(f'has no "chosen" and "rejected", the answers of a preference pair{list_fields(row)}')
    chosen, rejected = (
        add_prompt(row, field_messages(ASSISTANT, row[field], field), field) for field in ("chosen", "rejected")
    )
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    for field, messages in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == ASSISTANT for message in messages[shared:]):
            raise BadRecord(f'field "{field}" has no text of the assistant that differs from the other answer')
    names = names_of(row, fields)
    return Pair(Conversation(chosen, names, shared), Conversation(rejected, names, shared))


def field_messages(role: str, value: Any, field: str) -> list[Message]:
    """Return the messages in a field: a list, a single one, or the text of one by `role`."""
    if isinstance(value, list | dict):
        return messages_of(value if isinstance(value, list) else [value], field)
    return [{"role": role, "content": text_of(value, field)}]


def add_prompt(row: Mapping[str, Any], answer: list[Message], field: str) -> list[Message]:
    """Return an answer after its prompt; an answer that begins with another role includes its prompt."""
    if not answer or answer[0]["role"] != ASSISTANT:
        return answer
    if row.get("prompt") is None:
        raise BadRecord(f'has no "prompt", and field "{field}" begins with the answer{list_fields(row)}')
    return field_messages("user", row["prompt"], "prompt") + answer


def ids_of(value: list[Any] | Ids, field: str) -> Ids:
    """Return the token ids in a field."""
    ids = np.asarray(value, None if len(value) else np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise BadRecord(f'field "{field}" is a list, but not of token ids')
    return ids


def text_of(value: Any, field: str) -> str:
    """Return the string in a field."""
    if value is None:
        raise BadRecord(f'field "{field}" is null')
    if isinstance(value, bytes):
        return decode(value, 0)
    if not isinstance(value, str):
        raise BadRecord(f'field "{field}" is {type(value).__name__}, not a string')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(f"holds \\u{ord(value[error.start]):04x}, an unpaired surrogate") from error
    return value


def messages_of(value: Any, field: str = "messages") -> list[Message]:
    """Return the messages of a conversation, without keys that are null.

    Each needs a role and, unless it calls tools, a text.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise BadRecord(f'field "{field}" is not a list of objects')
    return [check_message(message, f"{field}[{number}]") for number, message in enumerate(value)]


def check_message(message: Message, where: str) -> Message:
    """Return a message as transformers passes it to a template.

    Raises BadRecord if its role, text or weight is invalid.
    """
    if "role" not in message and "from" in message:
        fix = 'name them "role" and "content", with the roles user, assistant, system and tool'
        raise BadRecord(f'field "{where}" has "from" and "value"; {fix}')
    keys = {key: value for key, value in message.items() if value is not None}
    keys["role"] = text_of(keys.get("role"), f"{where}.role")
    calls = keys.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRecord(f'field "{where}.tool_calls" is not a list of objects')
    if isinstance(keys.get("content"), list):
        for number, part in enumerate(keys["content"]):
            check_part(part, f"{where}.content[{number}]")
    elif "content" in keys or not keys.get("tool_calls"):
        keys["content"] = text_of(keys.get("content"), f"{where}.content")
    if is_counted(keys, where) and keys["role"] != ASSISTANT and {"weight", "train"} & keys.keys():
        key = "weight" if "weight" in keys else "train"
        problem = f"is {keys[key]} in a message of role {keys['role']}, and only answers of the assistant are labels"
        raise BadRecord(f'field "{where}.{key}" {problem}; leave it out')
    return keys


def check_part(part: Any, where: str) -> None:
    """Raise BadRecord unless a part of a message is text."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise BadRecord(f'field "{where}" is of type {kind}; only parts of type text are trained on')
    text_of(part.get("text"), f"{where}.text")


def is_counted(message: Message, where: str = "message") -> bool:
    """Return True unless `weight` is 0 or `train` is false; raise BadRecord for other values than 0, 1 and bools."""
    for key in ("weight", "train"):
        if key in message and message[key] not in (0, 1):
            raise BadRecord(f'field "{where}.{key}" is {message[key]!r}; an answer counts (1, true) or not (0, false)')
    return bool(message.get("weight", 1)) and bool(message.get("train", True))
