"""Everything in a record, template or tokenizer is used, refused by name, or reported once, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from byte_tokenizer import write_template, write_tokenizer
from transformers import AutoTokenizer

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data import sources, workers
from compiler_trainer.data.chat import Chats, ChatTemplate
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.formats import from_row
from compiler_trainer.data.records import BadRecord, Fields
from compiler_trainer.data.tokenizers import build_tokenizer
from tests.nightly.templates import compare

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + PLAIN
NOT_NONE = "{% if tools is not none %}{{ tools | tojson }}{% endif %}{% if documents is not none %}{{ documents | length }}{% endif %}" + PLAIN
CALLS = PLAIN.replace("{{ m['content'] }}", "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{{ m['content'] }}")
# Only the last answer keeps its thoughts, as in Qwen3.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt opens a thought that answers do not have, as in DeepSeek-R1.
OPENS = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# The end-of-text token closes each rendering, as in Phi-3.
CLOSES = PLAIN.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
STRIPS = PLAIN.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
ENDLESS = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}### assistant:\n{% endif %}"
U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
WEATHER = [{"type": "function", "function": {"name": "get_weather"}}]
CALL = {**A, "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}]}


class Folder:
    """A byte tokenizer with a template, loaded by us and by transformers."""

    def __init__(self, folder: Path, template: str):
        self.path = write_tokenizer(folder)
        write_template(folder, template)
        self.theirs, self.tokenizer = AutoTokenizer.from_pretrained(str(folder)), build_tokenizer(self.path)
        self.chats = Chats(ChatTemplate(self.tokenizer), self.tokenizer)

    def write(self, record):
        return self.chats.write(from_row(record, Fields("conversation", names=self.chats.template.names)).content)

    def labels(self, record):
        """Return the text of each sample's labels."""
        end = self.tokenizer.end_of_document
        return ["".join(self.tokenizer.name_of(int(i)) for i, is_label in zip([*ids, end], counted) if is_label) for _, (ids, counted, *_) in self.both(record)]

    def both(self, record):
        written = self.write(record)
        return list(zip(written.samples, written.tokens))

    def notes(self, record):
        return " | ".join(self.write(record).notes)

    def text(self, record, **arguments):
        (sample,) = self.write(record).samples
        theirs = self.theirs.apply_chat_template(record["messages"], tokenize=False, **arguments)
        assert sample.text == theirs
        return theirs


# Variables of a template


def test_tools_are_passed_to_the_template(tmp_path):
    text = Folder(tmp_path, TOOLS).text({"messages": [U, A], "tools": WEATHER}, tools=WEATHER)
    assert text.startswith('[{"type": "function", "function": {"name": "get_weather"}}]\n<|im_start|>user')


GIVEN = {
    "none": ({}, {}),
    "empty": ({"tools": []}, {"tools": []}),
    "null": ({"tools": None, "documents": None}, {}),
    "as JSON": ({"tools": json.dumps(WEATHER)}, {"tools": WEATHER}),
    "documents": ({"documents": [{"title": "a", "text": "b"}]}, {"documents": [{"title": "a", "text": "b"}]}),
}


@pytest.mark.parametrize(("fields", "arguments"), GIVEN.values(), ids=GIVEN)
def test_names_without_a_value_are_none_as_for_transformers(fields, arguments, tmp_path):
    Folder(tmp_path, NOT_NONE).text({"messages": [U, A], **fields}, **arguments)


def test_a_field_that_the_template_names_is_passed(tmp_path):
    folder = Folder(tmp_path, "{% if enable_thinking %}THINK {% endif %}{{ style }}" + PLAIN)
    assert folder.text({"messages": [U, A], "enable_thinking": True}, enable_thinking=True).startswith("THINK ")
    assert folder.text({"messages": [U, A], "chat_template_kwargs": {"style": "s"}}, style="s").startswith("s<|im")


def test_a_template_named_tool_use_writes_conversations_with_tools(tmp_path):
    folder = Folder(tmp_path, PLAIN)
    both = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]
    write_template(tmp_path, both)
    folder = Folder.__new__(Folder)
    folder.theirs, folder.tokenizer = AutoTokenizer.from_pretrained(str(tmp_path)), build_tokenizer(str(tmp_path / "tokenizer.json"))
    folder.chats = Chats(ChatTemplate(folder.tokenizer), folder.tokenizer)
    assert folder.text({"messages": [U, A], "tools": WEATHER}, tools=WEATHER).startswith("[{")
    assert folder.text({"messages": [U, A]}).startswith("<|im_start|>")


