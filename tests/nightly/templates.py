"""Compare chat templates with transformers: text, ids and labels of conversations, for each template file.

    python -m tests.nightly.templates FOLDER ...

Each `.jinja` file gets a byte tokenizer with the special tokens that it names, and renders each conversation of
`CHATS`. Text and ids must equal those of `apply_chat_template`. Labels must equal the masks of transformers if the
template marks answers; otherwise an answer's labels are the tokens that the text through the answer adds to its prompt.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from compiler_trainer.data.chat import Chats, ChatTemplate, Sample, Tokens
from compiler_trainer.data.formats import from_row
from compiler_trainer.data.records import BadRecord, Conversation, Fields
from compiler_trainer.data.tokenizers import build_tokenizer

SPECIAL = re.compile(r"<[｜|/A-Za-z_][^<>{}'\"\s]*>|\[/?[A-Z_]{3,}\]|<\|[^<>{}'\"|]+\|>")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name"}},
            "required": ["city"],
        },
    },
}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CALLED = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "wet"},
    {"role": "assistant", "content": "It rains."},
]
CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [U, A]},
    "three turns": {"messages": [U, A, {**U, "content": "and?"}, {**A, "content": "so"}, U, A]},
    "system": {"messages": [{"role": "system", "content": "be kind"}, U, A]},
    "weight": {"messages": [U, {**A, "content": "BAD", "weight": 0}, U, A]},
    "newline": {"messages": [U, {**A, "content": "\nyo\n"}]},
    "reasoning": {"messages": [U, {**A, "reasoning_content": "hm"}, U, {**A, "reasoning_content": "well"}]},
    "thoughts": {"messages": [U, {**A, "content": "<think>\nhm\n</think>\n\nyo"}]},
    "tools": {"messages": CALLED, "tools": [WEATHER]},
}


class Outcome(NamedTuple):
    """The verdict on a conversation: `right`, `refused` or `wrong`, and the reason."""

    verdict: str
    why: str = ""
    samples: int = 0


def main() -> None:
    """Print one line per template."""
    parser = argparse.ArgumentParser("python -m tests.nightly.templates", description="Compare templates with transformers.")
    parser.add_argument("folders", nargs="+", type=Path, help="folders with .jinja files")
    parser.add_argument("--verbose", action="store_true", help="print each reason and note")
    arguments = parser.parse_args()
    for file in sorted(file for folder in arguments.folders for file in folder.rglob("*.jinja")):
        with tempfile.TemporaryDirectory() as folder:
            outcomes = compare(file.read_text(encoding="utf-8"), Path(folder))
        print(f"{file.parent.name}/{file.stem}: {'; '.join(map(cell, outcomes.items()))}", flush=True)
        for name, outcome in outcomes.items():
            if outcome.why and (arguments.verbose or outcome.verdict == "wrong"):
                print(f"    {name}: {outcome.why}")


def cell(named: tuple[str, Outcome]) -> str:
    """Return an outcome in one word, with the number of samples if there are several."""
    name, outcome = named
    return f"{name}: {outcome.verdict}" + (f" ({outcome.samples})" if outcome.samples > 1 else "")


def compare(source: str, folder: Path) -> dict[str, Outcome]:
    """Return the outcome of each conversation with a template."""
    path = write_tokenizer(source, folder)
    theirs, tokenizer = AutoTokenizer.from_pretrained(str(folder)), build_tokenizer(path)
    chats = Chats(ChatTemplate(tokenizer), tokenizer)
    return {name: outcome_of(record, chats, theirs) for name, record in CHATS.items()}


def write_tokenizer(source: str, folder: Path) -> str:
    """Write the template and a byte tokenizer with the special tokens it names; return the tokenizer's path."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ")]
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, "ĊĊ"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", *sorted(set(SPECIAL.findall(source)))])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return str(folder / "tokenizer.json")


def outcome_of(record: dict[str, Any], chats: Chats, theirs: Any) -> Outcome:
    """Compare a conversation with transformers' text, ids and labels."""
    try:
        chat = from_row(record, Fields("conversation", names=chats.template.names)).content
        assert isinstance(chat, Conversation)
        written = chats.write(chat)
    except BadRecord as refusal:
        try:
            theirs.apply_chat_template(record["messages"], tools=record.get("tools"), tokenize=False)
        except Exception as error:  # a template is a program
            return Outcome("refused", f"{refusal}; transformers: {type(error).__name__}: {error}")
        return Outcome("refused", f"{refusal}; transformers writes it")
    wrong = list(differences(record, chat, list(zip(written.samples, written.tokens)), chats, theirs))
    return Outcome("wrong" if wrong else "right", "; ".join([*wrong, *written.notes]), len(written.samples))


def differences(
    record: dict[str, Any], chat: Conversation, samples: list[tuple[Sample, Tokens]], chats: Chats, theirs: Any
) -> Iterator[str]:
    """Yield each difference between the samples and transformers."""
    messages, tools, labelled = record["messages"], record.get("tools"), list(chat.labelled)
    last = max(sample.upto for sample, _ in samples)
    if last < len(messages):
        yield f"{len(messages) - last} messages at the end are in no sample"
    for sample, tokens in samples:
        upto = messages[: sample.upto]
        ids = theirs.apply_chat_template(upto, tools=tools)["input_ids"]
        ours = [int(i) for i in tokens.ids] + [chats.tokenizer.end_of_document] * (len(ids) > len(tokens.ids))
        if sample.text != theirs.apply_chat_template(upto, tools=tools, tokenize=False) or ours != ids:
            yield f"text of {sample.upto} messages differs"
            continue
        counted = np.append(tokens.counted, False)[: len(ids)]
        if chats.template.marking[chats.template.source(chat.names)]:
            expected = np.array(masks(upto, tools, theirs), bool)
            _, places = chats.tokenizer.encode_placed(sample.text)
            for i in range(1, len(expected)):  # theirs ends at the first token of a character that has several
                expected[i] |= expected[i - 1] and places[i] == places[i - 1]
            for number in set(assistant_indices(messages)) - set(labelled):
                ends = [theirs.apply_chat_template(messages[: number + n], tools=tools)["input_ids"] for n in (0, 2)]
                expected[common_prefix_length(ends[0], ids) : common_prefix_length(ends[1], ids)] = False
            if counted.tolist() != expected.tolist():
                yield "labels differ from transformers' masks"
            labelled = []
            continue
        mine = labelled if len(samples) == 1 else labelled[:1]
        expected = np.zeros(len(ids), bool)
        for number in mine:
            prompt = theirs.apply_chat_template(messages[:number], tools=tools, add_generation_prompt=True)["input_ids"]
            through = theirs.apply_chat_template(messages[: number + 1], tools=tools)["input_ids"]
            expected[common_prefix_length(prompt, through) : len(through)] = True
        labelled = labelled[len(mine) :]
        if (counted != expected).any():
            yield f"labels differ in {np.sum(counted != expected)} of {len(ids)} tokens"
    if labelled:
        yield f"answers {labelled} are in no sample"


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix of two lists."""
    return next((i for i, (one, other) in enumerate(zip(a, b)) if one != other), min(len(a), len(b)))


def assistant_indices(messages: list[dict[str, Any]]) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def masks(messages: list[dict[str, Any]], tools: Any, theirs: Any) -> list[int]:
    """Return transformers' assistant mask of a conversation."""
    return theirs.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True)["assistant_masks"]


if __name__ == "__main__":
    main()
