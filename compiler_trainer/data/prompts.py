"""Prompts to generate from: a text, or a user's message in a chat."""

from __future__ import annotations

from typing import NamedTuple

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.records import BadRecord, Conversation
from compiler_trainer.data.template import ChatTemplate
from compiler_trainer.data.tokenizers import Tokenizer


class Prompt(NamedTuple):
    """At least one token, and the tokens that end what is added to them."""

    ids: list[int]
    ends: frozenset[int]


def prompt_of(text: str, chat: bool, tokenizer: Tokenizer) -> Prompt:
    """The prompt that a text is to a tokenizer, with `chat` said by a user.

    Raises UserError if there is no chat template, or it refuses.
    """
    if chat:
        ids = ids_of(user_turn(text, tokenizer), tokenizer)
    else:
        ids = [*tokenizer.settings.opening, *ids_of(text, tokenizer)]
    return Prompt(ids or [tokenizer.end_of_document], frozenset([tokenizer.end_of_document, *tokenizer.settings.stops]))


def user_turn(said: str, tokenizer: Tokenizer) -> str:
    """A user's message as the chat template of a tokenizer writes it, up to the answer."""
    try:
        return ChatTemplate(tokenizer).text(Conversation([{"role": "user", "content": said}]), prompt=True)
    except BadRecord as refusal:
        raise UserError("prompt", str(refusal)) from refusal


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a text."""
    return [int(i) for i in tokenizer.encode([text])[0]]
