"""Text to token ids: raw bytes, or any `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.places.cache import cache_of
from compiler_trainer.places.copies import folder_here
from compiler_trainer.places.store import parted

END_OF_DOCUMENT_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
BESIDE = ("*token*", "*.jinja")  # what belongs to a tokenizer.json
Ids = NDArray[np.integer]
Place = tuple[int, int]  # characters of a text, from the first to before the second


class Tokenizer(Protocol):
    """Turns texts into token ids below `vocab_size`; `end_of_document` is the id that closes a document."""

    vocab_size: int
    end_of_document: int
    digest: str  # of what decides which ids a text gets

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, without special tokens added."""

    def encode_placed(self, text: str) -> tuple[Ids, Sequence[Place]]:
        """Ids of a text, and the characters that each stands for."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""


class ByteTokenizer:
    """The bytes of UTF-8, and 256 for the end of a document."""

    vocab_size = 257
    end_of_document = 256
    digest = "bytes"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """uint8 ids of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_placed(self, text: str) -> tuple[Ids, Sequence[Place]]:
        """uint8 ids, each byte with the character that it is of."""
        return self.encode([text])[0], [(i, i + 1) for i, char in enumerate(text) for _ in char.encode()]

    def decode(self, ids: list[int]) -> str:
        """The text of bytes, with a mark where they are none."""
        return bytes(i for i in ids if i < self.end_of_document).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`; raises UserError where it is missing, broken or has no end-of-document token."""

    def __init__(self, path: str):
        self.path = path
        if not Path(path).is_file():
            raise UserError(path, 'no such file (data.tokenizer takes "bytes" or the path of a tokenizer.json)')
        content = Path(path).read_bytes()
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        try:
            self.backend = Backend.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise UserError(path, f"is not a tokenizer.json: {one_line(error)}") from error
        # A saved limit would cut documents in silence.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.end_of_document = self._find_end_of_document()
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        if not self.backend.get_vocab(with_added_tokens=False):
            raise UserError(path, "has an empty vocabulary: no text has tokens")

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """uint32 ids of each text."""
        try:
            found = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise UserError(self.path, f"cannot tokenize: {one_line(error)}") from error
        return [np.asarray(encoding.ids, np.uint32) for encoding in found]

    def encode_placed(self, text: str) -> tuple[Ids, Sequence[Place]]:
        """uint32 ids of a text, and the characters that each stands for."""
        try:
            found: Encoding = self.backend.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise UserError(self.path, f"cannot tokenize: {one_line(error)}") from error
        return np.asarray(found.ids, np.uint32), found.offsets

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens left out."""
        return self.backend.decode(ids)

    def _find_end_of_document(self) -> int:
        added = {token.content: index for index, token in self.backend.get_added_tokens_decoder().items()}
        for content in END_OF_DOCUMENT_TOKENS:
            if content in added:
                return added[content]
        known = ", ".join(END_OF_DOCUMENT_TOKENS)
        raise UserError(self.path, f"none of its {len(added)} added tokens ends a document; it needs one of {known}")


def one_line(error: Exception) -> str:
    """The first line of what an error says."""
    return str(error).partition("\n")[0]


def build_tokenizer(name: str) -> Tokenizer:
    """The byte tokenizer for "bytes", else the tokenizer.json at that path; raises UserError."""
    if not name:
        raise UserError("data.tokenizer", 'is empty; give "bytes" or the path of a tokenizer.json')
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)


def tokenizer_here(cfg: DataConfig) -> str:
    """`data.tokenizer` as a path of this machine; one in a store, or the hub, is copied with what lies beside it."""
    name = cfg.tokenizer
    if not name or name == "bytes" or Path(name).exists() or "/" not in name:
        return name
    folder, own = parted(name)
    there = folder_here(
        "data.tokenizer", folder, (own, *BESIDE), cache_of(cfg), lambda found: (found / own).is_file()
    )
    return str(there / own)


def dtype_of(vocab_size: int) -> np.dtype[Any]:
    """What ids are stored as: uint16 where the vocabulary allows, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
