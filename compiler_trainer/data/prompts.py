"""Prompts for generation: a text, or a user's message in a chat."""

from __future__ import annotations

from typing import NamedTuple

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.records import BadRecord, Conversation
from compiler_trainer.data.template import ChatTemplate
from compiler_trainer.data.tokenizers import Tokenizer


class Prompt(NamedTuple):
    """The ids of a prompt, at least one, and the ids that end its continuation."""

    ids: list[int]
    ends: frozenset[int]


def prompt_of(text: str, chat: bool, tokenizer: Tokenizer) -> Prompt:
    """Return a text as a prompt for a tokenizer; with `chat`, it is a user's message.

    Raises UserError if there is no chat template, or if the template refuses the message.
    """
    if chat:
        ids = ids_of(user_turn(text, tokenizer), tokenizer)
    else:
        ids = [*tokenizer.settings.opening, *ids_of(text, tokenizer)]
    return Prompt(ids or [tokenizer.end_of_document], frozenset([tokenizer.end_of_document, *tokenizer.settings.stops]))


def user_turn(message: str, tokenizer: Tokenizer) -> str:
    """Return a user's message in the tokenizer's chat template, up to the answer."""
    try:
        return ChatTemplate(tokenizer).text(Conversation([{"role": "user", "content": message}]), prompt=True)
    except BadRecord as refusal:
        raise UserError("prompt", str(refusal)) from refusal


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a text."""
    return [int(i) for i in tokenizer.encode([text])[0]]
