"""Tokenizers in GGUF: tokens, merges and scores give transformers' ids, and patterns of llama.cpp have its names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_tokenizer import CHATML, SPECIAL, write_tokenizer
from gguf import GGUFReader, GGUFWriter, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from compiler_trainer.config.errors import UserError
from compiler_trainer.models.gguf import vocabulary
from compiler_trainer.models.gguf.vocabulary import write_vocabulary

CORPUS = [Path(__file__).read_text(), "été naïve 日本語 тест 🚀 don't WE'RE 12345 3.14  a\n\n b\t\tc" * 3]
TEXTS = ["Hello world", "from tokenizers import  x 12345 don't", "été naïve 日本語 ß🚀", "a\n\n b\t\tc \n", "<s>hi</s>"]
CONTROL = ["<s>", "</s>"]
PATTERN = {name: pattern for pattern, name in vocabulary.PATTERNS.items()}
SPLIT = {
    "qwen2": [pre_tokenizers.Split(Regex(PATTERN["qwen2"]), "isolated")],
    "llama-bpe": [pre_tokenizers.Split(Regex(PATTERN["llama-bpe"]), "isolated")],
    "dbrx": [pre_tokenizers.Split(Regex(PATTERN["llama-bpe"]), "isolated")],
    "tekken": [pre_tokenizers.Split(Regex(PATTERN["tekken"]), "isolated")],
    "gpt-4o": [pre_tokenizers.Split(Regex(PATTERN["gpt-4o"]), "isolated")],
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
}  # the steps before ByteLevel, by llama.cpp's name


def of_bytes(name):
    """Return a trained tokenizer of bytes that splits text as llama.cpp does under that name."""
    backend = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in ("gpt-2", "smollm"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([*SPLIT[name], level]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False))
    backend.model.ignore_merges = name == "llama-bpe"
    return backend


def of_sentencepiece(prefix):
    """Return a tokenizer as transformers converts those of sentencepiece: all ways to split a piece are merges."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    pieces = ["<unk>", *CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=500, special_tokens=pieces, show_progress=False, max_token_length=6))
    model = json.loads(trained.to_str())["model"]
    vocab, ranked = model["vocab"], list(dict.fromkeys("".join(merge) for merge in model["merges"]))
    merges = [(piece[:i], piece[i:]) for piece in ranked for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<unk>", special=True), *(AddedToken(text, special=True) for text in CONTROL)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", backend.token_to_id("<s>"))])
    return backend


def written(backend, folder, vocab_size=None, **config):
    """Write a tokenizer into a folder and a file; return transformers' tokenizer, and the file's fields."""
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    loaded = AutoTokenizer.from_pretrained(folder)
    writer = GGUFWriter(folder / "a.gguf", "llama")
    write_vocabulary(writer, folder, vocab_size or len(loaded), "a")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = {name: field.contents() for name, field in GGUFReader(folder / "a.gguf").fields.items()}
    return loaded, {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}


