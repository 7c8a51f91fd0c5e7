"""`check-data` prints a record token by token, next to transformers' text, and unused fields."""

from __future__ import annotations

import json
import re

import pytest
from byte_tokenizer import CHATML, write_template, write_tokenizer
from commands import call

U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def shown(folder, capsys, *records, arguments=(), code=0):
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert call("check-data", str(folder / "a.jsonl"), f"model.path={folder}", f"data.cache={folder / 'cache'}", *arguments) == code
    return capsys.readouterr().out


def labels(output):
    return re.findall(r"^ *\d+ +\d+ label  '(.*)'", output, re.MULTILINE)


def test_a_conversation_is_shown_with_its_labels_and_what_is_not_used(folder, capsys):
    output = shown(folder, capsys, {"messages": [{**U, "name": "Ann"}, A], "id": 1}, {"messages": [U, A, U, A]})
    assert output.startswith(f"{folder}/a.jsonl:1\n\nsample 1 of 1: 26 tokens, 4 labels\n     0      257        '<|im_start|>'\n")
    assert labels(output) == ["y", "o", "<|im_end|>", "\\n"] and "closes the document" in output
    assert "apply_chat_template gives the same tokens, of this text:\n<|im_start|>user\nhi<|im_end|>\n" in output
    assert "note: fields not used: id\n" in output and 'note: "name" of messages of role user is not used' in output
    assert "2 records read: 2 samples\n" in output and output.endswith("train on it with: data=text data.chat=true\n")


def test_texts_and_pairs_are_told_from_conversations(folder, capsys):
    output = shown(folder, capsys, {"text": "hi"})
    assert labels(output) == ["i", "<|endoftext|>"] and output.endswith("train on it with: data=text\n")
    output = shown(folder, capsys, {"prompt": "hi", "chosen": "yo", "rejected": "no"})
    assert "sample 2 of 2" in output and labels(output)[4:6] == ["n", "o"] and output.endswith("data.chat=true data.pairs=true\n")


def test_another_record_and_bad_ones_are_shown(folder, capsys):
    records = [{"messages": [U, A]}, {"messages": [U]}, {"messages": [U, {**A, "content": "so"}]}]
    output = shown(folder, capsys, *records, arguments=("--record", "3", "--tokens", "5"), code=1)
    assert output.startswith(f"{folder}/a.jsonl:3\n") and "21 tokens more" in output
    assert f"bad: there is no answer: no message has the role assistant (first: {folder}/a.jsonl:2; 1 in all)" in output
    assert "bad: there is no answer" in shown(folder, capsys, records[1], arguments=("data.chat=true",), code=1)


def test_a_template_that_differs_by_turn_is_shown_by_sample(folder, capsys):
    write_template(folder, CHATML.replace("message['content']", "message['content'] + ('!' if loop.last and message.role == 'assistant' else '')"))
    output = shown(folder, capsys, {"messages": [U, A, U, A]})
    assert "sample 2 of 2" in output and "each answer of such a conversation becomes a sample" in output
    assert output.count("gives the same tokens") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--record", "9"], "error: --record: 9 is beyond the last record; name a lower one"),
        (["--tokens", "0"], "error: --tokens: 0 must be at least 1"),
        (["data.files=[b]"], "error: data.files: is set, and "),
        (["data=stdlib"], "error: data.files: "),
        (["data.train_on=last"], "error: data.train_on: last with data.chat=false, and only conversations have answers; set data.chat=true"),
        (["data.chat=true", "data.text_column=x", "data.eos_token=nope"], "error: data.eos_token: nope is not a token"),
    ],
    ids=range(6),
)
def test_a_wrong_flag_gets_one_line(arguments, message, folder, capsys):
    (folder / "a.jsonl").write_text(json.dumps({"messages": [U, A]}))
    assert call("check-data", str(folder / "a.jsonl"), f"model.path={folder}", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_a_record_of_no_kind_is_refused_with_its_fields(folder, capsys):
    (folder / "a.jsonl").write_text('{"instruction": "hi", "response": "yo"}')
    assert call("check-data", str(folder / "a.jsonl"), f"model.path={folder}") == 2
    assert 'a.jsonl:1: has no "output", which Alpaca instructions need; its fields are instruction, response' in capsys.readouterr().err


SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
ALPACA = {"instruction": "hi", "input": "", "output": "yo"}
PAIR = {**SHAREGPT, "chosen": {"from": "gpt", "value": "so"}, "rejected": {"from": "gpt", "value": "no"}}


@pytest.mark.parametrize(
    ("record", "form", "options"),
    [
        (SHAREGPT, "ShareGPT conversations (fields conversations, from, value)", "data.chat=true"),
        ({"messages": SHAREGPT["conversations"]}, "ShareGPT conversations (fields messages, from, value)", "data.chat=true"),
        ({"conversations": [U, A]}, "OpenAI messages (fields conversations, role, content)", "data.chat=true"),
        (ALPACA, "Alpaca instructions (fields instruction, output)", "data.chat=true"),
        (PAIR, "ShareGPT pairs (fields conversations, chosen, rejected)", "data.chat=true data.pairs=true"),
    ],
    ids=["ShareGPT", "messages", "conversations", "Alpaca", "pairs"],
)
def test_the_format_of_a_record_is_printed(record, form, options, folder, capsys):
    output = shown(folder, capsys, record)
    assert f"note: read as {form}\n" in output and output.endswith(f"train on it with: data=text {options}\n")


def test_labels_are_those_of_the_last_answer_alone(folder, capsys):
    output = shown(folder, capsys, {"messages": [U, A, U, {**A, "content": "so"}]}, arguments=("data.train_on=last", "data.chat=true"))
    assert labels(output) == ["s", "o", "<|im_end|>", "\\n"] and output.endswith("data.chat=true data.train_on=last\n")
