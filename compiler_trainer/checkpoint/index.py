"""The index of a checkpoint, JSON: the position of training, each tensor's dtype and shape, each file's digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import Must, build
from compiler_trainer.config.schema import Count

FILE = "index.json"
OLDER = ".metadata"  # a checkpoint in the first format has this file instead
MOST_BYTES = 1 << 30  # refuse to read more into memory
ENVELOPE = b'{"sha256": "%s",\n"checkpoint": %s}\n'
ENVELOPE_PATTERN = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n"checkpoint": (.*)\}\n', re.DOTALL)
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "F32", torch.complex128: "F64",
}  # fmt: skip  # safetensors' names; a complex tensor is stored as its real view, with one more dim of size 2
DTYPE_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}

DtypeName = Annotated[str, Must("be a dtype that checkpoints support", DTYPE_BY_NAME.__contains__)]
Digest = Annotated[str, Must("be 64 lower-case hexadecimal digits", re.compile("[0-9a-f]{64}").fullmatch)]
FileName = Annotated[str, Must("be rank_NNNNN.safetensors", lambda s: re.fullmatch(r"rank_\d{5,9}\.safetensors", s))]


class OtherFormat(UserError):
    """A checkpoint has a format that this version does not read."""


class Damaged(UserError):
    """A checkpoint was changed after it was written, or cannot be read."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The position of training: what a checkpoint keeps besides tensors.

    `data` is the data loader's state, `config` the options of the run.
    """

    step: Count
    tokens: Count
    data: dict[str, Any]
    config: dict[str, Any]
    eval_loss: float | None = None  # measured after this step; None without an evaluation


@dataclass(frozen=True)
class FullTensor:
    """The dtype and shape of a full tensor."""

    dtype: DtypeName
    shape: tuple[Count, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class File:
    """A file of pieces: its length, and the SHA-256 of its header, which contains the SHA-256 of each piece."""

    bytes: Count
    header_sha256: Digest


@dataclass(frozen=True, kw_only=True)
class Index(TrainState):
    """The content of index.json: all of a checkpoint but the pieces in its data files."""

    format: Literal["compiler-trainer 2"] = "compiler-trainer 2"
    tensors: dict[str, FullTensor]
    files: dict[FileName, File]


def encode(index: Index) -> bytes:
    """Return the index as bytes, preceded by the SHA-256 of its JSON text."""
    text = json.dumps(dataclasses.asdict(index), indent=1, allow_nan=False).encode()
    return ENVELOPE % (sha256(text).encode(), text)


def read_index(path: Path) -> Index:
    """Return the index of the checkpoint at `path`; raise Damaged (changed, or cannot be read) or OtherFormat."""
    file = path / FILE
    try:
        content = file.read_bytes() if file.stat().st_size <= MOST_BYTES else b""
    except OSError as error:
        raise Damaged(str(file), f"cannot be read: {error.strerror}") from error
    match = ENVELOPE_PATTERN.fullmatch(content)
    if match is None or sha256(match[2]) != match[1].decode():
        raise Damaged(str(file), "was changed: its SHA-256 differs")
    try:
        written = json.loads(match[2])
        if isinstance(written, dict) and written.get("format", Index.format) != Index.format:
            raise other_format(path, str(written["format"]))
        return build(Index, written)
    except OtherFormat:
        raise
    except UserError as error:
        raise Damaged(str(file), f"is not an index of a checkpoint: {error}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(str(file), f"is not an index of a checkpoint: {type(error).__name__}") from error


def other_format(path: Path, name: str) -> OtherFormat:
    """Return the error for a checkpoint in another format."""
    return OtherFormat(str(path), f"was written in another version's format, {name}; this version reads {Index.format}")


def sha256(content: Any) -> str:
    """Return the SHA-256 of bytes or of a buffer, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
