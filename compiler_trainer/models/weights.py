"""Tensors in safetensors files, of which only the requested slices are read; several of them as one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.models.quantized import dequantize_mxfp4, table_of_e2m1
from passes.ir.spec import Stored

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
BYTES_IN_BLOCK = 16  # of MXFP4
OF_TEXT = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(.*)")  # in a vision-language model
HEAD = "lm_head."
Index = tuple[slice, ...]


@dataclass(frozen=True)
class InFile:
    """One tensor of a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: Index) -> Tensor:
        with safe_open(self.path, "pt") as file:  # closed at once, so that its cached pages take no memory
            return file.get_slice(self.name)[index] if index else file.get_tensor(self.name)


@dataclass(frozen=True)
class Stacked:
    """Tensors of one shape as one, along a new first dim."""

    parts: Sequence[Stored]

    @property
    def shape(self) -> tuple[int, ...]:
        (shape,) = of_one_shape(tuple(part.shape) for part in self.parts)
        return (len(self.parts), *shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def __getitem__(self, index: Index) -> Tensor:
        chosen = self.parts[index[0]] if index else self.parts
        return torch.stack([part[index[1:]] for part in chosen])


@dataclass(frozen=True)
class Joined:
    """Tensors as one, along an existing dim."""

    parts: Sequence[Stored]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [tuple(part.shape) for part in self.parts]
        (around,) = of_one_shape((*shape[: self.dim], *shape[self.dim + 1 :]) for shape in shapes)
        return (*around[: self.dim], sum(shape[self.dim] for shape in shapes), *around[self.dim :])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def __getitem__(self, index: Index) -> Tensor:
        index = (*index, *map(slice, self.shape[len(index) :]))
        first, last, _ = index[self.dim].indices(self.shape[self.dim])
        slices, begin = [], 0
        for part in self.parts:
            size = part.shape[self.dim]
            low, high = max(first - begin, 0), min(last - begin, size)
            if low < high or not size:
                slices.append(part[(*index[: self.dim], slice(low, high), *index[self.dim + 1 :])])
            begin += size
        return torch.cat(slices, self.dim)


def of_one_shape(shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the only shape of tensors that are joined; raise UserError if they have several."""
    different = list(dict.fromkeys(shapes))
    if len(different) > 1:
        text = " and ".join(str(list(shape)) for shape in different[:2])
        raise UserError("model.path", f"has tensors of shapes {text}, which do not join; its config.json does not fit")
    return different


@dataclass(frozen=True)
class Made:
    """A tensor that is computed as a whole each time a slice is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    def __getitem__(self, index: Index) -> Tensor:
        return self.make()[index]


@dataclass(frozen=True)
class InMxfp4:
    """A stack of experts' matrices [E, in, out] in MXFP4, as gpt-oss stores it, in bfloat16; read expert by expert.

    `blocks`, uint8 [E, out, in / 32, 16], have two codes a byte, the first in the lower half; `scales`, uint8
    [E, out, in / 32], are exponents.
    """

    blocks: InFile
    scales: InFile

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, count, _ = self.blocks.shape
        return (experts, count * 2 * BYTES_IN_BLOCK, rows)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def state(self, experts: slice) -> dict[str, Tensor]:
        """Return the state of some experts as `quantized` has it, with the first of two codes in the upper half."""
        blocks = self.blocks[(experts,)].flatten(-2)
        return {"codes": blocks << 4 | blocks >> 4, "scales": self.scales[(experts,)], "table": table_of_e2m1()}

    def __getitem__(self, index: Index) -> Tensor:
        experts, *others = index or (slice(None),)
        weight = dequantize_mxfp4(self.state(experts)).to(torch.bfloat16)
        return weight.transpose(-2, -1)[(slice(None), *others)]


def text_alone(
    stored: Mapping[str, Stored], base: str, expected: Iterable[str], remark: Callable[[str], None]
) -> dict[str, Stored]:
    """Return a folder's values; for the text model of a vision-language model, those alone, by its own names.

    `base` is the attribute of the text model below its head, `expected` are the names that the model has.
    """
    inside = {name: match[1] for name in stored if (match := OF_TEXT.match(name))}
    if not inside or any(map(OF_TEXT.match, expected)):
        return dict(stored)
    names = {name: part if part.startswith(HEAD) else f"{base}.{part}" for name, part in inside.items()}
    names |= {name: name for name in stored if name.startswith(HEAD)}
    if left_out := len(stored) - len(names):
        remark(f"the text model alone is used, without {left_out} other tensors, such as the vision tower's")
    return {now: stored[name] for name, now in names.items()}


def with_stacks(tensors: Mapping[str, InFile]) -> dict[str, InFile | InMxfp4]:
    """Return tensors by name, with `*_blocks` and `*_scales` of bytes as one; raise UserError if they do not fit."""
    joined: dict[str, InFile | InMxfp4] = dict(tensors)
    for name, blocks in tensors.items():
        stack = name.removesuffix("_blocks")
        scales = tensors.get(f"{stack}_scales")
        if stack == name or scales is None or blocks.dtype != torch.uint8:
            continue
        if len(scales.shape) != 3 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, BYTES_IN_BLOCK):
            problem = f"has shape {list(blocks.shape)}, but {stack}_scales has {list(scales.shape)}"
            fix = f"MXFP4 has bytes of shapes [E, out, in / 32, {BYTES_IN_BLOCK}] and [E, out, in / 32]"
            raise UserError(f"{blocks.path}: {name}", f"{problem}; {fix}")
        joined[stack] = InMxfp4(blocks, scales)
        del joined[name], joined[f"{stack}_scales"]
    return joined


def stored_in(folder: Path) -> dict[str, InFile]:
    """Return every tensor of a folder by its name there; only headers are read.

    Raises UserError naming the file that is missing, broken, or shorter than its header says.
    """
    return {name: tensor for path in files_of(folder) for name, tensor in headers(path).items()}


def files_of(folder: Path) -> list[Path]:
    """Return the files with the weights of a folder, as transformers chooses: the single one, or those of its index.

    Raises UserError.
    """
    index = folder / INDEX
    if (folder / ONE_FILE).is_file() or not index.is_file():
        return [folder / ONE_FILE]
    try:
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(str(index), f"is not an index of safetensors files: {error}") from error


def headers(path: Path) -> dict[str, InFile]:
    """Return the tensors of one file; only its header is read."""
    if not path.is_file():
        raise UserError(str(path), "no such file; weights are read from safetensors, and model.init=random needs none")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}
            return {
                name: InFile(path, name, tuple(s.get_shape()), DTYPES[s.get_dtype()]) for name, s in tensors.items()
            }
    except (SafetensorError, OSError) as error:
        raise UserError(str(path), f"is not a safetensors file: {error}") from error
    except KeyError as error:
        dtypes = ", ".join(DTYPES)
        raise UserError(str(path), f"holds numbers of type {error}; weights can be {dtypes}") from error
