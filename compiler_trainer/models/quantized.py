"""Frozen weights stored in 4 or 8 bits (QLoRA, arXiv:2305.14314): linear layers and stacks of experts.

    nf4     16 values that suit normal numbers; blocks of 64 by their largest value, which has 8 bits itself, in blocks
            of 256 ("double quantization"): 4.13 bits a weight. As torchao's NF4Tensor, by value.
    mxfp4   float4 (e2m1); blocks of 32 by a power of two: 4.25 bits (OCP Microscaling Formats 1.0)
    nvfp4   float4 (e2m1); blocks of 16 by a float8 (e4m3), and a matrix by a float32: 4.5 bits
    int8    a row by its largest value: 8 bits

A module reads the weight that the codes stand for. Blocks lie along the dim that a matmul sums over: matrices are
[..., out, in], each expert's quantized by itself. Codes, also those of scales, are parameters, so that they are sharded
and gathered as other weights are: the compiler unpacks them after the gather, and again in the backward. A weight is
quantized only if its rows are whole blocks, so that a shard of rows has blocks of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from passes.ir.spec import Value

State = Mapping[str, Tensor]
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip  # QLoRA, appendix E
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0 to 7; 8 to 15 are their negatives
SCALES_IN_BLOCK = 256  # of nf4
MOST_E2M1, MOST_E4M3, LEAST_E4M3 = 6.0, 448.0, 2.0**-6  # the least normal one


class Format(NamedTuple):
    """A way to store matrices: their state by name, in which `codes` and `scales` are as sharded as the matrices."""

    block: int  # weights of a row that share a scale; 1: any
    quantize: Callable[[Tensor], dict[str, Tensor]]  # fp32 [..., out, in] -> state
    dequantize: Callable[[State], Tensor]  # state -> fp32 [..., out, in]


def packed(codes: Tensor) -> Tensor:
    """Return codes of 4 bits [..., k] as bytes [..., k / 2]; the first of two is in the upper half."""
    codes = codes.to(torch.uint8)
    return codes[..., ::2] << 4 | codes[..., 1::2]


def looked_up(codes: Tensor, table: Tensor, block: int) -> Tensor:
    """Return the values of packed codes, in blocks [..., k / block, block]."""
    numbers = codes.to(torch.int32)  # wider than the bytes: the compiler gathers before it
    values = torch.stack([table[numbers >> 4], table[numbers & 15]], -1)
    return values.view(*codes.shape[:-1], -1, block)


def blocks_of(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return a weight in blocks [..., n, k / block, block], and their largest absolute values [..., n, k / block]."""
    blocks = weight.unflatten(-1, (-1, block))
    return blocks, blocks.abs().amax(-1)


# ---- formats -------------------------------------------------------------------------------------------


def quantize_nf4(weight: Tensor) -> dict[str, Tensor]:
    """Return matrices in nf4."""
    table = torch.tensor(NF4)
    blocks, largest = blocks_of(weight, 64)
    mean = largest.mean((-2, -1))
    centered = (largest - mean[..., None, None]).flatten(-2)
    count = centered.shape[-1]
    rows = F.pad(centered, (0, -count % SCALES_IN_BLOCK)).unflatten(-1, (-1, SCALES_IN_BLOCK))
    factors = 128 / rows.abs().amax(-1).clamp(min=1e-30)
    scales = (rows * factors[..., None]).round().clamp(-128, 127).to(torch.int8).flatten(-2)[..., :count]
    scaled = blocks / largest.clamp(min=1e-30)[..., None]
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2).view(weight.shape)
    state = {"codes": packed(codes), "scales": scales.reshape(largest.shape)}
    return state | {"factors": factors, "mean": mean, "table": table}


def dequantize_nf4(state: State) -> Tensor:
    """Return the matrices of a state in nf4."""
    scales = state["scales"]
    count = scales.shape[-2] * scales.shape[-1]
    factors = state["factors"].repeat_interleave(SCALES_IN_BLOCK, -1)[..., :count].view(scales.shape)
    largest = scales.to(torch.float32) / factors + state["mean"][..., None, None]
    return (looked_up(state["codes"], state["table"], 64) * largest[..., None]).flatten(-2)


def e2m1(values: Tensor) -> Tensor:
    """Return the codes of the float4 numbers nearest to values; of two that are as near, the one with an even code."""
    steps = [(a + b) / 2 for a, b in zip(E2M1, E2M1[1:])]
    size = values.abs()
    codes = sum((size > step if number % 2 == 0 else size >= step).int() for number, step in enumerate(steps))
    return codes + 8 * (values < 0)


def table_of_e2m1() -> Tensor:
    """Return the values of the 16 codes of float4."""
    return torch.tensor([*E2M1, *(-value for value in E2M1)])


def quantize_mxfp4(weight: Tensor) -> dict[str, Tensor]:
    """Return matrices in mxfp4."""
    blocks, largest = blocks_of(weight, 32)
    exponents = torch.frexp(largest.clamp(min=2.0**-124)).exponent.to(torch.float32) - 3  # exact, as log2 is not
    codes = e2m1((blocks / exponents.exp2()[..., None]).clamp(-MOST_E2M1, MOST_E2M1)).view(weight.shape)
    return {"codes": packed(codes), "scales": (exponents + 127).to(torch.uint8), "table": table_of_e2m1()}