def test_tools_of_pairs_are_passed(tmp_path):
    folder = Folder(tmp_path, TOOLS)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "hi", "chosen": "yo", "rejected": "no", "tools": WEATHER}))
    cfg = DataConfig("text", files=(str(tmp_path / "a.jsonl"),), tokenizer=folder.path, chat=True, pairs=True, eval_fraction=0.0)
    tokens = build_datasets(cfg, 300, 1).train.rows.batch(np.arange(1))["tokens"][0].tolist()
    prompt_ids = folder.theirs.apply_chat_template([U, A], tools=WEATHER)["input_ids"]
    assert tokens[: len(prompt_ids)] == prompt_ids and folder.theirs.decode(tokens).count("get_weather") == 2


@pytest.mark.parametrize("bad", ["no JSON", [1], {"a": 1}])
def test_tools_that_are_no_list_of_objects_are_refused(bad, tmp_path):
    with pytest.raises(BadRecord, match='field "tools" is '):
        Folder(tmp_path, TOOLS).write({"messages": [U, A], "tools": bad})


# Answers that do not count

WEIGHTS = [{"weight": 0}, {"train": False}, {"weight": 0.0}, {"weight": 0, "train": True}]


@pytest.mark.parametrize("key", WEIGHTS, ids=str)
def test_an_answer_of_no_weight_is_no_label(key, tmp_path):
    record = {"messages": [U, {**A, "content": "BAD", **key}, U, A]}
    assert Folder(tmp_path, PLAIN).labels(record) == ["yo<|im_end|>\n"]
    marked = PLAIN.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}") if "weight" in key else PLAIN
    assert Folder(tmp_path, marked.replace("<|im_end|>\n{% endfor", "<|im_end|>{% endfor")).labels(record)[0].startswith("yo")


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([U, {**A, "weight": 0}], "no answer is trained on"),
        ([U, {**A, "weight": 0.5}], 'field "messages\\[1\\].weight" is 0.5; an answer counts'),
        ([{**U, "train": True}, A], 'field "messages\\[0\\].train" is True in a message of role user, and only answers'),
        ([U, {"role": "assistant", "content": [{"type": "image"}]}], 'messages\\[1\\].content\\[0\\]" is of type image'),
        ([{"from": "human", **U}], 'field "messages\\[0\\]" has both "from" and "content"; remove one of them'),
        ([U, {"role": "assistant", "content": None, "tool_calls": []}], 'field "messages\\[1\\].content" is null'),
        ([U, {**A, "content": "\ud800"}], "an unpaired surrogate"),
    ],
    ids=range(7),
)
def test_a_message_that_cannot_be_used_is_refused_by_name(messages, why, tmp_path):
    with pytest.raises(BadRecord, match=why):
        Folder(tmp_path, PLAIN).write({"messages": messages})


# Nulls


def test_null_content_is_no_text(tmp_path):
    folder = Folder(tmp_path, CALLS)
    text = folder.text({"messages": [U, CALL, {"role": "tool", "content": "wet"}, A]})
    assert "None" not in text and '{"city": "Oslo"}<|im_end|>' in text
    assert folder.labels({"messages": [U, {**A, "tool_calls": None, "name": None}]}) == ["yo<|im_end|>\n"]


