"""Formats of records and files: each gives the messages and labels that are written here by hand, or one clear line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from byte_tokenizer import CHATML, write_template, write_tokenizer
from datasets import Dataset
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data import readers, tokenized
from compiler_trainer.data.corpus import map_volume
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.stored import ALL
from compiler_trainer.data.tokenizers import build_tokenizer


def H(text, **keys):
    return {"from": "human", "value": text, **keys}


def G(text, **keys):
    return {"from": "gpt", "value": text, **keys}


def S(text):
    return {"role": "system", "content": text}


def U(text):
    return {"role": "user", "content": text}


def A(text, **keys):
    return {"role": "assistant", "content": text, **keys}


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    return write_tokenizer(tmp_path / "tokenizer")


def datasets(path, tokenizer, **options):
    options = {"chat": True, "tokenizer": tokenizer, "eval_fraction": 0.0, "cache": f"{path}.cache", **options}
    return build_datasets(DataConfig(name="text", files=(str(path),), **options), 1000, 1)


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def documents(result, tokenizer):
    """Return the text of each document and those of its labels, in the order of the file."""
    backend, corpus = Tokenizer.from_file(tokenizer), map_volume(result.parts[0].tokens.volumes[0], build_tokenizer(tokenizer), True)
    texts = []
    for start, end in zip(corpus.offsets, corpus.offsets[1:]):
        ids, counted = corpus.tokens[start : end - 1], corpus.counted[start : end - 1]
        runs = np.split(ids, np.flatnonzero(np.diff(counted)) + 1)
        first = 0 if len(counted) and counted[0] else 1
        texts.append(tuple(backend.decode(part.tolist(), skip_special_tokens=False) for part in (ids, *runs[first::2])))
    return texts


def rendered(*messages):
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


# Formats: the record, its messages, and its answers that are labels

CHAT = [U("hi"), A("yo"), U("2+2?"), A("4")]
FORMATS = {
    "OpenAI": ({"messages": CHAT}, CHAT, ["yo", "4"]),
    "OpenAI in conversations": ({"conversations": CHAT, "system": "be kind"}, [S("be kind"), *CHAT], ["yo", "4"]),
    "ShareGPT": ({"conversations": [H("hi"), G("yo"), H("2+2?"), G("4")], "system": "be kind"}, [S("be kind"), *CHAT], ["yo", "4"]),
    "ShareGPT in messages": (
        {"messages": [{"from": "system", "value": "be kind"}, {"from": "user", "value": "hi"}, {"from": "chatgpt", "value": "yo"}, {"from": "observation", "value": "3"}, {"from": "model", "value": "4"}]},
        [S("be kind"), U("hi"), A("yo"), {"role": "tool", "content": "3"}, A("4")],
        ["yo", "4"],
    ),
    "ShareGPT with weights": ({"conversations": [H("hi", weight=0), G("yo", weight=0), H("2+2?"), G("4", weight=1)]}, CHAT, ["4"]),
    "same system prompt": ({"messages": [S("be kind"), *CHAT], "system": "be kind"}, [S("be kind"), *CHAT], ["yo", "4"]),
    "completion": ({"prompt": "hi", "completion": "yo", "system": "be kind"}, [S("be kind"), U("hi"), A("yo")], ["yo"]),
    "completion of messages": ({"prompt": CHAT[:3], "completion": [A("4")]}, CHAT, ["4"]),
    "Alpaca": ({"instruction": "Add.", "input": "2+2", "output": "4"}, [U("Add.\n2+2"), A("4")], ["4"]),
    "Alpaca with history": (
        {"instruction": "2+2?", "input": "", "output": "4", "system": "be kind", "history": [["hi", "yo"]]},
        [S("be kind"), *CHAT],
        ["yo", "4"],
    ),
    "Alpaca without an instruction": ({"instruction": "", "input": "hi", "output": "yo", "history": None}, [U("hi"), A("yo")], ["yo"]),
    "null is missing": ({"messages": None, "conversations": [H("hi"), G("yo")]}, [U("hi"), A("yo")], ["yo"]),
}


@pytest.mark.parametrize(("record", "messages", "answers"), FORMATS.values(), ids=FORMATS)
def test_a_format_gives_its_messages_and_labels(record, messages, answers, tokenizer, tmp_path):
    result = datasets(lines(tmp_path / "a.jsonl", record), tokenizer)
    expected = (rendered(*messages), *(f"{answer}<|im_end|>\n" for answer in answers))
    assert documents(result, tokenizer) == [expected]
    pq.write_table(pa.Table.from_pylist([{**record, "id": 7}]), tmp_path / "a.parquet")
    table = datasets(tmp_path / "a.parquet", tokenizer)
    assert documents(table, tokenizer) == [expected] and "fields not used: id (first: " in table.describe(1)


def test_conversations_that_datasets_stores_are_read_from_its_folder_and_its_files(tokenizer, tmp_path):
    rows = [{"conversations": [H("hi"), G("yo")], "system": None}, {"conversations": [H("hi", weight=None), G("so", weight=0), H("2+2?"), G("4")], "system": "be kind"}]
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    cfg = DataConfig("hf_dataset", path=str(tmp_path / "saved"), tokenizer=tokenizer, chat=True, eval_fraction=0.0)
    expected = [
        (rendered(U("hi"), A("yo")), "yo<|im_end|>\n"),
        (rendered(S("be kind"), U("hi"), A("so"), U("2+2?"), A("4")), "4<|im_end|>\n"),
    ]
    assert documents(build_datasets(cfg, 1000, 1), tokenizer) == documents(datasets(file, tokenizer), tokenizer) == expected


PAIRS = {
    "ShareGPT": ({"conversations": [H("hi"), G("yo"), H("2+2?")], "chosen": G("4"), "rejected": G("5"), "system": "be kind"}, [S("be kind"), *CHAT[:3]]),
    "ShareGPT in lists": ({"chosen": [H("2+2?"), G("4")], "rejected": [H("2+2?"), G("5")]}, [U("2+2?")]),
    "Alpaca": ({"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "5", "history": [["hi", "yo"]]}, CHAT[:3]),
    "prompt": ({"prompt": "2+2?", "chosen": "4", "rejected": "5", "system": "be kind"}, [S("be kind"), U("2+2?")]),
}


@pytest.mark.parametrize(("record", "prompt"), PAIRS.values(), ids=PAIRS)
def test_a_format_gives_its_pair(record, prompt, tokenizer, tmp_path):
    result = datasets(lines(tmp_path / "a.jsonl", record, record), tokenizer, pairs=True)
    both = [(rendered(*prompt, A(answer)), f"{answer}<|im_end|>\n") for answer in ("4", "5")]
    assert documents(result, tokenizer) == both * 2


def test_the_start_names_each_format_with_its_first_record(tokenizer, tmp_path):
    records = [{"messages": CHAT}, {"conversations": [H("hi"), G("yo")], "id": 1}, {"instruction": "a", "output": "b"}, {"messages": CHAT}]
    output = datasets(lines(tmp_path / "a.jsonl", *records), tokenizer).describe(1)
    notes = [line for line in output.splitlines() if line.startswith("note: ") and " packed" not in line]
    path = tmp_path / "a.jsonl"
    assert notes[:4] == [
        f"note: {path}: read as OpenAI messages (fields messages, role, content) (first: {path}:1)",
        f"note: {path}: read as ShareGPT conversations (fields conversations, from, value) (first: {path}:2)",
        f"note: {path}: fields not used: id (first: {path}:2)",
        f"note: {path}: read as Alpaca instructions (fields instruction, output) (first: {path}:3)",
    ]


# Tool calls

# The tool part of Qwen2.5's template.
QWEN = r"""{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are helpful.{% endif %}{{ "\n\n# Tools\n\n<tools>" }}
{%- for tool in tools %}{{ "\n" }}{{ tool | tojson }}{% endfor %}{{ "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{ "<|im_start|>system\n" + messages[0].content + "<|im_end|>\n" }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}{{ "<|im_start|>" + message.role + "\n" }}{% if message.reasoning_content %}{{ "<think>\n" + message.reasoning_content + "\n</think>\n" }}{% endif %}{{ message.content + "<|im_end|>\n" }}
{%- elif message.role == 'assistant' %}{{ "<|im_start|>assistant" }}{% if message.content %}{{ "\n" + message.content }}{% endif %}
{%- for call in message.tool_calls %}{% if call.function is defined %}{% set call = call.function %}{% endif %}{{ '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}{{ "}\n</tool_call>" }}{% endfor %}{{ "<|im_end|>\n" }}
{%- elif message.role == 'tool' %}{{ "<|im_start|>user\n<tool_response>\n" + message.content + "\n</tool_response><|im_end|>\n" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}"""
WEATHER = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
CALLS = [
    S("be kind"),
    U("rain?"),
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}}]},
    {"role": "tool", "content": '{"rain": true}'},
    A("It rains.", reasoning_content="it is wet"),
]
ARGUMENTS = '{"city":"Troms\\u00f8","days":2}'
TOOL_RECORDS = {
    "OpenAI": {"messages": [*CALLS[:2], {**A(None), "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}]}, {**CALLS[3], "tool_call_id": "1"}, CALLS[4]], "tools": WEATHER},
    "ShareGPT": {
        "conversations": [H("rain?"), {"from": "function_call", "value": f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'}, {"from": "observation", "value": '{"rain": true}'}, G("It rains.", reasoning_content="it is wet")],
        "system": "be kind",
        "tools": json.dumps(WEATHER),
    },
    "ShareGPT with text": {
        "messages": [H("rain?"), {"from": "function_call", "value": json.dumps([{"name": "get_weather", "arguments": ARGUMENTS}])}, {"from": "tool", "value": '{"rain": true}'}, G("It rains.", reasoning_content="it is wet")],
        "system": "be kind",
        "tools": WEATHER,
    },
}


@pytest.mark.parametrize("record", TOOL_RECORDS.values(), ids=TOOL_RECORDS)
def test_a_conversation_with_tools_has_the_ids_of_transformers(record, tokenizer, tmp_path):
    write_template(Path(tokenizer).parent, QWEN)
    result = datasets(lines(tmp_path / "a.jsonl", record), tokenizer)
    theirs = AutoTokenizer.from_pretrained(str(Path(tokenizer).parent))
    corpus = map_volume(result.parts[0].tokens.volumes[0], build_tokenizer(tokenizer), True)
    assert corpus.tokens[:-1].tolist() == theirs.apply_chat_template(CALLS, tools=WEATHER)["input_ids"]
    ((text, *labels),) = documents(result, tokenizer)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}\n</tool_call><|im_end|>\n'
    assert labels == [call, "<think>\nit is wet\n</think>\nIt rains.<|im_end|>\n"]
    assert text.startswith("<|im_start|>system\nbe kind\n\n# Tools\n\n<tools>\n" + json.dumps(WEATHER[0]) + "\n</tools><|im_end|>\n")


def test_reasoning_that_the_template_does_not_render_is_said(tokenizer, tmp_path):
    record = {"conversations": [H("hi"), G("yo", thinking="hm")], "tools": ""}
    output = datasets(lines(tmp_path / "a.jsonl", record), tokenizer).describe(1)
    assert '"thinking" of messages of role assistant is not used: the chat template does not render it' in output


# The last answer

LAST = {
    "last": (CHAT, ["4"]),
    "ends with a question": ([*CHAT, U("and?")], ["4"]),
    "weight of an earlier answer": ([CHAT[0], A("yo", weight=0), *CHAT[2:]], ["4"]),
    "weight 1": ([*CHAT[:3], A("4", weight=1)], ["4"]),
}


@pytest.mark.parametrize(("messages", "answers"), LAST.values(), ids=LAST)
def test_the_last_answer_alone_is_a_label(messages, answers, tokenizer, tmp_path):
    path = lines(tmp_path / "a.jsonl", {"messages": messages})
    assert [labels for _, *labels in documents(datasets(path, tokenizer, train_on="last"), tokenizer)] == [[f"{a}<|im_end|>\n" for a in answers]]


def test_answers_marked_by_the_template_are_labels_only_if_last(tokenizer, tmp_path):
    marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    write_template(Path(tokenizer).parent, marked)
    path = lines(tmp_path / "a.jsonl", {"messages": CHAT})
    assert documents(datasets(path, tokenizer), tokenizer)[0][1:] == ("yo<|im_end|>", "4<|im_end|>")
    assert documents(datasets(path, tokenizer, train_on="last"), tokenizer)[0][1:] == ("4<|im_end|>",)


def test_a_template_that_rewrites_earlier_answers_gives_one_sample_of_the_last(tokenizer, tmp_path):
    write_template(Path(tokenizer).parent, CHATML.replace("message['content']", "message['content'] + ('!' if loop.last and message.role == 'assistant' else '')"))
    path = lines(tmp_path / "a.jsonl", {"messages": CHAT})
    assert [labels for _, *labels in documents(datasets(path, tokenizer), tokenizer)] == [["yo!<|im_end|>\n"], ["4!<|im_end|>\n"]]
    assert [labels for _, *labels in documents(datasets(path, tokenizer, train_on="last"), tokenizer)] == [["4!<|im_end|>\n"]]


def test_of_a_pair_with_several_new_answers_the_last_is_a_label(tokenizer, tmp_path):
    path = lines(tmp_path / "a.jsonl", *[{"chosen": CHAT, "rejected": [U("hi"), A("no"), *CHAT[2:3], A("5")]}] * 2)
    assert [labels for _, *labels in documents(datasets(path, tokenizer, pairs=True, train_on="last"), tokenizer)] == [["4<|im_end|>\n"], ["5<|im_end|>\n"]] * 2


def test_the_last_answer_needs_conversations_and_tokens_made_for_it(tokenizer, tmp_path):
    path = lines(tmp_path / "a.jsonl", {"messages": CHAT})
    cfg = DataConfig("text", files=(str(path),), tokenizer=tokenizer, chat=True, eval_fraction=0.0, train_on="last")
    tokenized.write(cfg, tmp_path / "out", ALL)
    with pytest.raises(UserError, match="^data.train_on: is all, but .*/out was made with last; set it to last$"):
        build_datasets(DataConfig("tokens", tokens=str(tmp_path / "out"), tokenizer=tokenizer, chat=True, eval_fraction=0.0), 100, 1)


# Files

TEXTS = ["a", "b\n" * 60, 'with "quotes", and a comma', "é" * 50, "tab\there", "007", "", "NA", "last word"]


def write_txt(path):
    path.write_text("".join(f"{text}<|end|>" for text in TEXTS))


def write_lines(path):
    path.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in TEXTS) + "\n\n")


def write_csv(path):
    delimiter = "\t" if path.suffix == ".tsv" else ","
    quotes = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
    path.write_text("".join(delimiter.join(row) + "\n" for row in [("id", "text"), *((str(i), text) for i, text in enumerate(quotes))]))


def write_feather(path):
    feather.write_feather(pa.table({"text": TEXTS}), path)


def write_stream(path):
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, 4)


def write_list(path):
    path.write_text("\ufeff " + json.dumps([{"text": text, "id": 1} for text in TEXTS], indent=1))


PLAIN = {"txt": write_txt, "jsonl": write_lines, "json": write_list, "csv": write_csv, "tsv": write_csv, "feather": write_feather, "arrow": write_stream}
PACKERS = {"gz": gzip.compress, "zst": lambda content: pa.compress(content, codec="zstd", asbytes=True)}


def texts_of(path, **options):
    result = build_datasets(DataConfig("text", files=(str(path),), document_separator="<|end|>", eval_fraction=0.0, cache=f"{path}.cache", **options), 1000, 1)
    summary = result.parts[0].tokens.holds
    assert (summary.documents, summary.empty) == (len(TEXTS), 1)
    corpus = map_volume(result.parts[0].tokens.volumes[0], build_tokenizer("bytes"), False)
    return [bytes(corpus.tokens[a : b - 1].tolist()).decode() for a, b in zip(corpus.offsets, corpus.offsets[1:])]


@pytest.mark.parametrize("kind", PLAIN)
def test_each_kind_of_file_gives_its_texts(kind, tmp_path):
    PLAIN[kind](tmp_path / f"a.{kind}")
    assert texts_of(tmp_path / f"a.{kind}") == [text for text in TEXTS if text]


def test_lines_in_a_json_file_are_records_too(tmp_path):
    write_lines(tmp_path / "a.json")
    assert texts_of(tmp_path / "a.json") == [text for text in TEXTS if text]


def test_a_json_file_in_a_folder_is_not_data(tmp_path):
    write_list(tmp_path / "config.json")
    with pytest.raises(UserError, match="no file below it ends in"):
        texts_of(tmp_path)


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "tsv"])
def test_a_compressed_file_gives_the_texts_of_the_plain_one(kind, packing, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 7)
    monkeypatch.setattr(readers, "ROW_MOST_BYTES", 135)
    PLAIN[kind](tmp_path / f"a.{kind}")
    content = (tmp_path / f"a.{kind}").read_bytes()
    packed = tmp_path / f"a.{kind}.{packing}"
    packed.write_bytes(b"".join(PACKERS[packing](part) for part in (content[:30], content[30:])))  # as from `cat a.gz b.gz`
    assert texts_of(packed) == [text for text in TEXTS if text]


@pytest.mark.parametrize("packing", PACKERS)
def test_a_compressed_text_is_one_document_with_the_tokens_of_the_plain_one(packing, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "TEXT_PART_BYTES", 100)
    monkeypatch.setattr(readers, "WINDOW_BYTES", 20)
    text, corpora = "\ufeff" + "some words é\n and   more, " * 300, []
    for name, content in {"a.txt": text.encode(), f"b.txt.{packing}": PACKERS[packing](text.encode())}.items():
        (tmp_path / name).write_bytes(content)
        result = build_datasets(DataConfig("text", files=(str(tmp_path / name),), tokenizer=tokenizer, add_bos_token=True, eval_fraction=0.0), 8, 1)
        corpora.append(map_volume(result.parts[0].tokens.volumes[0], build_tokenizer(tokenizer), False))
    assert corpora[0].tokens.tolist() == corpora[1].tokens.tolist() and len(corpora[0]) == len(corpora[1]) == 1


@pytest.mark.parametrize("ending", ["csv", "tsv.gz"])
def test_columns_of_strings_are_the_fields_of_a_conversation(ending, tokenizer, tmp_path):
    rows = [("instruction", "input", "output", "system", "tools", "id"), ("Add.", "2+2", "4", "", "", "1"), ("hi", "", "007", "be kind", "", "2")]
    content = "".join(("\t" if "tsv" in ending else ",").join(row) + "\n" for row in rows).encode()
    (tmp_path / f"a.{ending}").write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    result = datasets(tmp_path / f"a.{ending}", tokenizer)
    expected = [(rendered(U("Add.\n2+2"), A("4")), "4<|im_end|>\n"), (rendered(S("be kind"), U("hi"), A("007")), "007<|im_end|>\n")]
    assert documents(result, tokenizer) == expected and "fields not used: id (first: " in result.describe(1)


# Records and files that are refused

NO_FORMAT = 'has no conversation; give "messages", or "conversations", or "prompt" and "completion", or "instruction" and "output"; its fields are '
ROLES = "human, user, gpt, assistant, model, chatgpt, bing, function_call, system, tool, function, observation"
CALL_FIX = 'give {"name": ..., "arguments": {...}}, or a list of these'
BAD = [
    # a record, or the content of a file, and its verdict, which begins with the file's name
    ({"messages": CHAT, "conversations": [H("hi")]}, 'a.jsonl:1: has "messages" (OpenAI messages) and "conversations" (ShareGPT conversations); remove one of them'),
    ({"prompt": "hi", "completion": "yo", "instruction": "hi", "output": "yo"}, 'a.jsonl:1: has "prompt" and "completion" (prompts and completions) and "instruction" and "output" (Alpaca instructions); remove one of them'),
    ({"question": "hi", "answer": "yo"}, f"a.jsonl:1: {NO_FORMAT}question, answer"),
    ({"instruction": "hi", "input": "", "response": "yo"}, 'a.jsonl:1: has no "output", which Alpaca instructions need; its fields are instruction, input, response'),
    ({"prompt": "hi", "response": "yo"}, 'a.jsonl:1: has no "completion", which prompts and completions need; its fields are prompt, response'),
    ({"conversations": "hi"}, 'a.jsonl:1: field "conversations" is not a list of objects'),
    ({"conversations": [["hi", "yo"]]}, 'a.jsonl:1: field "conversations" is not a list of objects'),
    ({"conversations": [{"from": "narrator", "value": "hi"}]}, f"a.jsonl:1: field \"conversations[0].from\" is 'narrator'; it must be one of {ROLES}"),
    ({"conversations": [H("hi"), {"from": "gpt", "text": "yo"}]}, 'a.jsonl:1: field "conversations[1].value" is null'),
    ({"conversations": [H("hi"), G(["yo"])]}, 'a.jsonl:1: field "conversations[1].value" is list, not a string'),
    ({"conversations": [H("hi"), G("yo", role="assistant")]}, 'a.jsonl:1: field "conversations[1]" has both "from" and "role"; remove one of them'),
    ({"conversations": [H("hi")]}, "a.jsonl:1: there is no answer: no message has the role assistant"),
    ({"conversations": [H("hi"), G("yo", weight=2)]}, 'a.jsonl:1: field "conversations[1].weight" is 2; an answer counts (1, true) or not (0, false)'),
    ({"conversations": [{"from": "function_call", "value": "f(Oslo)"}]}, f"a.jsonl:1: field \"conversations[0].value\" is 'f(Oslo)', not JSON of tool calls; {CALL_FIX}"),
    ({"conversations": [{"from": "function_call", "value": '{"name": "f"}'}]}, f"a.jsonl:1: field \"conversations[0].value\" is '{{\"name\": \"f\"}}', not JSON of tool calls; {CALL_FIX}"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{city: Oslo}"}}]}]}, "a.jsonl:1: field \"messages[0].tool_calls[0].function.arguments\" is '{city: Oslo}'; give an object, or JSON of one"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]}, "a.jsonl:1: field \"messages[0].tool_calls[0].arguments\" is '[1]'; give an object, or JSON of one"),
    ({"messages": CHAT, "tools": "f"}, 'a.jsonl:1: field "tools" is a string, but not JSON: Expecting value: line 1 column 1 (char 0)'),
    ({"messages": [S("be kind"), *CHAT], "system": "be rude"}, 'a.jsonl:1: has a field "system" and another system prompt in its messages; remove one of them'),
    ({"instruction": "hi", "output": "yo", "system": ["be kind"]}, 'a.jsonl:1: field "system" is list, not a string'),
    ({"instruction": "hi", "output": "yo", "history": [["hi"]]}, 'a.jsonl:1: field "history" is not a list of pairs, each a question and its answer'),
    ({"instruction": "hi", "output": None}, 'a.jsonl:1: field "output" is null'),
    ({"messages": [*CHAT[:3], A("4", weight=0)]}, "a.jsonl:1: no answer is trained on: the last one has weight 0 or train false"),
    (gzip.compress(b'{"prompt": "hi", "completion": "yo"}\n\n{"prompt": "hi"}\n'), 'a.jsonl.gz:3: has no "completion", which prompts and completions need; its fields are prompt'),
    (gzip.compress(bytes(range(256)))[:60], "a.jsonl.gz: cannot be read: Truncated compressed stream"),
    (b"prompt,completion\n", "a.csv.gz: cannot be read: zlib inflate failed: incorrect header check"),
    (b"no frame", "a.txt.zst: cannot be read: ZSTD decompress failed: Unknown frame descriptor"),
    (b"question,answer\nhi,yo\n", f"a.csv: {NO_FORMAT}question, answer"),
    (b"prompt,completion\nhi,yo\nhi\n", "a.csv: is not readable CSV: CSV parse error: Row #3: Expected 2 columns, got 1: hi"),
    (b"prompt\tcompletion\tprompt\nhi\tyo\tso\n", 'a.tsv: needs one column "prompt"; it has prompt, completion, prompt'),
    (b"prompt,completion\nhi,caf\xe9\n", "a.csv: is not readable CSV: In CSV column #1: Row #2: CSV conversion error to string: invalid UTF8 data"),
    (b"instruction,output,history\nhi,yo,\nhi,yo,none\n", 'a.csv: row 1: field "history" is not a list of pairs, each a question and its answer'),
    (b"", "a.csv: is not readable CSV: Empty CSV file"),
    (gzip.compress(b""), "a.jsonl.gz: the corpus is empty: 0 documents, none with a token"),
    (b"[]", "a.json: the corpus is empty: 0 documents, none with a token"),
    (b'[{"prompt": "hi", "completion": "yo"}, 1]', "a.json: record 2: is not an object; each entry of the list must be one"),
    (b'[{"prompt": "hi",\n "completion": }]', "a.json: is not JSON: Expecting value at line 2, column 16"),
]


@pytest.mark.parametrize(("content", "verdict"), BAD, ids=range(len(BAD)))
def test_a_malformed_record_or_file_gets_its_verdict(content, verdict, tokenizer, tmp_path):
    path = tmp_path / verdict.partition(":")[0]
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(UserError) as error:
        datasets(path, tokenizer, train_on="last")
    assert str(error.value) == f"{tmp_path}/{verdict}"


def test_a_part_of_a_compressed_text_that_is_not_utf8_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "TEXT_PART_BYTES", 100)
    monkeypatch.setattr(readers, "WINDOW_BYTES", 20)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some words " * 50 + b"caf\xe9"))
    with pytest.raises(UserError, match="a.txt.gz: is not UTF-8: byte 0xe9 at offset 553"):
        build_datasets(DataConfig("text", files=(str(tmp_path / "a.txt.gz"),), bad_records="skip"), 8, 1)
