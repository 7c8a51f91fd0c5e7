"""Frozen linear layers whose weights are stored in 4 or 8 bits (QLoRA, arXiv:2305.14314).

    nf4     16 values that suit normal numbers; blocks of 64 by their largest value, which has 8 bits itself, in blocks
            of 256 ("double quantization"): 4.13 bits a weight. As torchao's NF4Tensor, by value.
    mxfp4   float4 (e2m1); blocks of 32 by a power of two: 4.25 bits (OCP Microscaling Formats 1.0)
    nvfp4   float4 (e2m1); blocks of 16 by a float8 (e4m3), and a tensor by a float32: 4.5 bits
    int8    a row by its largest value: 8 bits

A layer computes with the weight that its codes stand for, [out, in]. Codes, also those of scales, are parameters, so
that they are sharded and gathered as other weights are: the compiler unpacks them after the gather, and again in the
backward. A weight is quantized only if its rows are whole blocks, so that a shard of rows has blocks of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError

State = Mapping[str, Tensor]
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip  # QLoRA, appendix E
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0 to 7; 8 to 15 are their negatives
SCALES_IN_BLOCK = 256  # of nf4
MOST_E2M1, MOST_E4M3, LEAST_E4M3 = 6.0, 448.0, 2.0**-6  # the least normal one


class Format(NamedTuple):
    """A way to store a weight: its state by name, in which `codes` and `scales` are as sharded as the weight."""

    block: int  # weights of a row that share a scale; 1: any
    quantize: Callable[[Tensor], dict[str, Tensor]]  # fp32 [out, in] -> state
    dequantize: Callable[[State], Tensor]  # state -> fp32 [out, in]


def packed(codes: Tensor) -> Tensor:
    """Return codes of 4 bits [n, k] as bytes [n, k / 2]; the first of two is in the upper half."""
    codes = codes.to(torch.uint8)
    return codes[:, ::2] << 4 | codes[:, 1::2]


def looked_up(codes: Tensor, table: Tensor, block: int) -> Tensor:
    """Return the values of packed codes, in blocks [n, k / block, block]."""
    numbers = codes.to(torch.int32)  # wider than the bytes: the compiler gathers before it
    values = torch.stack([table[numbers >> 4], table[numbers & 15]], -1)
    return values.view(len(codes), -1, block)


def blocks_of(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return a weight in blocks [n, k / block, block], and their largest absolute values [n, k / block]."""
    blocks = weight.view(len(weight), -1, block)
    return blocks, blocks.abs().amax(-1)


# ---- formats -------------------------------------------------------------------------------------------


def quantize_nf4(weight: Tensor) -> dict[str, Tensor]:
    """Return a weight in nf4."""
    table = torch.tensor(NF4)
    blocks, largest = blocks_of(weight, 64)
    mean = largest.mean()
    centered = (largest - mean).flatten()
    rows = F.pad(centered, (0, -len(centered) % SCALES_IN_BLOCK)).view(-1, SCALES_IN_BLOCK)
    factors = 128 / rows.abs().amax(1).clamp(min=1e-30)
    scales = (rows * factors[:, None]).round().clamp(-128, 127).to(torch.int8).flatten()[: len(centered)]
    scaled = blocks / largest.clamp(min=1e-30)[..., None]
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2).view(weight.shape)
    state = {"codes": packed(codes), "scales": scales.view(largest.shape)}
    return state | {"factors": factors, "mean": mean, "table": table}


def dequantize_nf4(state: State) -> Tensor:
    """Return the weight of a state in nf4."""
    scales = state["scales"]
    factors = state["factors"].repeat_interleave(SCALES_IN_BLOCK)[: scales.numel()].view(scales.shape)
    largest = scales.to(torch.float32) / factors + state["mean"]
    return (looked_up(state["codes"], state["table"], 64) * largest[..., None]).flatten(1)


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
    """Return a weight in mxfp4."""
    blocks, largest = blocks_of(weight, 32)
    exponents = torch.frexp(largest.clamp(min=2.0**-124)).exponent.to(torch.float32) - 3  # exact, as log2 is not
    codes = e2m1((blocks / exponents.exp2()[..., None]).clamp(-MOST_E2M1, MOST_E2M1)).view(weight.shape)
    return {"codes": packed(codes), "scales": (exponents + 127).to(torch.uint8), "table": table_of_e2m1()}


def dequantize_mxfp4(state: State) -> Tensor:
    """Return the weight of a state in mxfp4."""
    scales = (state["scales"].to(torch.float32) - 127).exp2()
    return (looked_up(state["codes"], state["table"], 32) * scales[..., None]).flatten(1)


