"""Conversations as a tokenizer's chat template writes them, and what of the text the assistant says.

A template that marks answers by `{% generation %}` is taken at its word. Of any other, an answer is what the text of
all messages up to it has beyond the prompt for it, its end-of-turn token included.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.records import BadRecord, Message
from compiler_trainer.data.tokenizers import Ids, Place, Tokenizer

NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # for use inside a program; yet a text may hold some
Marks = tuple[str, str]  # around an answer
UNMARKED: Marks = ("", "")


class Template(NamedTuple):
    """The source of a chat template, and the special tokens that it may name."""

    source: str
    tokens: dict[str, str]


class Generation(Extension):
    """`{% generation %}` answer `{% endgeneration %}`, as transformers has it: the answer, here between marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The block, as a call of `marked` with what is inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        """What is inside, marked."""
        start, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{start}{caller()}{end}"


def template_beside(tokenizer: str) -> Template:
    """The chat template of the tokenizer.json at a path; raises UserError where there is none."""
    folder = Path(tokenizer).parent
    config = settings(folder / "tokenizer_config.json")
    own, found = folder / "chat_template.jinja", config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    source = own.read_text(encoding="utf-8") if own.is_file() else found
    if tokenizer == "bytes" or not isinstance(source, str):
        fix = "conversations need one in the tokenizer_config.json or chat_template.jinja beside the tokenizer.json"
        raise UserError("data.tokenizer", f"{tokenizer} has no chat template; {fix}")
    special = {name: value for name, value in sorted(config.items()) if name.endswith("_token") and value}
    return Template(source, {name: v["content"] if isinstance(v, dict) else str(v) for name, v in special.items()})


def settings(path: Path) -> dict[str, Any]:
    """A tokenizer_config.json, empty where there is none."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(str(path), f"is not JSON: {error}") from error


def encode(
    messages: list[Message], template: Template, tokenizer: Tokenizer, after: int = 0
) -> tuple[Ids, NDArray[np.bool_]]:
    """Ids of a conversation, and which of them the assistant says `after` so many messages.

    Raises BadRecord where that cannot be told.
    """
    text, answers = written(messages, template)
    ids, places = tokenizer.encode_placed(text)
    before = sum(message["role"] == "assistant" for message in messages[:after])
    return ids, said(np.array(places).reshape(-1, 2), answers[before:])


def said(places: NDArray[np.int_], answers: list[Place]) -> NDArray[np.bool_]:
    """Which tokens, by the characters they stand for, are of answers; raises BadRecord where one is half of it."""
    counted = np.zeros(len(places), bool)
    for start, end in answers:
        touching = (places[:, 0] < end) & (places[:, 1] > start)
        if (touching & ((places[:, 0] < start) | (places[:, 1] > end))).any():
            raise BadRecord("a token is half in an answer, half outside: chat template and tokenizer do not fit")
        counted |= touching
    return counted


def written(messages: list[Message], template: Template) -> tuple[str, list[Place]]:
    """The text of a conversation, and where in it the assistant speaks."""
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecord("the assistant says nothing: no message is of the role assistant")
    text = rendered(template, messages)
    if "endgeneration" in template.source:
        marks = marks_for(text)
        if marks[0] in (marked := rendered(template, messages, marks=marks)):
            return unmarked(marked, marks)
    return text, answers_in(text, messages, template)


def marks_for(text: str) -> Marks:
    """Two characters that a text does not hold, so that where they stand in it once it is marked, we put them."""
    free = [character for character in NONCHARACTERS if character not in text]
    if len(free) < 2:
        raise BadRecord("holds all the noncharacters U+FDD0 to U+FDEF, of which two mark answers")
    return free[0], free[1]


def unmarked(text: str, marks: Marks) -> tuple[str, list[Place]]:
    """A text without the marks of answers, and where these were."""
    start, end = marks
    plain, answers = "", []
    for part in text.split(end):
        before, _, answer = part.partition(start)
        answers += [(len(plain) + len(before), len(plain) + len(before) + len(answer))] if answer else []
        plain += before + answer
    return plain, answers


def answers_in(text: str, messages: list[Message], template: Template) -> list[Place]:
    """Where the assistant speaks: from the end of the prompt for an answer to that of the text up to it."""
    answers = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = rendered(template, messages[:number], add_generation_prompt=True)
            upto = rendered(template, messages[: number + 1])
            if not (upto.startswith(prompt) and text.startswith(upto)):
                why = f"the chat template writes message {number} otherwise once more follow"
                raise BadRecord(f"{why}, so that answers cannot be told from prompts; mark them by {{% generation %}}")
            answers.append((len(prompt), len(upto)))
    return answers


def rendered(
    template: Template, messages: list[Message], add_generation_prompt: bool = False, marks: Marks = UNMARKED
) -> str:
    """The text of messages, with marks around what the template marks as answers."""
    try:
        return compiled(template.source, marks).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **template.tokens
        )
    except jinja2.TemplateError as error:
        raise BadRecord(f"the chat template refuses it: {error}") from error


@functools.cache
def compiled(source: str, marks: Marks) -> jinja2.Template:
    """A chat template, with the names that transformers gives one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.extend(marks=marks)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def refuse(message: str) -> None:
    """What a template calls where messages do not fit it."""
    raise jinja2.TemplateError(message)