def merged(text, tokens, scores):
    """Return the ids that llama.cpp's sentencepiece makes of a text: the neighbours of the highest score, the first of several, are joined."""
    ids, parts = {token: i for i, token in enumerate(tokens)}, list(text)
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ids]
        if not pairs:
            break
        place = -max(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [i for part in parts for i in ([ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])]


@pytest.mark.parametrize("name", SPLIT)
def test_a_tokenizer_of_bytes_is_rebuilt_from_a_file(name, tmp_path):
    loaded, fields = written(of_bytes(name), tmp_path)
    assert (fields["model"], fields["pre"]) == ("gpt2", name) and "scores" not in fields
    vocab = {token: i for i, token in enumerate(fields["tokens"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in fields["merges"]]))
    backend.model.ignore_merges = name == "llama-bpe"
    backend.pre_tokenizer = loaded.backend_tokenizer.pre_tokenizer
    backend.add_special_tokens([token for token, kind in zip(fields["tokens"], fields["token_type"]) if kind == TokenType.CONTROL])
    assert [backend.encode(text).ids for text in TEXTS] == [loaded(text)["input_ids"] for text in TEXTS]
    assert len(fields["merges"]) > 100


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_of_sentencepiece_merge_as_its_tokenizer_does(prefix, tmp_path):
    loaded, fields = written(of_sentencepiece(prefix), tmp_path)
    assert (fields["model"], fields["pre"], fields["add_space_prefix"]) == ("llama", "default", prefix)
    assert fields["add_bos_token"] and not fields["add_eos_token"] and "merges" not in fields
    for text in TEXTS[:-1]:  # special tokens are split off before
        found = merged("▁" * prefix + text.replace(" ", "▁"), fields["tokens"], fields["scores"])
        assert [loaded.bos_token_id, *found] == loaded(text)["input_ids"], text
    kinds = dict(zip(fields["tokens"], map(TokenType, fields["token_type"])))
    assert kinds["<unk>"] == TokenType.UNKNOWN and kinds["<s>"] == TokenType.CONTROL
    assert kinds["<0x0A>"] == TokenType.BYTE and sum(kind == TokenType.NORMAL for kind in kinds.values()) > 100


def test_transformers_reads_a_sentencepiece_tokenizer_from_a_file(tmp_path):
    loaded, _ = written(of_sentencepiece(True), tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    assert [read(text)["input_ids"] for text in TEXTS[:3]] == [loaded(text)["input_ids"] for text in TEXTS[:3]]


def test_special_tokens_template_and_the_end_of_an_answer_are_there(tmp_path):
    write_tokenizer(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text, start, end = loaded.convert_tokens_to_ids(SPECIAL)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [text, end]}))
    _, fields = written(None, tmp_path, vocab_size=300)
    assert (fields["bos_token_id"], fields["eos_token_id"], fields["eot_token_id"]) == (text, text, end)
    assert fields["tokenizer.chat_template"] == CHATML and not fields["add_bos_token"] and not fields["add_eos_token"]
    assert fields["merges"] == [vocabulary.NEVER] and fields["pre"] == "gpt-2"
    assert fields["token_type"] == [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 3 + [TokenType.UNUSED] * 41
    assert fields["tokens"][256:260] == [*SPECIAL, "[PAD259]"] and len(fields["tokens"]) == 300


@pytest.mark.parametrize(("name", "strips", "wanted"), [("my-Phi3-mini", False, "my-phi-mini"), ("mini", True, "phi-3 mini"), ("mini", False, "mini")])
def test_llama_cpp_knows_phi_3s_tokenizer_by_the_models_name(name, strips, wanted):
    assert vocabulary.name_of(name, {"added_tokens": [{"content": "</s>", "rstrip": strips}]}) == wanted


# Refusals


def other_pattern():
    backend = of_bytes("qwen2")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    return backend


def lower_case():
    backend = of_bytes("gpt-2")
    backend.normalizer = normalizers.Lowercase()
    return backend


def with_words():
    backend = of_bytes("gpt-2")
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


@pytest.mark.parametrize(("make", "problem"), [
    (other_pattern, r"has a pattern .* and GGUF is written with one of gpt-2, smollm, qwen2, llama-bpe, tekken, gpt-4o; export a folder"),
    (lower_case, "has a normalizer Lowercase, and GGUF is written with none"),
    (with_words, "has no ByteLevel without a space before texts"),
    (lambda: Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, "a")), "has a model WordLevel, and GGUF is written with BPE"),
])
def test_other_tokenizers_are_refused(make, problem, tmp_path):
    with pytest.raises(UserError, match=problem):
        written(make(), tmp_path)


def test_more_tokens_than_the_model_has_are_refused(tmp_path):
    with pytest.raises(UserError, match="has a tokenizer of 500 tokens, and a model of 300"):
        written(of_bytes("gpt-2"), tmp_path, vocab_size=300)
