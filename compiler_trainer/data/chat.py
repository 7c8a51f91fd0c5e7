"""Conversations as samples: the text that the tokenizer's chat template renders, with the answers in it as labels.

If a template marks answers by `{% generation %}`, these marks are used. Otherwise, an answer is the part of the text
after the generation prompt, with its end-of-turn token: the tokens that the model has to generate. Some templates
render earlier answers differently once more turns follow (Qwen3 drops their thoughts). They give one sample for each
answer, with the preceding text as it is when that answer is generated. Templates are rendered by transformers' own code
with all variables that it passes to them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jinja2 import meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.config.extras import library
from compiler_trainer.data.pictures import ImageOptions, refuse_unread, starts_of, take, with_image_texts
from compiler_trainer.data.records import ASSISTANT, BadRecord, Conversation, Message, shorten, text_of
from compiler_trainer.data.tokenizers import Ids, Place, Tokenizer

TRIES = 20  # records for which a field is tested for being unused
LABELLING = {"role", "content", "weight", "train"}  # keys of a message that are always used


class Sample(NamedTuple):
    """The text of the first `upto` messages, and the character ranges of its answers that are labels."""

    text: str
    answers: list[Place]
    upto: int


class Tokens(NamedTuple):
    """Ids of a document without the closing one; `counted`, one entry longer, marks the labels.

    `images` are the first tokens of its images.
    """

    ids: Ids
    counted: NDArray[np.bool_]
    images: Sequence[int] = ()


class Written(NamedTuple):
    """The samples of a conversation, their tokens, and notes about them."""

    samples: list[Sample]
    tokens: list[Tokens]
    notes: list[str]


@dataclass
class Chats:
    """A writer of conversations with a tokenizer's chat template."""

    template: ChatTemplate
    tokenizer: Tokenizer
    used_keys: set[tuple[str, str]] = field(default_factory=set)  # (role, key) of messages, ("", name) of records
    tries: Counter[tuple[str, str]] = field(default_factory=Counter)

    def write(self, chat: Conversation) -> Written:
        """Return a conversation's samples; raise BadRecord without an answer, or if its prompt is not its start."""
        if not any(message["role"] == ASSISTANT for message in chat.messages):
            raise BadRecord("there is no answer: no message has the role assistant")
        if not chat.labelled:
            answers = "the last one has" if chat.last_only else "all of them have"
            raise BadRecord(f"no answer is trained on: {answers} weight 0 or train false")
        notes: list[str] = []
        samples = self.samples(chat, notes)
        tokens = [self.tokens(sample, chat, notes) for sample in samples]
        if not any(t.counted.any() for t in tokens):
            raise BadRecord("the chat template does not render the answers")
        notes += [*self.unused(chat, samples), *self.omitted(chat, samples)]
        return Written(samples, tokens, list(dict.fromkeys(map(shorten, notes))))

    def samples(self, chat: Conversation, notes: list[str]) -> list[Sample]:
        """Return the fewest samples in which each answer follows the text that it is generated from."""
        text, marks = self.template.render_marks(chat)
        if marks:
            return [Sample(text, self.label_marks(chat, marks), len(chat.messages))]
        if self.template.misplaces_marks:
            notes.append(
                "the chat template marks answers inside a macro, where their positions are lost: marks are not used"
            )
        samples: list[Sample] = []
        for number in chat.labelled:
            upto = text if number + 1 == len(chat.messages) else self.template.text(chat, number + 1)
            answer = self.find_answer(chat, number, upto, notes)
            earlier = samples.pop().answers if samples and upto.startswith(samples[-1].text) else []
            samples.append(Sample(upto, [*earlier, answer], number + 1))
        if len(samples) > 1:
            reason = "the chat template renders earlier answers differently once more turns follow"
            notes.append(f"{reason}: each answer of such a conversation becomes a sample with the text before it")
        if text.startswith(samples[-1].text):
            samples[-1] = Sample(text, samples[-1].answers, len(chat.messages))
        return samples

    def label_marks(self, chat: Conversation, marks: list[Place]) -> list[Place]:
        """Return the marks of those answers that are labels."""
        if len(chat.labelled) == sum(message["role"] == ASSISTANT for message in chat.messages):
            return marks
        counts = {n: len(self.template.render_marks(chat, n)[1]) if n else 0 for i in chat.labelled for n in (i, i + 1)}
        return [mark for number in chat.labelled for mark in marks[counts[number] : counts[number + 1]]]

    def find_answer(self, chat: Conversation, number: int, text: str, notes: list[str]) -> Place:
        """Return the character range of the answer that ends a text: all after its generation prompt.

        If the generation prompt does not end as the answer begins, for example because it opens a thought, the answer
        begins at the first token that differs.
        """
        prompt = self.template.text(chat, number, prompt=True)
        if text.startswith(prompt):
            return len(prompt), len(text)
        start = self.first_difference(text, prompt)
        if number and start < self.first_difference(prompt, self.template.text(chat, number)):
            problem = f"the chat template renders the messages before message {number} differently once it follows"
            raise BadRecord(
                f"{problem}, so the answer cannot be separated from its prompt; mark it by {{% generation %}}"
            )
        problem = f"the generation prompt ends with {prompt[start:]!r}, but answers do not begin with that"
        notes.append(f"{problem}: training leaves it out")
        return start, len(text)

    def first_difference(self, text: str, reference: str) -> int:
        """Return the character where the first token of `text` begins that differs from the tokens of `reference`."""
        (ids, places), (reference_ids, _) = self.tokenizer.encode_placed(text), self.tokenizer.encode_placed(reference)
        size = min(len(ids), len(reference_ids))
        differing = np.flatnonzero(ids[:size] != reference_ids[:size])
        first = int(differing[0]) if len(differing) else size
        return places[first][0] if first < len(places) else len(text)

    def tokens(self, sample: Sample, chat: Conversation, notes: list[str]) -> Tokens:
        """Return the ids of a sample; a token that is partly in an answer is a label, as in transformers' masks.

        The closing token is a label if nothing else ends the last answer.
        """
        ids, ranges = self.tokenizer.encode_placed(sample.text)
        places = np.array(ranges).reshape(-1, 2)
        counted, is_partly = labels(places, sample.answers)
        if is_partly:
            notes.append("an answer begins or ends inside a token of the text around it: the whole token is a label")
        for message in chat.messages[: sample.upto]:
            if isinstance(message.get("content"), list) and repr(message["content"]) in sample.text:
                raise BadRecord("the chat template renders a list of parts as a Python list; give content as a string")
        images = starts_of(chat.image_texts, sample.text, places)
        if len(ids) and ids[-1] == self.tokenizer.end_of_document:  # the text already ends with the closing token
            return Tokens(ids[:-1], counted, images)
        is_open = self.is_open(sample.text, ids, places)
        ends_text = not sample.text[sample.answers[-1][1] :].strip() if sample.answers else False
        if is_open and ends_text:
            end = self.tokenizer.name_of(self.tokenizer.end_of_document)
            notes.append(
                f"answers have no end-of-turn token: {end}, which closes the document, is a label after the last one"
            )
        elif sample.upto - 1 in chat.labelled and not ends_text and not self.ends_last_turn(sample, ids, places):
            notes.append("the chat template's marks exclude the end of the turn: the model does not learn to stop")
        return Tokens(ids, np.append(counted, is_open and ends_text), images)

    def is_open(self, text: str, ids: Ids, places: NDArray[Any]) -> bool:
        """Return True if the last token of a text, apart from white space, is not an added token of the tokenizer."""
        return not self.ends_turn((0, len(text.rstrip())), ids, places)

    def ends_last_turn(self, sample: Sample, ids: Ids, places: NDArray[Any]) -> bool:
        """Return True if the last answer of a sample ends with an added token; also if no answer is rendered."""
        return not sample.answers or self.ends_turn(sample.answers[-1], ids, places)

    def ends_turn(self, place: Place, ids: Ids, places: NDArray[Any]) -> bool:
        """Return True if the last token of a character range is an added token, as end-of-turn tokens are."""
        overlapping = np.flatnonzero((places[:, 0] < place[1]) & (places[:, 1] > place[0]))
        return len(overlapping) > 0 and int(ids[overlapping[-1]]) in self.tokenizer.added_ids

    def unused(self, chat: Conversation, samples: Sequence[Sample]) -> Iterator[str]:
        """Yield notes on keys of messages and fields that do not change the samples."""
        keys = {(m["role"], key) for m in chat.messages for key in m if key not in LABELLING}
        keys |= {("", name) for name in chat.names}
        tested = sorted(key for key in keys - self.used_keys if self.tries[key] < TRIES)
        self.tries.update(tested)
        if tested and self.is_same(without(chat, tested), samples):
            idle = tested
        else:
            idle = [key for key in tested if self.is_same(without(chat, [key]), samples)]
            self.used_keys |= set(tested) - set(idle)
        for role, key in idle:
            role_text = f" of messages of role {role}" if role else ""
            yield f'"{key}"{role_text} is not used: the chat template does not render it'

    def omitted(self, chat: Conversation, samples: Sequence[Sample]) -> Iterator[str]:
        """Yield notes on contents that are not completely in the samples.

        Raises BadRecord if nothing of a labelled answer's content is in them.
        """
        texts = [" ".join(sample.text.split()) for sample in samples]
        for number, message in enumerate(chat.messages[: samples[-1].upto]):
            content, role = message.get("content", ""), message["role"]
            parts = [content] if isinstance(content, str) else [p["text"] for p in content if "text" in p]
            if all(is_within(part, texts) for part in parts):
                continue
            emptied = [*chat.messages[:number], {**message, "content": f"{content}?"}, *chat.messages[number + 1 :]]
            if not self.is_same(chat._replace(messages=emptied), samples):
                suffix = ", such as reasoning: training leaves it out" if role == ASSISTANT else ""
                yield f"the chat template leaves out part of the content of role {role}{suffix}"
            elif number in chat.labelled:
                fix_text = 'if it expects parts, give [{"type": "text", "text": ...}]'
                fix = fix_text if isinstance(content, str) else "give a string"
                raise BadRecord(f"the chat template does not render the content of message {number}; {fix}")
            else:
                yield f"the content of role {role} is not used: the chat template does not render it"

    def is_same(self, changed: Conversation, samples: Sequence[Sample]) -> bool:
        """Return True if `changed` renders to the texts of the given samples."""
        try:
            return all(self.template.text(changed, sample.upto) == sample.text for sample in samples)
        except BadRecord:
            return False


