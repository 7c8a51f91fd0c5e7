"""The tokenizer of a folder in GGUF: its tokens, their kinds, the order of merges, and the way in which text is split.

llama.cpp has two kinds of byte-pair encoding. `gpt2` splits text by a pattern that it knows by name, and encodes bytes
as characters. `llama`, of sentencepiece, has no pattern: spaces are `▁`, and unknown characters are bytes, <0x0A>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import ends_of_answers
from compiler_trainer.models.folder import library

BYTE = re.compile("<0x[0-9A-F]{2}>")
SPACE = "▁"  # a space of sentencepiece
LAST = -1e6  # score of a token that no merge makes
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    WORDS % "": "qwen2",
    WORDS % "{1,3}": "llama-bpe",
    CASED % ("", "", ""): "tekken",
    CASED % (SHORTENED, SHORTENED, "{1,3}"): "gpt-4o",
}  # a pattern of tokenizer.json -> llama.cpp's name
NEVER = "!! !!"  # a merge that no text has: llama.cpp needs at least one, and merges single characters first
GPT2, DIGITS, WITHOUT_WHOLE_WORDS = "gpt-2", "smollm", "dbrx"
KNOWN = ", ".join((GPT2, DIGITS, *PATTERNS.values()))


class Token(NamedTuple):
    """A token: its text, its kind (a name of gguf's TokenType), and its score. Merges with high scores come first."""

    text: str
    kind: str
    score: float


def write_vocabulary(writer: Any, folder: Path, vocab_size: int, name: str) -> None:
    """Write a folder's tokenizer and a model's name; ids up to the model's vocabulary have unused tokens.

    Raises UserError for a tokenizer that llama.cpp does not have.
    """
    gguf = import_module("gguf")
    loaded = library().AutoTokenizer.from_pretrained(folder)
    tokenizer = json.loads(loaded.backend_tokenizer.to_str())
    writer.add_name(name_of(name, tokenizer))
    if tokenizer["model"]["type"] != "BPE":
        raise unknown(folder, f"a model {tokenizer['model']['type']}", "BPE")
    if len(loaded) > vocab_size:
        raise UserError(str(folder), f"has a tokenizer of {len(loaded):,} tokens, and a model of {vocab_size:,}")
    of_sentencepiece = bool(tokenizer["model"].get("byte_fallback"))
    tokens = tokens_of(tokenizer, vocab_size, of_sentencepiece)
    writer.add_tokenizer_model("llama" if of_sentencepiece else "gpt2")
    writer.add_tokenizer_pre("default" if of_sentencepiece else pattern_of(folder, tokenizer))
    writer.add_token_list([token.text for token in tokens])
    writer.add_token_types([int(gguf.TokenType[token.kind]) for token in tokens])
    special = gguf.SpecialVocab(folder, load_merges=not of_sentencepiece, n_vocab=vocab_size)
    if of_sentencepiece:
        writer.add_token_scores([token.score for token in tokens])
        first = loaded.backend_tokenizer.encode("a", add_special_tokens=False).tokens[0]
        writer.add_add_space_prefix(first.startswith(SPACE))
    elif not special.merges:
        special.merges = [NEVER]
    add_special(special, loaded, folder)
    special.add_to_gguf(writer, quiet=True)


def name_of(name: str, tokenizer: dict[str, Any]) -> str:
    """Return a name with phi-3 in it only for Phi-3's tokenizer, by which llama.cpp (2026) knows it.

    It then drops spaces after special tokens, and cannot load a file without Phi-3's other special tokens.
    """
    if any(added["content"] == "</s>" and added["rstrip"] for added in tokenizer["added_tokens"]):
        return f"phi-3 {name}"
    return re.sub("phi-?3", "phi", name, flags=re.IGNORECASE)


def tokens_of(tokenizer: dict[str, Any], vocab_size: int, of_sentencepiece: bool) -> list[Token]:
    """Return all tokens by id."""
    tokens = [Token(f"[PAD{number}]", "UNUSED", LAST) for number in range(vocab_size)]
    unknown_token = tokenizer["model"].get("unk_token")
    scores = scores_of(tokenizer) if of_sentencepiece else {}
    for text, number in tokenizer["model"]["vocab"].items():
        kind = "UNKNOWN" if text == unknown_token else "NORMAL"
        if of_sentencepiece and BYTE.fullmatch(text):
            kind = "BYTE"
        tokens[number] = Token(text, kind, scores.get(text, LAST))
    for added in tokenizer["added_tokens"]:
        text = added["content"]
        if tokens[added["id"]].kind == "UNKNOWN":
            continue
        kind = "CONTROL" if added["special"] else "USER_DEFINED"
        tokens[added["id"]] = Token(text if added["special"] else text.replace(SPACE, " "), kind, LAST)
    return tokens


def scores_of(tokenizer: dict[str, Any]) -> dict[str, float]:
    """Return the score of each token that a merge makes: minus the place of its first merge."""
    scores: dict[str, float] = {}
    for place, pair in enumerate(merges_of(tokenizer)):
        scores.setdefault("".join(pair), -float(place))
    return scores


def merges_of(tokenizer: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the pairs of a tokenizer's merges, of which older files write each as one text."""
    for merge in tokenizer["model"]["merges"]:
        yield merge.split(" ") if isinstance(merge, str) else merge


def pattern_of(folder: Path, tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name for the pattern by which a tokenizer splits text; raise UserError if it has none."""
    steps = tokenizer["pre_tokenizer"] or {}
    kinds = {step["type"]: step for step in steps.get("pretokenizers", [steps]) if step}
    normalizer = (tokenizer["normalizer"] or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise unknown(folder, f"a normalizer {normalizer}", "none")
    if "ByteLevel" not in kinds or kinds["ByteLevel"].get("add_prefix_space"):
        raise unknown(folder, "no ByteLevel without a space before texts", "one")
    if not tokenizer["model"]["merges"]:
        return GPT2  # each byte is a token, however the text is split
    if kinds["ByteLevel"].get("use_regex", True):
        if kinds.keys() == {"ByteLevel"}:
            return GPT2
        if kinds.keys() == {"ByteLevel", "Digits"} and kinds["Digits"]["individual_digits"]:
            return DIGITS
    elif kinds.keys() == {"ByteLevel", "Split"} and kinds["Split"]["behavior"] == "Isolated":
        pattern = kinds["Split"]["pattern"].get("Regex")
        name = PATTERNS.get(pattern)
        if name == "llama-bpe" and not tokenizer["model"].get("ignore_merges"):
            return WITHOUT_WHOLE_WORDS
        if name is not None:
            return name
    raise unknown(folder, f"a pattern {json.dumps(steps)[:200]}", f"one of {KNOWN}")


def unknown(folder: Path, part: str, known: str) -> UserError:
    """Return the error for a tokenizer that llama.cpp does not have."""
    fix = "export a folder, and convert it with llama.cpp's convert_hf_to_gguf.py"
    return UserError(f"{folder}/tokenizer.json", f"has {part}, and GGUF is written with {known}; {fix}")


def add_special(special: Any, loaded: Any, folder: Path) -> None:
    """Set the tokens around a text as transformers adds them, and the token that ends an answer."""
    around = loaded("a")["input_ids"]
    special.add_special_token |= {
        "bos": around[0] == loaded.bos_token_id is not None,
        "eos": around[-1] == loaded.eos_token_id is not None,
    }
    for kind in ("bos", "eos", "unk", "pad"):
        number = getattr(loaded, f"{kind}_token_id")
        if number is not None:
            special.special_token_ids[kind] = number
    further = sorted({*ends_of_answers(folder)} - {special.special_token_ids.get("eos")})
    if further:
        special.special_token_ids["eot"] = further[-1]