def dequantize_mxfp4(state: State) -> Tensor:
    """Return the matrices of a state in mxfp4."""
    scales = (state["scales"].to(torch.float32) - 127).exp2()
    return (looked_up(state["codes"], state["table"], 32) * scales[..., None]).flatten(-2)


def quantize_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """Return matrices in nvfp4."""
    blocks, largest = blocks_of(weight, 16)
    factor = (largest.amax((-2, -1)) / (MOST_E2M1 * MOST_E4M3)).clamp(min=1e-30)
    scales = (largest / MOST_E2M1 / factor[..., None, None]).clamp(LEAST_E4M3, MOST_E4M3).to(torch.float8_e4m3fn)
    scaled = blocks / (scales.to(torch.float32) * factor[..., None, None])[..., None]
    codes = e2m1(scaled.clamp(-MOST_E2M1, MOST_E2M1)).view(weight.shape)
    floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).nan_to_num()
    state = {"codes": packed(codes), "scales": scales.view(torch.uint8)}
    return state | {"factor": factor, "table": table_of_e2m1(), "floats": floats}


def dequantize_nvfp4(state: State) -> Tensor:
    """Return the matrices of a state in nvfp4."""
    scales = state["floats"][state["scales"].to(torch.int32)] * state["factor"][..., None, None]
    return (looked_up(state["codes"], state["table"], 16) * scales[..., None]).flatten(-2)


def quantize_int8(weight: Tensor) -> dict[str, Tensor]:
    """Return matrices in int8."""
    rows = (weight.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return {"codes": (weight / rows).round().to(torch.int8), "rows": rows}


def dequantize_int8(state: State) -> Tensor:
    """Return the matrices of a state in int8."""
    return state["codes"].to(torch.float32) * state["rows"]


FORMATS = {
    "nf4": Format(64, quantize_nf4, dequantize_nf4),
    "mxfp4": Format(32, quantize_mxfp4, dequantize_mxfp4),
    "nvfp4": Format(16, quantize_nvfp4, dequantize_nvfp4),
    "int8": Format(1, quantize_int8, dequantize_int8),
}
SHARDED = ("codes", "scales")
TABLES = ("table", "floats")  # the same for all matrices
LINEAR, STACK = "linear layers", "stacks of experts"


# ---- modules -------------------------------------------------------------------------------------------


class Quantized(nn.Module):
    """A frozen weight of another module, stored in few bits; its state is empty (on the meta device) at first.

    A stack has a matrix for each expert; with `is_transposed`, these are [in, out]. `terms` are low-rank products that
    are added to them, (left, right, factor): peft's LoRA of experts.
    """

    def __init__(self, weight: nn.Parameter, format_name: str, is_transposed: bool):
        super().__init__()
        self.format_name, self.is_transposed, self.shape = format_name, is_transposed, tuple(weight.shape)
        self.original = (weight,)  # a tuple hides it from PyTorch
        self.terms: list[tuple[Tensor, Tensor, float]] = []
        self.names: list[str] = []
        for name, like in state_like(format_name, tuple(self.rows_last(weight).shape)).items():
            self.names.append(name)
            if name in SHARDED:
                self.register_parameter(name, nn.Parameter(like, requires_grad=False))
            else:
                self.register_buffer(name, torch.empty_like(like, device="cpu"))
        # Casts of the model's parameters reach this one, and so the weight; checkpoints omit empty tensors.
        self.like = nn.Parameter(torch.zeros(0, dtype=weight.dtype), requires_grad=False)

    def rows_last(self, weight: Tensor) -> Tensor:
        """Return the matrices of a weight as [..., out, in], or the weight of such matrices."""
        return weight.transpose(-2, -1) if self.is_transposed else weight

    def forward(self) -> Tensor:
        """Return the weight that the codes stand for, with the terms, in the dtype of `like`."""
        state = {name: getattr(self, name) for name in self.names}
        weight = self.rows_last(FORMATS[self.format_name].dequantize(state)).to(self.like.dtype)
        for left, right, factor in self.terms:
            weight = torch.baddbmm(weight, left, right, alpha=factor)
        return weight

    def state_of(self, value: Value) -> dict[str, Tensor]:
        """Return the state that stores a value of the weight; of a stack, one matrix is read at a time."""
        quantize = FORMATS[self.format_name].quantize
        if len(self.shape) == 2:
            state = quantize(value[()].to(torch.float32))
        else:
            parts = (value[(slice(i, i + 1),)].to(torch.float32) for i in range(self.shape[0]))
            states = [quantize(self.rows_last(part).contiguous()) for part in parts]
            state = {n: first if n in TABLES else torch.cat([s[n] for s in states]) for n, first in states[0].items()}
        return state | {"like": torch.zeros(0, dtype=self.like.dtype)}


def state_like(format_name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the state of matrices of that shape, on the meta device."""
    with torch.device("meta"):
        return FORMATS[format_name].quantize(torch.empty(shape, dtype=torch.float32))


class Weights(nn.ModuleDict):
    """The quantized weights of a module, by the names that they had."""

    def items(self) -> ItemsView[str, Quantized]:  # type: ignore[override]
        """Return the names and the weights."""
        return super().items()  # type: ignore[return-value]


def weights_of(module: nn.Module) -> Weights:
    """Return the quantized weights of a module, without those of its submodules."""
    stored = module._modules.get("quantized")
    return stored if isinstance(stored, Weights) else Weights()


@cache
def reading(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass of a module's class that reads these weights from the module's `quantized`."""

    def read(name: str) -> property:
        return property(lambda module: weights_of(module)[name]())

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **{name: read(name) for name in names}})


