"""A tokenizer's chat templates, rendered by transformers' own code with all variables that it passes to them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.records import BadRecord, Conversation, text_of
from compiler_trainer.data.tokenizers import Place, Tokenizer

ALWAYS = frozenset({"tools", "documents", "chat_template_kwargs"})  # fields of a record that every template may use
NEVER = frozenset({"messages", "prompt", "completion", "chosen", "rejected", "add_generation_prompt"})
GLOBALS = frozenset({*DEFAULT_NAMESPACE, "raise_exception", "strftime_now"})
BUFFERED = (nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock)


class Generation(Extension):
    """A parser of `{% generation %}` blocks, which mark answers; transformers renders them."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block as a node of a type that no other syntax creates."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.ScopedEvalContextModifier([], body).set_lineno(line)


@functools.cache
def renderer() -> Any:
    """Return transformers' function that renders chat templates; raise UserError if transformers is missing."""
    try:
        return import_module("transformers.utils.chat_template_utils").render_jinja_template
    except ImportError as error:
        fix = "pip install 'compiler-trainer[hf]'"
        raise UserError("data.chat", f"chat templates need transformers, which is missing ({error}); {fix}") from error


class ChatTemplate:
    """The chat templates of a tokenizer; raises UserError if there are none.

    `names` are the fields of a record that templates use: `tools`, `documents`, and each variable that a template
    names.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.templates, self.special_tokens = tokenizer.settings.templates, tokenizer.settings.special_tokens
        if "default" not in self.templates:
            present = (
                f"templates named {', '.join(self.templates)}, but no default" if self.templates else "no chat template"
            )
            fix = (
                "conversations need one in the tokenizer_config.json or chat_template.jinja next to the tokenizer.json"
            )
            raise UserError("data.tokenizer", f"{tokenizer.path} has {present}; {fix}")
        free: set[str] = set()
        self.marking: dict[str, bool] = {}  # by template: True if it marks answers where transformers can locate them
        self.misplaces_marks = False
        for name, source in self.templates.items():
            try:
                tree = jinja2.Environment(extensions=[Generation, loopcontrols]).parse(source)
            except jinja2.TemplateError as error:
                raise UserError("data.tokenizer", f"chat template {name} of {tokenizer.path}: {error}") from error
            free |= meta.find_undeclared_variables(tree)
            is_marking = tree.find(nodes.ScopedEvalContextModifier) is not None
            buffered = any(node.find(nodes.ScopedEvalContextModifier) for node in tree.find_all(BUFFERED))
            self.marking[source] = is_marking and not buffered
            self.misplaces_marks = self.misplaces_marks or buffered
        self.names = ALWAYS | (free - NEVER - GLOBALS - self.special_tokens.keys())

    def source(self, names: Mapping[str, Any]) -> str:
        """Return the template that transformers uses for a conversation: `tool_use` with tools if there is one."""
        return self.templates.get("tool_use" if names.get("tools") is not None else "", self.templates["default"])

    def text(self, chat: Conversation, upto: int | None = None, prompt: bool = False) -> str:
        """Return the text of the first `upto` messages, and the generation prompt if `prompt`."""
        return self.render(chat, upto, add_generation_prompt=prompt)[0]

    def render_marks(self, chat: Conversation, upto: int | None = None) -> tuple[str, list[Place]]:
        """Return the text of the first `upto` messages, and the ranges of the answers that the template marks."""
        return self.render(chat, upto, return_assistant_tokens_mask=self.marking[self.source(chat.names)])

    def render(self, chat: Conversation, upto: int | None, **options: bool) -> tuple[str, list[Place]]:
        """Render by transformers; raise BadRecord if the template refuses or fails."""
        names = {"tools": None, "documents": None, **self.special_tokens, **chat.names}
        variables = {**options, **names, "chat_template": self.source(chat.names)}
        try:
            (text,), places = renderer()(conversations=[chat.messages[:upto]], **variables)
        except jinja2.TemplateError as error:
            raise BadRecord(f"the chat template refuses it: {' '.join(str(error).split())}") from error
        except UserError:
            raise
        except Exception as error:  # a template is a program that may raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise BadRecord(f"the chat template fails on it: {reason}") from error
        return text_of(text, "messages"), [tuple(place) for place in places[0]] if places else []
