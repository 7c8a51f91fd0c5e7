"""Text to token ids: raw bytes, or any `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from compiler_trainer.config.errors import UserError

END_OF_DOCUMENT_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
TEXTS_PER_CALL = 256


class Tokenizer(Protocol):
    """Turns texts into token ids below `vocab_size`; `end_of_document` is the id that closes a document."""

    vocab_size: int
    end_of_document: int

    def encode(self, texts: Iterable[str]) -> Iterator[NDArray[np.integer]]:
        """Ids of each text in turn, without special tokens added."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""


class ByteTokenizer:
    """The bytes of UTF-8, and 256 for the end of a document."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, texts: Iterable[str]) -> Iterator[NDArray[np.integer]]:
        """uint8 ids of each text."""
        for text in texts:
            yield np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: list[int]) -> str:
        """The text of bytes, with a mark where they are none."""
        return bytes(i for i in ids if i < self.end_of_document).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`; raises UserError where it is missing, broken or has no end-of-document token."""

    def __init__(self, path: str):
        if not Path(path).is_file():
            raise UserError(path, 'no such file (data.tokenizer takes "bytes" or the path of a tokenizer.json)')
        try:
            self.backend = Backend.from_file(path)
        except Exception as error:  # the library raises bare Exception
            reason = str(error).partition("\n")[0]
            raise UserError(path, f"is not a tokenizer.json: {reason}") from error
        # A saved limit would cut documents in silence.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        self.end_of_document = self._find_end_of_document(path)

    def encode(self, texts: Iterable[str]) -> Iterator[NDArray[np.integer]]:
        """uint32 ids of each text."""
        texts = iter(texts)
        while batch := list(islice(texts, TEXTS_PER_CALL)):
            for encoding in self.backend.encode_batch_fast(batch, add_special_tokens=False):
                yield np.asarray(encoding.ids, np.uint32)

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens left out."""
        return self.backend.decode(ids)

    def _find_end_of_document(self, path: str) -> int:
        added = {token.content: index for index, token in self.backend.get_added_tokens_decoder().items()}
        for content in END_OF_DOCUMENT_TOKENS:
            if content in added:
                return added[content]
        known = ", ".join(END_OF_DOCUMENT_TOKENS)
        raise UserError(path, f"none of its {len(added)} added tokens ends a document; it needs one of {known}")


def build_tokenizer(name: str) -> Tokenizer:
    """The byte tokenizer for "bytes", else the tokenizer.json at that path."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)
