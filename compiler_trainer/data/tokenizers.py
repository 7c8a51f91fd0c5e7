"""Turn text into token ids: raw bytes, a lone `tokenizer.json`, or a folder's tokenizer as transformers loads it.

Long texts are cut at positions where the parts give the same tokens as the full text.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from compiler_trainer.config.errors import UserError, first_line
from compiler_trainer.config.extras import library
from compiler_trainer.config.files import ends_of_answers
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.places.cache import cache_of
from compiler_trainer.places.copies import folder_here
from compiler_trainer.places.store import split_url

BESIDE = ("*token*", "*.jinja", "config.json", "generation_config.json", "*processor_config.json")  # of a tokenizer
CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "config.json")  # one of them: loaded by transformers
TRIES = 100  # texts to try until one has tokens
Ids = NDArray[np.integer]
Place = tuple[int, int]  # range of characters, from the first to before the second


class Settings(NamedTuple):
    """Facts about a tokenizer apart from its vocabulary.

    `end_of_document` closes each document. `opening` and `ending` are the ids that the tokenizer itself puts around a
    plain text. `special_tokens` are names for chat templates, `templates` the chat templates by name, `stops` the ids
    that end an answer.
    """

    end_of_document: int
    opening: tuple[int, ...] = ()
    ending: tuple[int, ...] = ()
    special_tokens: dict[str, str] = {}
    templates: dict[str, str] = {}
    stops: tuple[int, ...] = ()
    splits_special_tokens: bool = False


class Tokenizer(Protocol):
    """The interface of tokenizers, which turn texts into token ids below `vocab_size`."""

    path: str
    vocab_size: int
    settings: Settings
    added_ids: frozenset[int]  # ids of added tokens, which are never split

    @property
    def digest(self) -> str:
        """A digest of everything that decides the ids of a text."""

    @property
    def end_of_document(self) -> int:
        """The id that closes a document."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without added special tokens."""

    def encode_placed(self, text: str) -> tuple[Ids, Sequence[Place]]:
        """Return the ids of a text, and the range of characters of each id."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without special tokens."""

    def name_of(self, token: int) -> str:
        """Return the text of one id, including special tokens."""

    def to_json(self) -> list[Any]:
        """Return JSON from which `restore` makes the tokenizer in another process."""


class ByteTokenizer:
    """A tokenizer whose ids are the bytes of UTF-8, and 256 for the end of a document."""

    path = "bytes"
    vocab_size = 257
    end_of_document = 256
    settings = Settings(256, stops=(256,))
    digest = "bytes"
    added_ids = frozenset({256})

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the uint8 ids of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_placed(self, text: str) -> tuple[Ids, Sequence[Place]]:
        """Return uint8 ids, each byte with the range of its character."""
        return self.encode([text])[0], [(i, i + 1) for i, char in enumerate(text) for _ in char.encode()]

    def decode(self, ids: list[int]) -> str:
        """Return the text of bytes, with a replacement character for invalid ones."""
        return bytes(i for i in ids if i < self.end_of_document).decode(errors="replace")

    def name_of(self, token: int) -> str:
        """Return a byte as Python writes it."""
        return "end of document" if token == self.end_of_document else repr(bytes([token]))[2:-1]

    def to_json(self) -> list[Any]:
        """Return an empty list, which `restore` recognizes."""
        return []


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, with the settings of its folder."""

    def __init__(self, path: str, backend: Backend, settings: Settings):
        self.path, self.backend, self.settings = path, backend, settings
        # A saved limit would silently truncate documents. A post-processor trims ranges; its ids are in `settings`.
        backend.no_truncation()
        backend.no_padding()
        backend.post_processor = None  # type: ignore[assignment]
        backend.encode_special_tokens = settings.splits_special_tokens
        self.added_ids = frozenset(backend.get_added_tokens_decoder())
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the vocabulary and the rules."""
        settings = repr(self.settings.splits_special_tokens)
        return hashlib.blake2b((self.backend.to_str() + settings).encode(), digest_size=16).hexdigest()

    @property
    def end_of_document(self) -> int:
        """The id that closes a document."""
        return self.settings.end_of_document

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the uint32 ids of each text."""
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise UserError(self.path, f"cannot tokenize: {first_line(error)}") from error
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def encode_placed(self, text: str) -> tuple[Ids, Sequence[Place]]:
        """Return the uint32 ids of a text, and the range of characters of each id."""
        try:
            encoding: Encoding = self.backend.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise UserError(self.path, f"cannot tokenize: {first_line(error)}") from error
        return np.asarray(encoding.ids, np.uint32), encoding.offsets

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without special tokens."""
        return self.backend.decode(ids)

    def name_of(self, token: int) -> str:
        """Return the text of one id, including special tokens."""
        return self.backend.decode([token], skip_special_tokens=False) or self.backend.id_to_token(token) or ""

    def to_json(self) -> list[Any]:
        """Return the path, the backend and the settings."""
        return [self.path, self.backend.to_str(), self.settings]