def quantize_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """Return a weight in nvfp4."""
    blocks, largest = blocks_of(weight, 16)
    factor = (largest.max() / (MOST_E2M1 * MOST_E4M3)).clamp(min=1e-30)
    scales = (largest / MOST_E2M1 / factor).clamp(LEAST_E4M3, MOST_E4M3).to(torch.float8_e4m3fn)
    scaled = blocks / (scales.to(torch.float32) * factor)[..., None]
    codes = e2m1(scaled.clamp(-MOST_E2M1, MOST_E2M1)).view(weight.shape)
    floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).nan_to_num()
    state = {"codes": packed(codes), "scales": scales.view(torch.uint8)}
    return state | {"factor": factor, "table": table_of_e2m1(), "floats": floats}


def dequantize_nvfp4(state: State) -> Tensor:
    """Return the weight of a state in nvfp4."""
    scales = state["floats"][state["scales"].to(torch.int32)] * state["factor"]
    return (looked_up(state["codes"], state["table"], 16) * scales[..., None]).flatten(1)


def quantize_int8(weight: Tensor) -> dict[str, Tensor]:
    """Return a weight in int8."""
    rows = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    return {"codes": (weight / rows).round().to(torch.int8), "rows": rows}


def dequantize_int8(state: State) -> Tensor:
    """Return the weight of a state in int8."""
    return state["codes"].to(torch.float32) * state["rows"]


FORMATS = {
    "nf4": Format(64, quantize_nf4, dequantize_nf4),
    "mxfp4": Format(32, quantize_mxfp4, dequantize_mxfp4),
    "nvfp4": Format(16, quantize_nvfp4, dequantize_nvfp4),
    "int8": Format(1, quantize_int8, dequantize_int8),
}
SHARDED = ("codes", "scales")


# ---- layers --------------------------------------------------------------------------------------------


class QuantizedLinear(nn.Module):
    """A frozen linear layer with a quantized weight; its state is empty (on the meta device) at first."""

    def __init__(self, linear: nn.Linear, format_name: str):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.format_name, self.original = format_name, (linear,)  # a tuple hides it from PyTorch
        self.names: list[str] = []
        for name, like in state_like(format_name, tuple(linear.weight.shape)).items():
            self.names.append(name)
            if name in SHARDED:
                self.register_parameter(name, nn.Parameter(like, requires_grad=False))
            else:
                self.register_buffer(name, torch.empty_like(like, device="cpu"))

    @property
    def weight(self) -> Tensor:
        """The weight that the codes stand for, [out, in] in fp32."""
        return FORMATS[self.format_name].dequantize({name: getattr(self, name) for name in self.names})

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, [..., out]."""
        return F.linear(x, self.weight.to(x.dtype), self.bias)


def state_like(format_name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the state of a quantized weight of that shape, on the meta device."""
    with torch.device("meta"):
        return FORMATS[format_name].quantize(torch.empty(shape, dtype=torch.float32))


def quantize_layers(module: nn.Module, format_name: str, others: Collection[nn.Module]) -> str:
    """Replace the frozen linear layers of a module in place, except `others`; return a line on how many they are.

    Layers that share their weight with another module stay, too, and those whose rows are not whole blocks. Raises
    UserError if no layer is replaced.
    """
    linear = {path: layer for path, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    owners = Counter(id(p) for owner in module.modules() for p in owner.parameters(recurse=False))
    frozen = {path: layer for path, layer in linear.items() if not layer.weight.requires_grad}
    block, count = FORMATS[format_name].block, 0
    for path, layer in frozen.items():
        if layer not in others and owners[id(layer.weight)] == 1 and layer.in_features % block == 0:
            replace(module, path, QuantizedLinear(layer, format_name))
            count += 1
    if not count:
        problem = f"{format_name} fits none of {len(frozen)} frozen linear layers (nn.Linear, rows of whole blocks"
        raise UserError("model.quantize", f"{problem} of {block}); set it to null")
    return f"{count} of {len(frozen)} frozen linear layers are stored in {format_name}"


def dequantize_layers(module: nn.Module) -> None:
    """Put linear layers with the weights that codes stand for in place of quantized ones."""
    for path, layer in [*module.named_modules()]:
        if isinstance(layer, QuantizedLinear):
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            linear.weight, linear.bias = nn.Parameter(layer.weight, requires_grad=False), layer.bias
            replace(module, path, linear)


def replace(module: nn.Module, path: str, layer: nn.Module) -> None:
    """Put a layer at a path of a module."""
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, layer)


def entries_of(module: nn.Module) -> int:
    """Return the number of a module's weights, each once; a quantized weight counts as many as it stands for."""
    layers = [layer for layer in module.modules() if isinstance(layer, QuantizedLinear)]
    stored = {layer.get_parameter(name) for layer in layers for name in layer.names if name in SHARDED}
    others = sum(p.numel() for p in module.parameters() if p not in stored)
    return others + sum(layer.in_features * layer.out_features for layer in layers)