def labels(places: NDArray[Any], answers: Sequence[Place]) -> tuple[NDArray[np.bool_], bool]:
    """Return bool[tokens], True for tokens that overlap an answer, and True if a token overlaps only in part."""
    counted, is_partly = np.zeros(len(places), bool), False
    for start, end in answers:
        touching = (places[:, 0] < end) & (places[:, 1] > start)
        is_partly = is_partly or bool((touching & ((places[:, 0] < start) | (places[:, 1] > end))).any())
        counted |= touching
    return counted, is_partly


def without(chat: Conversation, keys: Sequence[tuple[str, str]]) -> Conversation:
    """Return a conversation without the given message keys, (role, key), and names, ("", name)."""
    messages = [{k: v for k, v in m.items() if (m["role"], k) not in keys} for m in chat.messages]
    return chat._replace(messages=messages, names={k: v for k, v in chat.names.items() if ("", k) not in keys})


def is_within(content: str, texts: Sequence[str]) -> bool:
    """Return True if a text contains `content`, plain or as JSON, ignoring white space."""
    plain = " ".join(content.split())
    return any(plain in text or json.dumps(content, ensure_ascii=False)[1:-1] in text for text in texts)


# ---- templates -----------------------------------------------------------------------------------------


ALWAYS = frozenset({"tools", "documents", "chat_template_kwargs"})  # fields of a record that every template may use
RECORDED = {"messages", "conversations", "system", "prompt", "completion", "chosen", "rejected"}  # fields of formats
NEVER = frozenset({*RECORDED, "add_generation_prompt"})
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


