"""What a model is asked to go on with: a text, or what a user says in a chat."""

from __future__ import annotations

from typing import NamedTuple

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.chat import rendered, template_beside
from compiler_trainer.data.records import BadRecord
from compiler_trainer.data.tokenizers import Tokenizer


class Prompt(NamedTuple):
    """At least one token, and the tokens that end what is added to them."""

    ids: list[int]
    ends: frozenset[int]


def prompt_of(text: str, chat: bool, named: str, tokenizer: Tokenizer) -> Prompt:
    """The prompt that a text is to a tokenizer, of which `named` is the path; with `chat` said by a user.

    Raises UserError where there is no chat template, or it refuses.
    """
    written, end = chat_turn(text, named) if chat else (text, "")
    ids = ids_of(written, tokenizer) or [tokenizer.end_of_document]
    return Prompt(ids, frozenset([tokenizer.end_of_document, *ids_of(end, tokenizer)]))


def chat_turn(said: str, tokenizer: str) -> tuple[str, str]:
    """What a user says as the chat template beside a tokenizer writes it, up to the answer, and what ends that."""
    template = template_beside(tokenizer)
    try:
        text = rendered(template, [{"role": "user", "content": said}], add_generation_prompt=True)
    except BadRecord as refusal:
        raise UserError("prompt", str(refusal)) from refusal
    return text, template.tokens.get("eos_token", "")


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a text."""
    return [int(i) for i in tokenizer.encode([text])[0]]
