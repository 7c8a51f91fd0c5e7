"""A folder's tokenizer acts as in transformers: the ends of documents, the tokens before a text, and stops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import CHATML
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.config.validate import validate_data
from compiler_trainer.data import tokenized
from compiler_trainer.data.chat import prompt_of
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.stored import ALL
from compiler_trainer.data.tokenizers import build_tokenizer

SPECIAL = ["<pad>", "<eos>", "<bos>", "</s>", "<|endoftext|>", "<unk>", "<|im_end|>", "[CLS]", "[SEP]"]


def write(folder: Path, config=None, around="$A", special=SPECIAL, **files):
    """Write a byte tokenizer with special tokens, whose post-processor adds `around`; return its tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(special)
    names = [(name, backend.token_to_id(name)) for name in special]
    template = processors.TemplateProcessing(single=around, special_tokens=names) if around else None
    backend.post_processor = template if template and "$A" == around[:2] else processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder / "tokenizer.json")


def document(path, text="hi", **options):
    """Return the token names of a text as a document."""
    folder = Path(path).parent
    (folder / "a.jsonl").write_text(json.dumps({"text": text}))
    cfg = DataConfig("text", files=(str(folder / "a.jsonl"),), tokenizer=path, eval_fraction=0.0, **options)
    result = build_datasets(cfg, 8, 1).parts[0].train.corpus
    backend = Tokenizer.from_file(path)
    return [backend.id_to_token(i) for i in result.tokens.tolist()]


@pytest.mark.parametrize("around", ["$A", "$A <eos>", "<bos> $A <eos>", "$A </s> <eos>"])
@pytest.mark.parametrize("records", ["classes", "passages", "triplets"])
def test_texts_that_are_pooled_are_what_transformers_pools(records, around, tmp_path):
    """The token that ends a document is one of a text's own if the tokenizer adds it."""
    path, words = write(tmp_path, EOS, around), ["fjord", "sea", "ice"]
    row = {"text": words[0], "label": "a"} if records == "classes" else dict(zip(("query", "positive", "negative"), words))
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    labels = ("a", "b") if records == "classes" else ()
    cfg = DataConfig("text", files=(str(tmp_path / "a.jsonl"),), tokenizer=path, eval_fraction=0.0, records=records, labels=labels)
    batch = {name: array[0] for name, array in build_datasets(cfg, 32, 1).train.next().items()}
    expected = [AutoTokenizer.from_pretrained(tmp_path)(word)["input_ids"] for word in words]
    for document in range({"classes": 1, "passages": 2, "triplets": 3}[records]):
        mine = batch["documents"] == document
        last = int(batch["positions"][mine & (batch["labels"] != -100)].max())
        assert batch["tokens"][mine][: last + 1].tolist() == expected[document]