def restore(values: list[Any]) -> Tokenizer:
    """Return the tokenizer whose `to_json()` gave this value."""
    if not values:
        return ByteTokenizer()
    path, backend, settings = values
    return FileTokenizer(path, Backend.from_str(backend), Settings(*settings))


def tokenizer_of(cfg: DataConfig) -> Tokenizer:
    """Return the tokenizer of `data.tokenizer`; raise UserError."""
    return build_tokenizer(tokenizer_here(cfg), cfg.eos_token, cfg.add_bos_token)


def build_tokenizer(name: str, eos_token: str | None = None, add_bos_token: bool | None = None) -> Tokenizer:
    """Return the byte tokenizer for "bytes", otherwise the tokenizer of a tokenizer.json's path; raise UserError.

    `eos_token` and `add_bos_token` override the tokenizer's own settings.
    """
    if not name:
        raise UserError("data.tokenizer", 'is empty; give "bytes" or the path of a tokenizer.json')
    if name == "bytes":
        if eos_token is not None or add_bos_token:
            option = "data.eos_token" if eos_token is not None else "data.add_bos_token"
            raise UserError(option, "is set, but data.tokenizer=bytes has no such token; leave it null")
        return ByteTokenizer()
    if not Path(name).is_file():
        takes = 'data.tokenizer takes "bytes" or a tokenizer.json, by default that of model.path'
        raise UserError(name, f"no such file; {takes}")
    is_folder = Path(name).name == "tokenizer.json" and any(Path(name).with_name(file).is_file() for file in CONFIGS)
    backend, settings = (read_folder if is_folder else read_file)(name, eos_token)
    if not backend.get_vocab(with_added_tokens=False):
        raise UserError(name, "has an empty vocabulary")
    return FileTokenizer(name, backend, settings._replace(opening=opening_of(settings, backend, add_bos_token)))


def opening_of(settings: Settings, backend: Backend, add_bos_token: bool | None) -> tuple[int, ...]:
    """Return the ids before a plain text: the tokenizer's own, unless `data.add_bos_token` overrides them."""
    if add_bos_token is None:
        return settings.opening
    name = settings.special_tokens.get("bos_token")
    bos = None if name is None else backend.token_to_id(str(name))
    if not add_bos_token:
        return tuple(i for i in settings.opening if i != bos)
    if bos is None:
        fix = "leave it null, or add bos_token to the tokenizer_config.json next to the tokenizer.json"
        raise UserError("data.add_bos_token", f"is true, but the tokenizer has no bos_token; {fix}")
    return settings.opening if bos in settings.opening else (bos, *settings.opening)


# ---- a lone tokenizer.json ------------------------------------------------------------------------------------------


def read_file(path: str, eos_token: str | None) -> tuple[Backend, Settings]:
    """Return the backend of a file, and the settings that follow from it alone."""
    try:
        backend = Backend.from_buffer(Path(path).read_bytes())
    except Exception as error:  # the library raises bare Exception
        raise UserError(path, f"is not a tokenizer.json: {first_line(error)}") from error
    opening, ending = surrounding_ids(backend)
    end = (
        token_id(eos_token, backend)
        if eos_token is not None
        else ending[-1]
        if ending
        else single_special(path, backend)
    )
    return backend, Settings(end, opening, ending, stops=(end,))


def single_special(path: str, backend: Backend) -> int:
    """Return the single special token, apart from the unknown token; raise UserError if there is not exactly one."""
    unknown = getattr(backend.model, "unk_token", None)
    decoder = backend.get_added_tokens_decoder()
    special = {i: token.content for i, token in decoder.items() if token.special and token.content != unknown}
    if len(special) == 1:
        return next(iter(special))
    choices = f"one of {', '.join(list(special.values())[:8])}" if special else "it has no special token"
    raise UserError(path, f"does not say which token ends a document; set data.eos_token ({choices})")


def token_id(eos_token: str, backend: Backend) -> int:
    """Return the id of the token in `data.eos_token`; raise UserError if there is none."""
    if (number := backend.token_to_id(eos_token)) is None:
        raise UserError("data.eos_token", f"{eos_token} is not a token of the tokenizer; choose one of its vocabulary")
    return number