def renderer() -> Any:
    """Return transformers' function that renders chat templates."""
    return library("transformers.utils.chat_template_utils", "data.chat", "a chat template ").render_jinja_template


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
        refuse_unread(chat)
        names = {"tools": None, "documents": None, **self.special_tokens, **chat.names}
        variables = {**options, **names, "chat_template": self.source(chat.names)}
        try:
            (text,), places = renderer()(conversations=[chat.messages[:upto]], **variables)
        except jinja2.TemplateError as error:
            raise BadRecord(f"the chat template refuses it: {one_line(error)}") from error
        except UserError:
            raise
        except Exception as error:  # a template is a program that may raise anything
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise BadRecord(f"the chat template fails on it: {reason}") from error
        rendered = text_of(text, "messages"), [tuple(place) for place in places[0]] if places else []
        return with_image_texts(chat, upto, *rendered)


# ---- prompts -------------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """The ids of a prompt, at least one, and the ids that end its continuation.

    `inputs` are what a vision-language model takes besides: tensors that the folder's processor makes of images.
    """

    ids: list[int]
    ends: frozenset[int]
    inputs: Mapping[str, Any] = {}


def prompt_of(text: str, chat: bool, tokenizer: Tokenizer) -> Prompt:
    """Return a text as a prompt for a tokenizer; with `chat`, it is a user's message.

    Raises UserError if there is no chat template, or if the template refuses the message.
    """
    if chat:
        return prompt_of_chat([{"role": "user", "content": text}], tokenizer)
    return to_prompt([*tokenizer.settings.opening, *ids_of(text, tokenizer)], tokenizer)


def prompt_of_chat(messages: list[Message], tokenizer: Tokenizer) -> Prompt:
    """Return messages as the prompt for the next answer; raise UserError as `prompt_of`."""
    try:
        text = ChatTemplate(tokenizer).text(Conversation(messages), prompt=True)
    except BadRecord as refusal:
        raise UserError("prompt", str(refusal)) from refusal
    return to_prompt(ids_of(text, tokenizer), tokenizer)


def prompt_with_images(messages: list[Message], tokenizer: Tokenizer, options: ImageOptions) -> Prompt:
    """Return messages, some with images, as the prompt for the next answer; raise UserError as `prompt_of`.

    Images may have any sizes that the processor takes.
    """
    try:
        bare, images = take(messages, None, "")
        chat, contents = options.look(Conversation(bare, images=images))
        text = ChatTemplate(tokenizer).text(chat, prompt=True)
        marked = ChatTemplate(tokenizer).text(chat._replace(image_token=""), prompt=True)
    except BadRecord as refusal:
        raise UserError("prompt", str(refusal)) from refusal
    ids, inputs = ids_of(text, tokenizer), options.processor.inputs(marked, contents)
    if inputs.pop("input_ids")[0].tolist() != ids:
        raise UserError("prompt", f"becomes other tokens by the processor of {options.folder} than in training")
    return to_prompt(ids, tokenizer)._replace(inputs=inputs)


def to_prompt(ids: list[int], tokenizer: Tokenizer) -> Prompt:
    """Return ids, or the end of a document if there are none, as a prompt."""
    return Prompt(ids or [tokenizer.end_of_document], frozenset([tokenizer.end_of_document, *tokenizer.settings.stops]))


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a text."""
    return [int(i) for i in tokenizer.encode([text])[0]]