def test_a_template_that_fails_is_a_bad_record_with_its_line(tmp_path):
    folder = Folder(tmp_path, PLAIN.replace("{{ m['content'] }}", "{{ 'a' + m['content'] }}{{ m['tool_calls'][0] + 1 }}"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": [U, A]}) + "\n" for _ in range(2)))
    options = {"files": (str(tmp_path / "a.jsonl"),), "tokenizer": folder.path, "chat": True}
    with pytest.raises(UserError, match="a.jsonl:1: the chat template (refuses it|fails on it): "):
        build_datasets(DataConfig("text", **options), 30, 1)
    with pytest.raises(UserError, match="the corpus is empty: 0 documents, none with a token, 2 bad records skipped"):
        build_datasets(DataConfig("text", **options, bad_records="skip"), 30, 1)


def test_keys_that_arrow_fills_with_null_are_no_keys(tmp_path):
    folder = Folder(tmp_path, CALLS)
    other = {**CALL, "tool_calls": [{"type": "function", "function": {"name": "g", "arguments": {"day": "Monday"}}}]}
    rows = [{"messages": [U, CALL]}, {"messages": [U, other]}, {"messages": [U, A]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = []
    for name in ("a.parquet", "a.jsonl"):
        cfg = DataConfig("text", files=(str(tmp_path / name),), tokenizer=folder.path, chat=True, eval_fraction=0.0)
        result.append(build_datasets(cfg, 100, 1).parts[0].train.corpus)
    assert result[0].tokens.tolist() == result[1].tokens.tolist() and result[0].counted.tolist() == result[1].counted.tolist()
    assert "null" not in folder.theirs.decode(result[0].tokens.tolist())


# Begin and end of an answer


def test_a_token_that_an_answer_shares_with_its_prompt_is_a_label(tmp_path):
    folder = Folder(tmp_path, PLAIN)
    record = {"messages": [U, {**A, "content": "\nyo"}]}
    assert folder.labels(record) == ["\nyo<|im_end|>\n"]
    merging = Folder(tmp_path, PLAIN)  # two newlines are one token, as in Qwen and Llama 3
    backend = json.loads(Path(merging.path).read_text())
    backend["model"]["vocab"]["ĊĊ"], backend["model"]["merges"] = 300, [["Ċ", "Ċ"]]
    backend["pre_tokenizer"]["use_regex"] = False
    Path(merging.path).write_text(json.dumps(backend))
    merging = Folder.__new__(Folder)
    merging.theirs, merging.tokenizer = AutoTokenizer.from_pretrained(str(tmp_path)), build_tokenizer(folder.path)
    merging.chats = Chats(ChatTemplate(merging.tokenizer), merging.tokenizer)
    ((sample, tokens),) = merging.both(record)
    assert tokens.ids.tolist() == merging.theirs.apply_chat_template(record["messages"])["input_ids"] and 300 in tokens.ids
    assert merging.labels(record) == ["\n\nyo<|im_end|>\n"] and "the whole token is a label" in merging.notes(record)


def test_a_generation_prompt_that_opens_a_thought_is_said(tmp_path):
    folder = Folder(tmp_path, OPENS)
    for messages in ([U, A], [U, A, U, A]):
        assert folder.labels({"messages": messages}) == ["yo<|im_end|>\n" * (len(messages) // 2)]
    assert "generation prompt ends with '<think>\\n', but answers do not begin with that" in folder.notes({"messages": [U, A]})


def test_an_answer_is_rendered_as_it_is_when_it_is_generated(tmp_path):
    folder, thought = Folder(tmp_path, THINKS), {**A, "reasoning_content": "hm"}
    record = {"messages": [U, thought, U, {**thought, "content": "so"}]}
    assert folder.labels(record) == ["<think>\nhm\n</think>\n\nyo<|im_end|>\n", "<think>\nhm\n</think>\n\nso<|im_end|>\n"]
    for (sample, tokens), upto in zip(folder.both(record), (2, 4)):
        assert sample.text == folder.theirs.apply_chat_template(record["messages"][:upto], tokenize=False)
        assert tokens.ids.tolist() == folder.theirs.apply_chat_template(record["messages"][:upto])["input_ids"]
    assert "each answer of such a conversation becomes a sample" in folder.notes(record)


def test_a_text_that_closes_its_document_is_not_closed_again(tmp_path):
    folder = Folder(tmp_path, CLOSES)
    assert folder.labels({"messages": [U, A, U, A]}) == ["yo<|im_end|>\n<|endoftext|>"] * 2
    ((_, tokens),) = folder.both({"messages": [U, A]})
    assert [*tokens.ids.tolist(), folder.tokenizer.end_of_document] == folder.theirs.apply_chat_template([U, A])["input_ids"]


def test_answers_without_an_end_are_closed_by_a_label(tmp_path):
    folder = Folder(tmp_path, ENDLESS)
    assert folder.labels({"messages": [U, A]}) == ["yo\n\n<|endoftext|>"]
    assert folder.labels({"messages": [U, A, U, A]}) == ["yo\n\nyo\n\n<|endoftext|>"]
    assert folder.labels({"messages": [U, A, U]}) == ["yo\n\n"]
    assert "answers have no end-of-turn token: <|endoftext|>, which closes" in folder.notes({"messages": [U, A]})
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [U, A]}))
    cfg = DataConfig("text", files=(str(tmp_path / "a.jsonl"),), tokenizer=folder.path, chat=True, eval_fraction=0.0)
    batch = build_datasets(cfg, 60, 1).train.rows.batch(np.arange(1))
    assert folder.tokenizer.end_of_document in batch["labels"]


def test_marks_that_leave_the_end_of_a_turn_out_are_said(tmp_path):
    marked = PLAIN.replace("{{ m['content'] }}", "{% if m.role == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}")
    folder = Folder(tmp_path, marked)
    assert folder.labels({"messages": [U, A]}) == ["yo"] and "marks exclude the end of the turn" in folder.notes({"messages": [U, A]})


def test_marks_in_a_macro_are_not_used(tmp_path):
    macro = "{% macro said(m) %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% endmacro %}"
    folder = Folder(tmp_path, macro + "{% for m in messages %}{{ said(m) }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    assert folder.labels({"messages": [U, A]}) == ["yo<|im_end|>"] and "inside a macro" in folder.notes({"messages": [U, A]})


# Unused fields are reported


def test_reasoning_that_a_template_removes_is_said(tmp_path):
    folder = Folder(tmp_path, STRIPS)
    record = {"messages": [U, {**A, "content": "<think>hm</think>yo"}]}
    assert folder.labels(record) == ["yo<|im_end|>\n"]
    assert folder.notes(record) == "the chat template leaves out part of the content of role assistant, such as reasoning: training leaves it out"


UNUSED = {
    "key": ({"messages": [{**U, "name": "Ann"}, A]}, '"name" of messages of role user is not used'),
    "reasoning": ({"messages": [U, {**A, "reasoning_content": "hm"}]}, '"reasoning_content" of messages of role assistant is not used'),
    "tools": ({"messages": [U, A], "tools": WEATHER}, '"tools" is not used'),
    "kwargs": ({"messages": [U, A], "chat_template_kwargs": {"enable_thinking": True}}, '"enable_thinking" is not used'),
    "all used": ({"messages": [U, A]}, ""),
}


@pytest.mark.parametrize(("record", "note"), UNUSED.values(), ids=UNUSED)
def test_keys_that_the_template_does_not_write_are_said(record, note, tmp_path):
    notes = Folder(tmp_path, PLAIN).notes(record)
    assert notes.startswith(note) and bool(notes) == bool(note)


def test_a_content_that_is_not_written_at_all_is_refused(tmp_path):
    parts = PLAIN.replace("{{ m['content'] }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    folder = Folder(tmp_path, parts)
    with pytest.raises(BadRecord, match="the chat template does not render the content of message 1; if it expects parts"):
        folder.write({"messages": [U, A]})
    in_parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in (U, A)]
    assert folder.labels({"messages": in_parts}) == ["yo<|im_end|>\n"]
    with pytest.raises(BadRecord, match="renders a list of parts as a Python list; give content as a string"):
        Folder(tmp_path, PLAIN).write({"messages": in_parts})


@pytest.mark.parametrize(("arguments", "text"), [('{"city":"Oslo"}', '{"city": "Oslo"}'), ("", "{}")], ids=["object", "empty"])
def test_arguments_in_a_json_string_are_an_object_for_the_template(arguments, text, tmp_path):
    folder, function = Folder(tmp_path, CALLS), {"name": "f", "arguments": arguments}
    for call in ({"type": "function", "function": function}, function):
        template = CALLS if "function" in call else CALLS.replace("c.function.arguments", "c.arguments")
        folder = Folder(tmp_path, template)
        assert folder.labels({"messages": [U, {**A, "tool_calls": [call]}]}) == [f"{text}yo<|im_end|>\n"]


def test_fields_that_are_not_used_are_said_once(tmp_path):
    folder = Folder(tmp_path, PLAIN)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": [{**U, "name": "a"}, A], "id": i, "source": "s"}) + "\n" for i in range(9)))
    cfg = DataConfig("text", files=(str(tmp_path / "a.jsonl"),), tokenizer=folder.path, chat=True, eval_fraction=0.0)
    output = build_datasets(cfg, 60, 1).describe(1)
    assert output.count(f"fields not used: id, source (first: {tmp_path}/a.jsonl:1)") == 1 and output.count('"name" of messages of role user') == 1
    assert build_datasets(cfg, 60, 1).describe(1) == output  # from the cache


def test_columns_of_a_table_that_are_not_read_are_said(tmp_path):
    table = {"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "labels": [[-100, 2]], "text": ["a"]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    cfg = DataConfig("text", files=(str(tmp_path / "a.parquet"),), text_column="input_ids", eval_fraction=0.0)
    assert "fields not used: attention_mask, labels, text" in build_datasets(cfg, 8, 1).describe(1)


# Pairs and prompts


def test_messages_of_a_completion_alone_are_labels(tmp_path):
    folder = Folder(tmp_path, PLAIN)
    record = {"prompt": [U, {**A, "content": "earlier"}, U], "completion": [A]}
    assert folder.labels(record) == ["yo<|im_end|>\n"]


SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}], "chosen": {"from": "gpt", "value": "yo"}, "rejected": {"from": "gpt", "value": "no"}}
ALPACA = {"instruction": "hi", "input": "", "chosen": "yo", "rejected": "no"}


@pytest.mark.parametrize("record", [{"prompt": "hi", "chosen": A, "rejected": {**A, "content": "no"}}, SHAREGPT, ALPACA], ids=["messages", "ShareGPT", "Alpaca"])
def test_the_pairs_of_other_tools_are_read(record):
    document = from_row(record, Fields("pair"))
    assert document.content.chosen.messages == [U, A] and document.content.rejected.messages == [U, {**A, "content": "no"}]
    assert document.content.chosen.first == 1 and not document.unused


def test_a_pair_with_several_answers_that_the_template_rewrites_is_refused(tmp_path):
    folder = Folder(tmp_path, THINKS)
    record = {"chosen": [U, A, U, A], "rejected": [U, {**A, "content": "no"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    cfg = DataConfig("text", files=(str(tmp_path / "a.jsonl"),), tokenizer=folder.path, chat=True, pairs=True, eval_fraction=0.0)
    with pytest.raises(UserError, match="a.jsonl:1: has several answers after the first difference"):
        build_datasets(cfg, 300, 1)


def test_a_prompt_that_both_answers_replace_is_said():
    pair = {"prompt": "other", "chosen": [U, A], "rejected": [U, {**A, "content": "no"}]}
    assert from_row(pair, Fields("pair")).unused == ("prompt",)
    assert from_row({**pair, "prompt": "hi"}, Fields("pair")).unused == ()


# tests.nightly.templates compares forty templates; these have the same shapes

SHAPES = {"plain": PLAIN, "tools": TOOLS, "not none": NOT_NONE, "calls": CALLS, "thinks": THINKS, "opens": OPENS, "closes": CLOSES, "strips": STRIPS, "endless": ENDLESS}


@pytest.mark.parametrize("template", SHAPES.values(), ids=SHAPES)
def test_texts_and_labels_are_those_of_transformers_by_shape(template, tmp_path):
    outcomes = compare(template, tmp_path)
    assert not [(name, outcome) for name, outcome in outcomes.items() if outcome.verdict == "wrong"]
    assert outcomes["one turn"].verdict == outcomes["three turns"].verdict == "right"


def test_samples_of_one_conversation_are_of_the_same_half(tmp_path):
    folder = Folder(tmp_path, THINKS)
    rows = [{"messages": [{**U, "content": f"q{i}"}, {**A, "content": f"<{i}>"}, U, {**A, "content": f"({i})"}]} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DataConfig("text", files=(str(tmp_path / "a.jsonl"),), tokenizer=folder.path, chat=True, eval_fraction=0.2)
    result = build_datasets(cfg, 200, 1)
    seen = []
    for rows in (result.train.rows, result.eval.rows):
        text = folder.theirs.decode(rows.batch(np.arange(len(rows)))["tokens"].ravel().tolist())
        seen.append({i for i in range(60) if f"<{i}>" in text})
        assert seen[-1] == {i for i in range(60) if f"({i})" in text}
    assert not seen[0] & seen[1] and seen[0] | seen[1] == set(range(60)) and 4 < len(seen[1]) < 24


def test_several_processes_write_what_one_does(tmp_path, monkeypatch):
    folder = Folder(tmp_path, "{% if style %}{{ style }}{% endif %}" + THINKS)
    rows = [{"messages": [{**U, "content": f"q{i}"}, A, U, A], "style": "s", "id": i} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"files": (str(tmp_path / "a.jsonl"),), "tokenizer": folder.path, "chat": True, "eval_fraction": 0.0}
    one = build_datasets(DataConfig("text", **options, cache=str(tmp_path / "one")), 100, 1)
    monkeypatch.setattr(sources, "PIECE_BYTES", 1500)
    monkeypatch.setattr(workers, "ALONE", 0)
    several = build_datasets(DataConfig("text", **options, cache=str(tmp_path / "several")), 100, 1)
    first, second = (result.parts[0].train.corpus for result in (one, several))
    for name in ("tokens", "offsets", "counted", "continues"):
        assert getattr(first, name).tolist() == getattr(second, name).tolist()
    notes = [result.parts[0].tokens.holds.notes for result in (one, several)]
    assert notes[0] == notes[1] and "fields not used: id" in notes[0]
