"""Chat templates of a tokenizer, rendered by transformers' own code, with every name that it passes to them."""

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

ALWAYS = frozenset({"tools", "documents", "chat_template_kwargs"})  # fields of a record that any template may get
NEVER = frozenset({"messages", "prompt", "completion", "chosen", "rejected", "add_generation_prompt"})
GLOBALS = frozenset({*DEFAULT_NAMESPACE, "raise_exception", "strftime_now"})
BUFFERED = (nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock)


class Generation(Extension):
    """Parse `{% generation %}` blocks, which mark answers; rendering them is transformers' work."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block as a node that nothing else gives."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.ScopedEvalContextModifier([], body).set_lineno(line)


@functools.cache
def renderer() -> Any:
    """The function of transformers that renders chat templates; raises UserError if transformers is missing."""
    try:
        return import_module("transformers.utils.chat_template_utils").render_jinja_template
    except ImportError as error:
        fix = "pip install 'compiler-trainer[hf]'"
        raise UserError("data.chat", f"chat templates need transformers, which is missing ({error}); {fix}") from error


class ChatTemplate:
    """The chat templates of a tokenizer; raises UserError if there are none.

    `names` are the fields of a record that are passed to them: `tools`, `documents`, and each variable that one names.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.templates, self.special_tokens = tokenizer.settings.templates, tokenizer.settings.special_tokens
        if "default" not in self.templates:
            there = f"those named {', '.join(self.templates)}, and no default" if self.templates else "no chat template"
            fix = "conversations need one in the tokenizer_config.json or chat_template.jinja beside the tokenizer.json"
            raise UserError("data.tokenizer", f"{tokenizer.path} has {there}; {fix}")
        free: set[str] = set()
        self.marking: dict[str, bool] = {}  # by source: whether answers are marked where transformers can place marks
        self.misplacing = False
        for name, source in self.templates.items():
            try:
                tree = jinja2.Environment(extensions=[Generation, loopcontrols]).parse(source)
            except jinja2.TemplateError as error:
                raise UserError("data.tokenizer", f"chat template {name} of {tokenizer.path}: {error}") from error
            free |= meta.find_undeclared_variables(tree)
            is_marking = tree.find(nodes.ScopedEvalContextModifier) is not None
            buffered = any(node.find(nodes.ScopedEvalContextModifier) for node in tree.find_all(BUFFERED))
            self.marking[source] = is_marking and not buffered
            self.misplacing = self.misplacing or buffered
        self.names = ALWAYS | (free - NEVER - GLOBALS - self.special_tokens.keys())

    def source(self, names: Mapping[str, Any]) -> str:
        """The template that transformers takes for a conversation: the one named `tool_use` if there are tools."""
        return self.templates.get("tool_use" if names.get("tools") is not None else "", self.templates["default"])

    def text(self, chat: Conversation, upto: int | None = None, prompt: bool = False) -> str:
        """The text of the first `upto` messages, with the generation prompt after them if `prompt`."""
        return self.render(chat, upto, add_generation_prompt=prompt)[0]

    def marked(self, chat: Conversation, upto: int | None = None) -> tuple[str, list[Place]]:
        """The text of the first `upto` messages, and the places of the answers that the template marks."""
        return self.render(chat, upto, return_assistant_tokens_mask=self.marking[self.source(chat.names)])

    def render(self, chat: Conversation, upto: int | None, **options: bool) -> tuple[str, list[Place]]:
        """Render by transformers; raises BadRecord if the template refuses or fails."""
        names = {"tools": None, "documents": None, **self.special_tokens, **chat.names}
        given = {**options, **names, "chat_template": self.source(chat.names)}
        try:
            (text,), places = renderer()(conversations=[chat.messages[:upto]], **given)
        except jinja2.TemplateError as error:
            raise BadRecord(f"the chat template refuses it: {' '.join(str(error).split())}") from error
        except UserError:
            raise
        except Exception as error:  # a template is a program
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise BadRecord(f"the chat template fails on it: {why}") from error
        return text_of(text, "messages"), [tuple(place) for place in places[0]] if places else []