EOS = {"eos_token": "<eos>"}
ENDS = {
    "as Gemma: </s> is another token": ({"config": EOS}, "<eos>"),
    "<|endoftext|> is padding": ({"config": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}}, "<|im_end|>"),
    "as an object": ({"config": {"eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True}}}, "<eos>"),
    "in special_tokens_map.json": ({"config": {}, "special_tokens_map": {"eos_token": "<eos>"}}, "<eos>"),
    "special_tokens_map.json comes before": ({"config": {"eos_token": "</s>"}, "special_tokens_map": {"eos_token": "<eos>"}}, "<eos>"),
    "in config.json alone": ({"config": {}, "config_": {"eos_token_id": 257}}, "<eos>"),
    "in generation_config.json, several": ({"config": {}, "generation_config": {"eos_token_id": [262, 257]}}, "<|im_end|>"),
    "the tokenizer's comes first": ({"config": EOS, "generation_config": {"eos_token_id": 262}}, "<eos>"),
    "as BERT: what it puts after a text": ({"config": {}, "around": "[CLS] $A [SEP]"}, "[SEP]"),
    "alone: what it puts after a text": ({"around": "$A </s>"}, "</s>"),
    "alone: the only special one": ({"special": ["<end>"]}, "<end>"),
    "the option": ({"config": EOS, "option": "</s>"}, "</s>"),
    "alone: the option": ({"option": "<|im_end|>"}, "<|im_end|>"),
}


@pytest.mark.parametrize(("fields", "end"), ENDS.values(), ids=ENDS)
def test_a_document_ends_with_the_tokenizers_own_token(fields, end, tmp_path):
    fields = dict(fields)
    option = fields.pop("option", None)
    if "config_" in fields:
        (tmp_path / "config.json").write_text(json.dumps(fields.pop("config_")))
    path = write(tmp_path, **fields)
    tokens = document(path, eos_token=option)
    assert tokens[-1] == end and tokens.count(end) == 1


def test_a_tokenizer_that_does_not_say_how_a_document_ends_is_refused(tmp_path):
    path = write(tmp_path)
    with pytest.raises(UserError, match="does not say which token ends a document; set data.eos_token \\(one of <pad>, <eos>, <bos>"):
        build_tokenizer(path)
    with pytest.raises(UserError, match="data.eos_token: <end> is not a token of the tokenizer"):
        build_tokenizer(path, "<end>")


BOS = {"eos_token": "<eos>", "bos_token": "<bos>"}
OPENINGS = {
    "as Gemma and Llama 3": ({"config": BOS, "around": "<bos> $A"}, None, ["<bos>"]),
    "as Qwen and GPT-2: none": ({"config": BOS}, None, []),
    "add_bos_token without a post-processor's": ({"config": {**BOS, "add_bos_token": True}}, None, []),
    "add_bos_token false, and one": ({"config": {**BOS, "add_bos_token": False}, "around": "<bos> $A"}, None, ["<bos>"]),
    "as Llama: Sequence": ({"config": BOS, "around": "<bos> $A <eos>"}, None, ["<bos>"]),
    "as BERT": ({"config": {"eos_token": "[SEP]"}, "around": "[CLS] $A [SEP]"}, None, ["[CLS]"]),
    "as T5: none": ({"config": {"eos_token": "</s>"}, "around": "$A </s>"}, None, []),
    "two": ({"config": BOS, "around": "<bos> [CLS] $A"}, None, ["<bos>", "[CLS]"]),
    "alone": ({"around": "<bos> $A <eos>"}, None, ["<bos>"]),
    "option false": ({"config": BOS, "around": "<bos> $A"}, False, []),
    "option true": ({"config": BOS}, True, ["<bos>"]),
    "option true, and one": ({"config": BOS, "around": "<bos> $A"}, True, ["<bos>"]),
}


@pytest.mark.parametrize(("fields", "option", "opening"), OPENINGS.values(), ids=OPENINGS)
def test_a_text_begins_as_the_tokenizer_writes_it(fields, option, opening, tmp_path):
    path = write(tmp_path, **fields)
    tokens = document(path, add_bos_token=option)
    assert tokens[: -3] == opening and tokens[len(opening) : -1] == ["h", "i"]
    if option is None and "config" in fields:
        theirs = AutoTokenizer.from_pretrained(str(tmp_path))
        ids = theirs("hi")["input_ids"]
        assert theirs.convert_ids_to_tokens(ids) in (tokens, tokens[:-1])
    prompt = prompt_of("hi", False, build_tokenizer(path, None, option))
    assert [Tokenizer.from_file(path).id_to_token(i) for i in prompt.ids] == [*opening, "h", "i"]


def test_a_long_text_begins_once_and_an_empty_one_has_no_tokens(tmp_path):
    path = write(tmp_path, BOS, "<bos> $A")
    tokens = document(path, "a b " * 100_000)
    assert tokens.count("<bos>") == tokens.count("<eos>") == 1 and tokens[0] == "<bos>" and len(tokens) == 400_002
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n{"text": "x"}')
    cfg = DataConfig("text", files=(str(tmp_path / "b.jsonl"),), tokenizer=path, eval_fraction=0.0)
    assert build_datasets(cfg, 8, 1).parts[0].tokens.holds.empty == 1


def test_ids_that_others_made_get_no_opening(tmp_path):
    path = write(tmp_path, BOS, "<bos> $A")
    np.save(tmp_path / "a.npy", np.array([1, 2, 257, 3], np.int64))
    cfg = DataConfig("text", files=(str(tmp_path / "a.npy"),), tokenizer=path, eval_fraction=0.0)
    assert build_datasets(cfg, 8, 1).parts[0].train.corpus.tokens.tolist() == [1, 2, 257, 3, 257]


def test_the_options_are_refused_where_they_mean_nothing(tmp_path):
    path = write(tmp_path, EOS)
    with pytest.raises(UserError, match="data.add_bos_token: is true, but the tokenizer has no bos_token"):
        build_tokenizer(path, None, True)
    with pytest.raises(UserError, match="data.eos_token: is set, but data.tokenizer=bytes has no such token"):
        build_tokenizer("bytes", "<eos>")
    cfg = to_config(compose(["data=text", "data.files=[a]", "data.chat=true", f"data.tokenizer={path}", "data.add_bos_token=true"]))
    with pytest.raises(UserError, match="data.add_bos_token: is True with data.chat=true, and the chat template writes"):
        validate_data(cfg)


def test_tokens_made_with_other_borders_are_refused(tmp_path):
    path = write(tmp_path, BOS, "<bos> $A")
    (tmp_path / "a.jsonl").write_text('{"text": "hi"}')
    tokenized.write(DataConfig("text", files=(str(tmp_path / "a.jsonl"),), tokenizer=path), tmp_path / "out", ALL)
    made = {"name": "tokens", "tokens": str(tmp_path / "out"), "tokenizer": path, "eval_fraction": 0.0}
    assert build_datasets(DataConfig(**made), 8, 1)
    with pytest.raises(UserError, match="data.add_bos_token: puts nothing before a text, but .*out was made with <bos>; set it to true"):
        build_datasets(DataConfig(**made, add_bos_token=False), 8, 1)
    with pytest.raises(UserError, match="data.eos_token: is </s>, but documents in .*out end with <eos>; set it to that"):
        build_datasets(DataConfig(**made, eos_token="</s>"), 8, 1)
    manifest = json.loads((tmp_path / "out" / "tokens.json").read_text())
    (tmp_path / "out" / "tokens.json").write_text(json.dumps({k: v for k, v in manifest.items() if k not in ("opening", "end_of_document")}))
    with pytest.raises(UserError, match="data.tokens: .*out is of an earlier version"):
        build_datasets(DataConfig(**made), 8, 1)


def test_a_chat_stops_where_generation_config_says(tmp_path):
    path = write(tmp_path, {**EOS, "chat_template": CHATML}, generation_config={"eos_token_id": [257, 262]})
    assert prompt_of("hi", True, build_tokenizer(path)).ends == {257, 262}


def test_a_folder_that_transformers_cannot_load_is_refused_in_one_line(tmp_path):
    path = write(tmp_path, {"eos_token": 3})
    with pytest.raises(UserError, match="tokenizer.json: transformers cannot load the tokenizer of its folder: ") as error:
        build_tokenizer(path)
    assert "\n" not in str(error.value)


def test_post_processors_that_trim_places_lose_no_label(tmp_path):
    path = write(tmp_path, {**EOS, "chat_template": CHATML})
    trimming = json.loads(Path(path).read_text())
    trimming["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    Path(path).write_text(json.dumps(trimming))
    _, places = build_tokenizer(path).encode_placed("a \n b")
    assert places == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