@contextmanager
def originals_in(module: nn.Module) -> Iterator[None]:
    """Give a module its own weights back, which are empty, inside the block; nothing if none is quantized."""
    kind, stored = type(module), weights_of(module)
    if not stored:
        yield
        return
    restore(module, {name: weight.original[0] for name, weight in stored.items()})
    try:
        yield
    finally:
        store(module, stored, kind)


def store(module: nn.Module, stored: Weights, kind: type[nn.Module]) -> None:
    """Replace weights of a module by quantized ones; `kind` is the class that reads these."""
    for name in stored:
        delattr(module, name)
    module.quantized, module.__class__ = stored, kind


def restore(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the quantized weights of a module by weights, as `store` found them."""
    module.__class__ = type(module).__mro__[1]
    del module.quantized
    for name, weight in weights.items():
        module.register_parameter(name, nn.Parameter(weight, requires_grad=False))


def is_stack(owner: nn.Module, weight: Tensor) -> bool:
    """Return True for a matrix of each of a module's experts, [experts, in, out] or [experts, out, in]."""
    return weight.dim() == 3 and weight.shape[0] == getattr(owner, "num_experts", None)


def frozen_matrices(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (kind, owner, name, weight) of each frozen linear layer and stack of experts."""
    for owner in module.modules():
        for name, weight in owner.named_parameters(recurse=False):
            is_linear = isinstance(owner, nn.Linear) and name == "weight"
            if not weight.requires_grad and (is_linear or is_stack(owner, weight)):
                yield LINEAR if is_linear else STACK, owner, name, weight


def quantize_weights(module: nn.Module, format_name: str, others: Collection[nn.Module]) -> str:
    """Store the frozen linear layers and experts of a module in a format, in place, except those of `others`.

    Return a line on how many they are. Weights that are shared with another module stay, too, and those whose rows are
    not whole blocks. Raises UserError if there are no others.
    """
    owners = Counter(id(p) for owner in module.modules() for p in owner.parameters(recurse=False))
    block, total, done = FORMATS[format_name].block, Counter[str](), Counter[str]()
    chosen: dict[nn.Module, dict[str, Quantized]] = {}
    for kind, owner, name, weight in frozen_matrices(module):
        is_transposed = kind is STACK and getattr(owner, "is_transposed", False)
        rows = weight.shape[-2] if is_transposed else weight.shape[-1]
        total[kind] += 1
        if owner not in others and owners[id(weight)] == 1 and rows % block == 0:
            done[kind] += 1
            chosen.setdefault(owner, {})[name] = Quantized(weight, format_name, is_transposed)
    for owner, weights in chosen.items():
        store(owner, Weights(weights), reading(type(owner), tuple(weights)))  # type: ignore[arg-type]
    if not chosen:
        kinds = " and ".join(f"{count} frozen {kind}" for kind, count in total.items()) or f"0 frozen {LINEAR}"
        problem = f"{format_name} fits none of {kinds} (rows of whole blocks of {block})"
        raise UserError("model.quantize", f"{problem}; set it to null")
    kinds = " and ".join(f"{done[kind]} of {count} frozen {kind}" for kind, count in total.items())
    return f"{kinds} are stored in {format_name}"


def dequantize_weights(module: nn.Module) -> None:
    """Put weights that codes stand for in place of quantized ones."""
    for owner in [*module.modules()]:
        if stored := weights_of(owner):
            restore(owner, {name: weight() for name, weight in stored.items()})


def quantized_in(module: nn.Module) -> dict[str, Quantized]:
    """Return the quantized weights of a module by the names that they had."""
    owners = module.named_modules()
    named = ((path, name, weight) for path, owner in owners for name, weight in weights_of(owner).items())
    return {f"{path}.{name}".lstrip("."): weight for path, name, weight in named}


def entries_of(module: nn.Module) -> int:
    """Return the number of a module's weights, each once; a quantized weight counts as many as it stands for."""
    weights = [*quantized_in(module).values()]
    stored = {id(p) for weight in weights for p in weight.parameters()}
    others = sum(p.numel() for p in module.parameters() if id(p) not in stored)
    return others + sum(math.prod(weight.shape) for weight in weights)
