"""The documents of records, their messages, and the reason why a record has none.

Messages are those of OpenAI, `role` and `content`, or of ShareGPT, `from` and `value`, which become the former.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.errors import one_line

BYTE_ORDER_MARK = "\ufeff"
Message = dict[str, Any]
Ids = NDArray[np.integer]
ASSISTANT = "assistant"
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "function_call"), ASSISTANT),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}


class Fields(NamedTuple):
    """The fields of a record that make up its document.

    These are a text, or ids, in `column`; or those of a format (formats.py) of a `conversation` or of a `pair` of them,
    with those `names` that the chat template uses apart from messages. With `last_only`, only the last answer of a
    conversation is labels. With `images`, messages may have images, whose paths are relative to the folder `base`. A
    `record` is read as it is. The text of a `class` has a label, one of `labels`; `passages` are texts, a query and its
    passage, and `triplets` one more; `answers` are conversations with a label. With `margins`, a pair has one.
    """

    kind: Literal["text", "conversation", "pair", "record", "classes", "passages", "triplets", "answers"]
    column: str = "text"
    names: frozenset[str] = frozenset()
    last_only: bool = False
    labels: tuple[str, ...] = ()
    margins: bool = False
    images: bool = False
    base: str = ""


def text_fields(column: str) -> Fields:
    return Fields("text", column)


class Conversation(NamedTuple):
    """Messages, and the chat template's other variables; answers among the `first` messages are not labels.

    With `last_only`, no answer but the last one is labels. `images` are paths, urls or contents of files, in the order
    of their parts in messages. In a prompt, `image_texts` take the places that the template marks by `image_token`.
    """

    messages: list[Message]
    names: dict[str, Any] = {}
    first: int = 0
    last_only: bool = False
    images: tuple[str | bytes, ...] = ()
    image_texts: tuple[str, ...] = ()
    image_token: str = ""

    @property
    def labelled(self) -> list[int]:
        """The numbers of the messages that are labels."""
        answers = [i for i in range(self.first, len(self.messages)) if self.messages[i]["role"] == ASSISTANT]
        return [i for i in (answers[-1:] if self.last_only else answers) if is_counted(self.messages[i])]


class Pair(NamedTuple):
    """Two conversations, of which one was preferred."""

    chosen: Conversation
    rejected: Conversation


class Texts(NamedTuple):
    """A query, the passage that belongs to it, and maybe one that does not."""

    texts: tuple[str, ...]


class Document(NamedTuple):
    """A text, a conversation, token ids, a pair or texts, which are several documents, or all fields of a record.

    `begins` and `ends` are False for a part of a text that does not begin or end it. `unused` are fields of the record
    that are not part of the document. `form` is the format of a conversation's record, with its fields. `value` is the
    number of a text's class, a pair's margin, or 1 for a desirable answer and 0 for others.
    """

    content: str | Conversation | Ids | Pair | Texts | Message
    begins: bool = True
    ends: bool = True
    unused: tuple[str, ...] = ()
    form: str = ""
    value: float | None = None

    @property
    def notes(self) -> list[str]:
        """The lines that name the format and the unused fields, if there are any."""
        notes = [f"read as {self.form}"] if self.form else []
        return [*notes, shorten(f"fields not used: {', '.join(self.unused)}")] if self.unused else notes


class BadRecord(Exception):
    """The reason why a record has no document, in one line of bounded length."""

    def __init__(self, reason: str):
        super().__init__(shorten(reason))


def shorten(text: str, limit: int = 400) -> str:
    """Return a text on one line, with its middle cut out if it is longer than `limit` characters."""
    line = one_line(text)
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


def ids_of(value: list[Any] | Ids, field: str) -> Ids:
    """Return the token ids in a field."""
    ids = np.asarray(value, None if len(value) else np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise BadRecord(f'field "{field}" is a list, but not of token ids')
    return ids


def number_of(value: Any, field: str) -> float:
    """Return the number in a field; a table of strings has its text."""
    try:
        number = float(value if isinstance(value, int | float | str) else "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadRecord(f'field "{field}" is {value!r}, not a number')
    return number


def class_of(value: Any, labels: tuple[str, ...]) -> int:
    """Return the number of the class that a label names: one of `labels`, or their number, counted from 0.

    Numbers count as names if any of `labels` is a number.
    """
    name = value if isinstance(value, str) else json.dumps(value)
    if name in labels:
        return labels.index(name)
    if name.isdecimal() and int(name) < len(labels) and not any(label.isdecimal() for label in labels):
        return int(name)
    raise BadRecord(f'field "label" is {value!r}; data.labels are {", ".join(labels)}')


def truth_of(value: Any, field: str) -> float:
    """Return 1 for true and 0 for false in a field; a table of strings has their names."""
    names = {"true": 1.0, "1": 1.0, "false": 0.0, "0": 0.0}
    name = str(value).lower()
    if name not in names:
        raise BadRecord(f'field "{field}" is {value!r}, neither true nor false')
    return names[name]


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
    keys = {key: value for key, value in message.items() if value is not None}
    if "from" in keys:
        keys = from_sharegpt(keys, where)
    keys["role"] = text_of(keys.get("role"), f"{where}.role")
    calls = keys.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRecord(f'field "{where}.tool_calls" is not a list of objects')
    if calls:
        keys["tool_calls"] = [with_object(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
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


def from_sharegpt(turn: Message, where: str) -> Message:
    """Return a turn of ShareGPT as a message: `from` becomes its role, `value` its content or its tool calls."""
    if both := sorted({"role", "content"} & turn.keys()):
        raise BadRecord(f'field "{where}" has both "from" and "{both[0]}"; remove one of them')
    speaker, value = text_of(turn["from"], f"{where}.from"), text_of(turn.get("value"), f"{where}.value")
    if speaker not in SHAREGPT_ROLES:
        raise BadRecord(f'field "{where}.from" is {speaker!r}; it must be one of {", ".join(SHAREGPT_ROLES)}')
    others = {key: item for key, item in turn.items() if key not in ("from", "value")}
    content = {"tool_calls": calls_in(value, where)} if speaker == "function_call" else {"content": value}
    return {"role": SHAREGPT_ROLES[speaker], **content, **others}


def calls_in(text: str, where: str) -> list[dict[str, Any]]:
    """Return the tool calls in a JSON text: an object with name and arguments, or a list of them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        fix = 'give {"name": ..., "arguments": {...}}, or a list of these'
        raise BadRecord(f'field "{where}.value" is {text!r}, not JSON of tool calls; {fix}')
    return [{"type": "function", "function": call} for call in calls]


def with_object(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, which templates expect; OpenAI stores it as a JSON string."""
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        field = f"{where}.function.arguments" if "function" in call else f"{where}.arguments"
        raise BadRecord(f'field "{field}" is {arguments!r}; give an object, or JSON of one')
    parsed = {**function, "arguments": value}
    return {**call, "function": parsed} if "function" in call else parsed


IMAGES = ("image", "image_url")  # types of parts


def check_part(part: Any, where: str) -> None:
    """Raise BadRecord unless a part of a message is text or an image."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind in IMAGES:
        return
    if kind != "text":
        raise BadRecord(f'field "{where}" is of type {kind}; only parts of type text are trained on')
    text_of(part.get("text"), f"{where}.text")


def is_counted(message: Message, where: str = "message") -> bool:
    """Return True unless `weight` is 0 or `train` is false; raise BadRecord for other values than 0, 1 and bools."""
    for key in ("weight", "train"):
        if key in message and message[key] not in (0, 1):
            raise BadRecord(f'field "{where}.{key}" is {message[key]!r}; an answer counts (1, true) or not (0, false)')
    return bool(message.get("weight", 1)) and bool(message.get("train", True))
