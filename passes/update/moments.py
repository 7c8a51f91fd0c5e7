"""Storage of optimizer state: in one tensor, or in eight bits with a scale per block.

    m    f32[8, 512]   ->   codes uint8[8, 512], scale f32[8, 2]        blocks of 256 along the last dim

The formats are those of torchao.optim: `int8`, the dynamic map of Dettmers et al. (arXiv 2110.02861), and `float8`,
e4m3fn. As there, a tensor is stored wide if it has fewer than 4,096 entries, or if its rows on a rank are not a
multiple of the block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec
from passes.update.optimizers import to_stored_dtype

Format = Literal["float32", "bfloat16", "int8", "float8"]
Part = tuple[str, tuple[int, ...], torch.dtype, Spec]  # suffix of the name, local shape, dtype, placement
SMALL = 4096  # a tensor with fewer entries is stored wide
TINY = 1e-12  # a block of zeros has a finite scale
E4M3 = torch.float8_e4m3fn


class Codec(Protocol):
    """The storage format of one moment of one parameter; zeros decode to zeros."""

    def parts(self, spec: Spec, mesh: Mesh) -> list[Part]: ...

    def encode(self, x: Tensor) -> Sequence[Tensor]: ...

    def decode(self, parts: Sequence[Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class Wide:
    """One tensor of a dtype."""

    dtype: torch.dtype

    def parts(self, spec: Spec, mesh: Mesh) -> list[Part]:
        return [("", spec.local_shape(mesh), self.dtype, spec)]

    def encode(self, x: Tensor) -> Sequence[Tensor]:
        return [to_stored_dtype(x, self.dtype)]

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]


@dataclass(frozen=True)
class QuantBlocks:
    """Codes of one byte per entry, and an fp32 scale for every `block` entries of the last dim."""

    block: int
    format: Literal["int8", "float8"]
    signed: bool

    def parts(self, spec: Spec, mesh: Mesh) -> list[Part]:
        blocks = block_spec(spec, mesh, self.block)
        assert blocks is not None
        dtype = torch.uint8 if self.format == "int8" else E4M3
        scale = (".scale", blocks.local_shape(mesh), torch.float32, blocks)
        return [("", spec.local_shape(mesh), dtype, replace(spec, fill=None)), scale]

    def encode(self, x: Tensor) -> Sequence[Tensor]:
        blocks = x.unflatten(-1, (-1, self.block))
        largest = blocks.abs().amax(-1).clamp(min=TINY)
        if self.format == "float8":
            scale = largest / torch.finfo(E4M3).max
            return [(blocks / scale[..., None]).to(E4M3).view(x.shape), scale]
        values = dynamic_map(self.signed, x.device)
        between = (values[1:] + values[:-1]) / 2
        codes = torch.bucketize((blocks / largest[..., None]).contiguous(), between, right=True)
        return [codes.to(torch.uint8).view(x.shape), largest]

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        codes, scale = parts
        if self.format == "float8":
            values = codes.to(torch.float32)
        else:
            values = dynamic_map(self.signed, codes.device)[codes.to(torch.int32)]
        return (values.unflatten(-1, (-1, self.block)) * scale[..., None]).view(codes.shape)


def dynamic_map(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of a code, f32, rising: each decade from 1e-7 to 1 has twice as many as the one below."""
    count = 127 if signed else 254
    k = torch.arange(1, count + 1, dtype=torch.float64, device=device)
    first = 1 if signed else 2  # values in the lowest decade
    decade = torch.floor(torch.log2((k - 1) / first + 1 + 1e-9))
    inside = (k - 1) - first * (2**decade - 1)
    positive = 10 ** (decade - 6) * (0.1 + 0.9 * (inside + 0.5) / (first * 2**decade))
    zeros, ones = torch.zeros_like(k[:1]), torch.ones_like(k[:1])
    negative = [-positive.flip(0)] if signed else []
    return torch.cat([*negative, zeros, positive, ones]).to(torch.float32)


def block_spec(spec: Spec, mesh: Mesh, block: int) -> Spec | None:
    """Return the placement of one value per block of the last dim; None if a rank's rows are not whole blocks."""
    if not spec.dims:
        return None
    factors: list[Factor] = []
    for factor in reversed(spec.dims[-1]):
        if factor.size % block == 0 and factor.local(mesh) % block == 0:
            factors.append(replace(factor, size=factor.size // block))
            block = 1
        elif block % factor.size == 0 and not factor.axes:
            block //= factor.size
        else:
            return None
    return replace(spec, dims=(*spec.dims[:-1], tuple(reversed(factors))), fill=None) if block == 1 else None


def codec(state_format: Format | None, signed: bool, block: int, dtype: torch.dtype, spec: Spec, mesh: Mesh) -> Codec:
    """Return the storage of a moment of a parameter with this dtype and placement.

    With `state_format` None it has the parameter's dtype. Moments of complex parameters are complex and never narrower
    than two fp32.
    """
    if dtype.is_complex:
        return Wide(dtype if state_format is None else torch.complex64)
    if state_format in ("int8", "float8"):
        small = math.prod(spec.shape) < SMALL
        return (
            Wide(torch.float32)
            if small or block_spec(spec, mesh, block) is None
            else QuantBlocks(block, state_format, signed)
        )
    wide: dict[Any, torch.dtype] = {None: dtype, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return Wide(wide[state_format])
