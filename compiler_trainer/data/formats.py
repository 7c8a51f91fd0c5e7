"""Parse a record into one document: detect its format by its fields, and turn these into a text or into messages.

    conversations   OpenAI messages, ShareGPT conversations, prompts and completions, Alpaca instructions
    pairs           a prompt in one of these formats, with a `chosen` and a `rejected` answer

A `system` field is the system prompt in each format. Fields that are null count as missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from compiler_trainer.config.schema import PASSAGES
from compiler_trainer.data.pictures import take
from compiler_trainer.data.records import (
    ASSISTANT,
    BadRecord,
    Conversation,
    Document,
    Fields,
    Message,
    Pair,
    Texts,
    class_of,
    decode,
    ids_of,
    messages_of,
    number_of,
    text_of,
    truth_of,
)

VERSION = 2  # increased when a record gives other messages: tokens made by earlier versions are made again
Row = Mapping[str, Any]


def from_json(line: bytes, offset: int, fields: Fields) -> Document:
    """Return the document of a line of JSON."""
    record = parse(decode(line, offset))
    if not isinstance(record, dict):
        raise BadRecord("is not an object; each line must be one")
    return from_row(record, fields)


def parse(text: str) -> Any:
    """Return the value of a JSON text; raise BadRecord if it is not one."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column" if error.lineno > 1 else "column"
        raise BadRecord(f"is not JSON: {error.msg} at {place} {error.colno}") from error
    except RecursionError as error:
        raise BadRecord("is nested too deep") from error
    except ValueError as error:  # Python limits the digits of a number
        raise BadRecord("contains a number with too many digits") from error


def from_object(record: Any, fields: Fields) -> Document:
    """Return the document of an entry of a JSON list."""
    if not isinstance(record, dict):
        raise BadRecord("is not an object; each entry of the list must be one")
    return from_row(record, fields)


def from_table_row(row: Row, fields: Fields, columns: Sequence[str] = ()) -> Document:
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


def from_row(row: Row, fields: Fields, columns: Sequence[str] = ()) -> Document:
    """Return the document of a row: the text in a column, a conversation, or a pair of them.

    `columns` are all fields of the record, if the row has only those to read.
    """
    if fields.kind == "text":
        return Document(content_of(row, fields.column), unused=unused_in(row, columns, {fields.column}))
    if fields.kind == "record":
        return Document(dict(row))
    if fields.kind == "classes":
        return classified(row, fields, columns)
    if fields.kind in PASSAGES:
        return passages(row, fields.kind, columns)
    form = format_of(row, fields.kind)
    content = pair(row, form, fields) if fields.kind == "pair" else conversation(row, form, fields)
    value = number_of(field_of(row, "margin"), "margin") if fields.margins else None
    value = truth_of(row["label"], "label") if fields.kind == "answers" else value
    used = {*form.required, *form.optional, *fields.names, "system"}
    used |= further_fields(fields)
    unused = unused_in(row, columns, used)
    if isinstance(content, Pair) and not begins_with(content, with_system(row, form.read(row).messages)):
        unused = (*unused, form.required[0])
    return Document(content, unused=unused, form=describe(form, row), value=value)


def classified(row: Row, fields: Fields, columns: Sequence[str]) -> Document:
    """Return the text of a row with the number of its class."""
    text = filled_text(row, fields.column)
    value = class_of(field_of(row, "label"), fields.labels)
    return Document(text, unused=unused_in(row, columns, {fields.column, "label"}), value=value)


QUERIES = ("query", "anchor")


def passages(row: Row, kind: str, columns: Sequence[str]) -> Document:
    """Return the query of a row, as it is called by either name, with its passages."""
    queries = [name for name in QUERIES if row.get(name) is not None]
    if len(queries) != 1:
        problem = f"has both {quoted(QUERIES)}; remove one of them" if queries else 'has no "query" or "anchor"'
        raise BadRecord(f"{problem}{list_fields(row)}")
    names = (*queries, *PASSAGES[kind])
    return Document(Texts(tuple(filled_text(row, name) for name in names)), unused=unused_in(row, columns, names))


def filled_text(row: Row, name: str) -> str:
    """Return the text in a field; raise BadRecord if it is empty."""
    text = text_of(field_of(row, name), name)
    if not text.strip():
        raise BadRecord(f'field "{name}" is empty')
    return text


def field_of(row: Row, name: str) -> Any:
    """Return a field of a row; raise BadRecord if it is missing."""
    if row.get(name) is None:
        raise BadRecord(f'has no field "{name}"{list_fields(row)}')
    return row[name]


def unused_in(row: Row, columns: Sequence[str], used: Collection[str]) -> tuple[str, ...]:
    """Return the fields of a record that have a value and are not used."""
    return tuple(name for name in columns or row if name not in used and row.get(name, "") is not None)