def surrounding_ids(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer's post-processor puts before and after a text."""
    backend.no_truncation()
    backend.no_padding()
    entries = sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda entry: entry[1])[-TRIES:]
    for text in ("a", *(backend.decode([i]) or token for token, i in entries)):
        try:
            encoding = backend.encode(text, add_special_tokens=True)
        except Exception:  # WordLevel without an unknown token has no id for most texts
            continue
        text_places = np.flatnonzero(~np.array(encoding.special_tokens_mask, bool))
        if len(text_places):
            return tuple(encoding.ids[: text_places[0]]), tuple(encoding.ids[text_places[-1] + 1 :])
    return (), ()


# ---- the tokenizer of a folder --------------------------------------------------------------------------------------


def read_folder(path: str, eos_token: str | None) -> tuple[Backend, Settings]:
    """Return the backend and settings of a folder, as transformers' AutoTokenizer reads it; raise UserError."""
    loaded = load_by_transformers(path)
    backend = Backend.from_str(loaded.backend_tokenizer.to_str())
    opening, ending = surrounding_ids(backend)
    stops = ends_of_answers(Path(path).parent)
    if eos_token is not None:
        end = token_id(eos_token, backend)
    elif loaded.eos_token_id is not None:
        end = loaded.eos_token_id
    elif ending:
        end = ending[-1]
    else:
        end = stops[0] if stops else single_special(path, backend)
    templates = loaded.chat_template
    templates_by_name = templates if isinstance(templates, dict) else {"default": templates} if templates else {}
    special = dict(loaded.special_tokens_map)
    stops = tuple(i for i in (*stops, end, loaded.eos_token_id) if i is not None)
    splits = bool(loaded.split_special_tokens)
    return backend, Settings(end, opening, ending, special, templates_by_name, stops, splits)


def load_by_transformers(path: str) -> Any:
    """Return a folder's tokenizer as transformers' AutoTokenizer loads it; raise UserError."""
    folder = str(Path(path).parent)
    try:
        transformers = library("transformers", "data.tokenizer", "its folder ")
        loaded = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except UserError:
        raise
    except Exception as error:  # the library raises whatever its readers raise
        raise UserError(path, f"transformers cannot load the tokenizer of its folder: {first_line(error)}") from error
    if not hasattr(loaded, "backend_tokenizer"):
        fix = "only tokenizers of the tokenizers library are supported; convert it to one"
        raise UserError(path, f"transformers loads it as {type(loaded).__name__}, which is written in Python; {fix}")
    return loaded


def tokenizer_here(cfg: DataConfig) -> str:
    """Return `data.tokenizer` as a local path; a remote one is copied together with the files next to it."""
    name = cfg.tokenizer
    if not name or name == "bytes" or Path(name).exists() or "/" not in name:
        return name
    folder, file = split_url(name)
    local = folder_here("data.tokenizer", folder, (file, *BESIDE), cache_of(cfg), lambda path: (path / file).is_file())
    return str(local / file)


def dtype_of(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which ids are stored: uint16 if the vocabulary allows, otherwise uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


# ---- cutting texts -------------------------------------------------------------------------------------


Encode = Callable[[list[str]], list[NDArray[np.integer]]]

BEFORE_SPACE = re.compile(rb"\S(?=\s\S)")
BORDER_TRIES = 200
WINDOW_BYTES = 256
PART_BYTES = 2**17  # tokenizers need up to 500 bytes of memory for each of them


def next_cut(content: bytes | mmap, at: int, step: int, encode: Encode) -> int:
    """Return the first position from byte `at` on where the two parts give the tokens of the full text.

    If there is none nearby, it is the first one from `at + step` on, and so on; the end of the text comes last.
    """
    for place in range(at, len(content), step):
        for match in islice(BEFORE_SPACE.finditer(content, place, place + step), BORDER_TRIES):
            if is_seamless(content, match.end(), encode):
                return match.end()
    return len(content)


def is_seamless(content: bytes | mmap, cut: int, encode: Encode) -> bool:
    """Return True if the text around a cut gives the same tokens in two parts as in one."""
    left_text = content[max(0, cut - WINDOW_BYTES) : cut].decode(errors="ignore")
    right_text = content[cut : cut + WINDOW_BYTES].decode(errors="ignore")
    together, left, right = encode([left_text + right_text, left_text, right_text])
    return np.array_equal(together, np.concatenate((left, right)))


def parts(text: str, encode: Encode) -> Iterator[str]:
    """Yield a text in parts of about 128 KiB, as far as it can be cut."""
    if len(text) <= PART_BYTES:
        yield text
        return
    content, start = text.encode(), 0
    while start < len(content):
        end = next_cut(content, start + PART_BYTES, PART_BYTES, encode)
        yield content[start:end].decode()
        start = end
