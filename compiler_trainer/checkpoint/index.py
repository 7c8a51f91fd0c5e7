"""The index of a checkpoint, JSON: where training stood, the full tensors, and the files that hold their pieces."""

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

FILE, OLDER = "index.json", ".metadata"
MOST_BYTES = 1 << 30
TEXT = b'{"sha256": "%s",\n"checkpoint": %s}\n'
PATTERN = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n"checkpoint": (.*)\}\n', re.DOTALL)
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "F32", torch.complex128: "F64",
}  # fmt: skip  # what safetensors calls them; complex numbers are pairs, along a last dim
BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}

DtypeName = Annotated[str, Must("be a dtype that is stored", BY_NAME.__contains__)]
Digest = Annotated[str, Must("be 64 hexadecimal digits", lambda s: re.fullmatch("[0-9a-f]{64}", s) is not None)]
FileName = Annotated[str, Must("be rank_NNNNN.safetensors", lambda s: re.fullmatch(r"rank_\d{5,9}\.safetensors", s))]


class OtherFormat(UserError):
    """A checkpoint is of a format that is not read."""


class Damaged(UserError):
    """A checkpoint is not what was written, or cannot be read."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where training stands beside its tensors; `data` is what the loader goes on from, `config` the options."""

    step: Count
    tokens: Count
    data: dict[str, Any]
    config: dict[str, Any]
    eval_loss: float | None = None  # after this step, if it was evaluated


@dataclass(frozen=True)
class FullTensor:
    """A tensor as it is when put together."""

    dtype: DtypeName
    shape: tuple[Count, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class File:
    """A file of pieces: its length, and the SHA-256 of its header, in which those of the pieces are."""

    bytes: Count
    header_sha256: Digest


@dataclass(frozen=True, kw_only=True)
class Index(TrainState):
    """All that is known of a checkpoint before its files are opened."""

    format: Literal["compiler-trainer 2"] = "compiler-trainer 2"
    tensors: dict[str, FullTensor]
    files: dict[FileName, File]


def encoded(index: Index) -> bytes:
    """The index as it is written, with its own digest in front."""
    text = json.dumps(dataclasses.asdict(index), indent=1, allow_nan=False).encode()
    return TEXT % (sha256(text).encode(), text)


def read_index(path: Path) -> Index:
    """The index of the checkpoint at `path`; raises Damaged where it is not as it was written."""
    file = path / FILE
    try:
        text = file.read_bytes() if file.stat().st_size <= MOST_BYTES else b""
    except OSError as error:
        raise Damaged(str(file), f"cannot be read: {error.strerror}") from error
    found = PATTERN.fullmatch(text)
    if found is None or sha256(found[2]) != found[1].decode():
        raise Damaged(str(file), "is not as it was written: its SHA-256 is another")
    try:
        written = json.loads(found[2])
        if isinstance(written, dict) and written.get("format", Index.format) != Index.format:
            raise other_format(path, str(written["format"]))
        return build(Index, written)
    except OtherFormat:
        raise
    except UserError as error:
        raise Damaged(str(file), f"is no index of a checkpoint: {error}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(str(file), f"is no index of a checkpoint: {type(error).__name__}") from error


def other_format(path: Path, what: str) -> OtherFormat:
    """What to say of a checkpoint in another format."""
    return OtherFormat(str(path), f"was written in another version's format, {what}; this one reads {Index.format}")


def sha256(content: Any) -> str:
    """The digest of bytes, or of what gives them as a buffer."""
    return hashlib.sha256(content).hexdigest()