def begins_with(content: Pair, prompt: list[Message]) -> bool:
    """Return True if a conversation of a pair begins with the prompt; otherwise each has a prompt of its own."""
    return any(conversation.messages[: len(prompt)] == prompt for conversation in content)


def content_of(row: Row, column: str) -> Any:
    """Return the text or the token ids in a column."""
    if column not in row:
        for kind, options in (("pair", "data.chat=true data.pairs=true"), ("conversation", "data.chat=true")):
            if formats := fitting(row, kind):
                raise BadRecord(f"has {formats[0].name}, and no field {column!r}; set {options}")
        raise BadRecord(f'has no field "{column}"; each record must have one, or set data.text_column')
    value = row[column]
    return ids_of(value, column) if isinstance(value, list | np.ndarray) else text_of(value, column)


def conversation(row: Row, form: Format, fields: Fields) -> Conversation:
    """Return the conversation of a row, with its system prompt and the chat template's variables."""
    chat = form.read(row)
    messages = with_system(row, chat.messages)
    first = chat.first + len(messages) - len(chat.messages)
    messages, images = take(messages, row.get("images"), fields.base) if fields.images else (messages, ())
    return Conversation(messages, names_of(row, fields), first, fields.last_only, images)


def pair(row: Row, form: Format, fields: Fields) -> Pair:
    """Return the two conversations of a row: its prompt, if it has one, with each answer.

    Messages that both conversations share at the start are not labels.
    """
    prompt = form.read(row).messages
    chosen, rejected = (with_system(row, whole_answer(row, prompt, field)) for field in ("chosen", "rejected"))
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    for field, messages in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == ASSISTANT for message in messages[shared:]):
            raise BadRecord(f'field "{field}" has no text of the assistant that differs from the other answer')
    names, last_only = names_of(row, fields), fields.last_only
    return Pair(Conversation(chosen, names, shared, last_only), Conversation(rejected, names, shared, last_only))


def whole_answer(row: Row, prompt: list[Message], field: str) -> list[Message]:
    """Return an answer after its prompt; an answer that begins with another role includes its prompt."""
    answer = field_messages(ASSISTANT, row[field], field)
    if not answer or answer[0]["role"] != ASSISTANT:
        return answer
    if not prompt:
        raise BadRecord(f'has no "prompt", and field "{field}" begins with the answer{list_fields(row)}')
    return prompt + answer


def with_system(row: Row, messages: list[Message]) -> list[Message]:
    """Return messages after the system prompt in the field `system`, if it has one."""
    if row.get("system") in (None, ""):
        return messages
    system = {"role": "system", "content": text_of(row["system"], "system")}
    if not messages or messages[0]["role"] != "system":
        return [system, *messages]
    if messages[0] != system:
        raise BadRecord('has a field "system" and another system prompt in its messages; remove one of them')
    return messages


def names_of(row: Row, fields: Fields) -> dict[str, Any]:
    """Return the chat template's variables apart from messages: tools, documents and others that it names."""
    names = {name: row[name] for name in fields.names if row.get(name) is not None}
    extra = names.pop("chat_template_kwargs", {})
    if not isinstance(extra, dict):
        raise BadRecord('field "chat_template_kwargs" is not an object')
    names |= extra
    for field in ("tools", "documents"):
        if names.get(field) == "":  # a table of strings has no null
            del names[field]
        elif field in names:
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


def field_messages(role: str, value: Any, field: str) -> list[Message]:
    """Return the messages in a field: a list, a single one, or the text of one by `role`."""
    if isinstance(value, list | dict):
        return messages_of(value if isinstance(value, list) else [value], field)
    return [{"role": role, "content": text_of(value, field)}]


# ---- formats -------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A format of records: its name, and the fields that a record must have and may have.

    `read` returns the conversation in them; for preference pairs, only the prompt.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Row], Conversation]


def read_field(field: str, row: Row) -> Conversation:
    """Return the messages in a field, or its text as one of the user."""
    return Conversation(field_messages("user", row[field], field))


def read_messages(field: str, row: Row) -> Conversation:
    """Return the messages in a field."""
    return Conversation(messages_of(row[field], field))


def read_completion(row: Row) -> Conversation:
    """Return a prompt and its completion, of which only the completion is labels."""
    prompt = field_messages("user", row["prompt"], "prompt")
    return Conversation(prompt + field_messages(ASSISTANT, row["completion"], "completion"), first=len(prompt))


def read_instruction(row: Row) -> Conversation:
    """Return the turns in `history`, then the instruction with its input on the next line."""
    messages: list[Message] = []
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise BadRecord('field "history" is not a list of pairs, each a question and its answer')
    for number, (question, answer) in enumerate(history):
        messages += field_messages("user", question, f"history[{number}][0]")
        messages += field_messages(ASSISTANT, answer, f"history[{number}][1]")
    texts = [text_of(row[name], name) for name in ("instruction", "input") if row.get(name) is not None]
    return Conversation([*messages, {"role": "user", "content": "\n".join(filter(None, texts))}])


def read_alpaca(row: Row) -> Conversation:
    """Return an instruction and its output; the answers in its history are labels, too."""
    return Conversation(read_instruction(row).messages + field_messages(ASSISTANT, row["output"], "output"))


ANSWERS, ALPACA = ("chosen", "rejected"), ("input", "history")
FORMATS = {
    "conversation": (
        Format("OpenAI messages", ("messages",), (), partial(read_messages, "messages")),
        Format("ShareGPT conversations", ("conversations",), (), partial(read_messages, "conversations")),
        Format("prompts and completions", ("prompt", "completion"), (), read_completion),
        Format("Alpaca instructions", ("instruction", "output"), ALPACA, read_alpaca),
    ),
    "answers": (Format("judged answers", ("prompt", "completion", "label"), (), read_completion),),
    "pair": (
        Format("preference pairs", ANSWERS, (), lambda row: Conversation([])),
        Format("preference pairs", ("prompt", *ANSWERS), (), partial(read_field, "prompt")),
        Format("ShareGPT pairs", ("conversations", *ANSWERS), (), partial(read_field, "conversations")),
        Format("Alpaca pairs", ("instruction", *ANSWERS), ALPACA, read_instruction),
    ),
}


def format_of(row: Row, kind: str) -> Format:
    """Return the format of a record; raise BadRecord if none fits, or several do."""
    names = [name for name in row if row[name] is not None]
    formats = fitting(names, kind) or fitting(row, kind)
    if not formats:
        raise BadRecord(nearest(names, kind))
    if len(formats) > 1:
        both = " and ".join(f"{quoted(form.required)} ({form.name})" for form in formats[:2])
        raise BadRecord(f"has {both}; remove one of them")
    return formats[0]


def fitting(names: Collection[str], kind: str) -> list[Format]:
    """Return the formats whose required fields are among `names`, without those that need fewer of them."""
    formats = [form for form in FORMATS[kind] if set(form.required) <= set(names)]
    return [form for form in formats if not any(set(form.required) < set(other.required) for other in formats)]


def nearest(names: Collection[str], kind: str) -> str:
    """Return a refusal that names the format with the most of some fields, and those that are missing."""
    form = max(FORMATS[kind], key=lambda form: len(set(form.required) & set(names)))
    missing = [name for name in form.required if name not in names]
    if kind != "conversation" or len(missing) < len(form.required):
        return f"has no {quoted(missing)}, which {form.name} need{list_fields(names)}"
    choices = ", or ".join(quoted(form.required) for form in FORMATS[kind])
    return f"has no conversation; give {choices}{list_fields(names)}"


def quoted(names: Collection[str]) -> str:
    """Return names in quotes, as `"a" and "b"`."""
    return " and ".join(f'"{name}"' for name in names)


def list_fields(names: Collection[str]) -> str:
    """Return a suffix for messages that lists the fields of a record."""
    return f"; its fields are {', '.join(list(names)[:8])}" if names else ""


def describe(form: Format, row: Row) -> str:
    """Return a format's name and fields, with the keys of messages if these are in a list."""
    if len(form.required) > 1:
        return f"{form.name} (fields {', '.join(form.required)})"
    (field,) = form.required
    is_sharegpt = any(message.get("from") is not None for message in row[field])
    name, keys = ("ShareGPT conversations", "from, value") if is_sharegpt else ("OpenAI messages", "role, content")
    return f"{name} (fields {field}, {keys})"


def further_fields(fields: Fields) -> set[str]:
    """Return the names of fields that are read beside a record's format."""
    return {name for name, is_read in {"margin": fields.margins, "images": fields.images}.items() if is_read}


def columns_of(names: Sequence[str], fields: Fields) -> list[str]:
    """Return the columns to read of a table with the columns `names`; raise BadRecord if no format fits them."""
    if fields.kind == "text":
        return [fields.column]
    if fields.kind == "record":
        return list(names)
    if fields.kind == "classes":
        return [name for name in names if name in (fields.column, "label")]
    if fields.kind in PASSAGES:
        return [name for name in names if name in (*QUERIES, *PASSAGES[fields.kind])]
    if not fitting(names, fields.kind):
        raise BadRecord(nearest(names, fields.kind))
    formats = FORMATS[fields.kind]
    used = {name for form in formats for name in (*form.required, *form.optional)} | fields.names | {"system"}
    used |= further_fields(fields)
    return [name for name in names if name in used]
