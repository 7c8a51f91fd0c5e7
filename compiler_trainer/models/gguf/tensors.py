"""The tensors of a folder of transformers under llama.cpp's names and in its layout, read one at a time.

    model.layers.3.self_attn.q_proj.weight          blk.3.attn_q.weight, rows of rotated pairs next to each other
    model.layers.3.mlp.experts.0.gate_proj.weight   blk.3.ffn_gate_exps.weight, the experts along a first dim
    model.norm.weight of Gemma                      output_norm.weight, plus 1
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module

import torch
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.models.gguf.architectures import Architecture, Config, full_rope, head_dim
from compiler_trainer.models.weights import Made, Stacked
from passes.ir.spec import Stored

EXPERT = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's names
FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")  # of gpt-oss
ROTATED = re.compile(r".*\.self_attn\.(q_proj|k_proj)\.(weight|bias)")


def tensors(config: Config, architecture: Architecture, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of a folder by llama.cpp's names; those with another layout are made when they are read."""
    gguf = import_module("gguf")
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture.name], config["num_hidden_layers"])
    result: dict[str, Stored] = {}
    for name, value in with_joined_experts(stored):
        module, _, kind = name.rpartition(".")
        if (known := names.get_name(module)) is None:
            raise UserError(name, f"is no tensor that llama.cpp has in {architecture.name}; export a folder")
        result[f"{known}.{kind}"] = in_layout(config, architecture, name, value)
    return result | rope_factors(config)


def with_joined_experts(stored: Mapping[str, Stored]) -> Iterator[tuple[str, Stored]]:
    """Yield names and tensors, all experts of a layer as one tensor [experts, ...] each for gate, up and down."""
    experts: dict[str, dict[int, Stored]] = {}
    for name, value in stored.items():
        if match := EXPERT.fullmatch(name):
            layer, number, projection = match.groups()
            joined = f"{layer}.mlp.experts.{PROJECTIONS.get(projection, projection)}.weight"
            experts.setdefault(joined, {})[int(number)] = value
        elif match := FUSED.fullmatch(name):
            yield from of_gpt_oss(match[1], match[2], match[3], value)
        elif name.endswith(".sinks"):
            yield f"{name}.weight", value
        else:
            yield name, value
    for name, parts in experts.items():
        yield name, Stacked([parts[number] for number in sorted(parts)])


def of_gpt_oss(experts: str, projection: str, bias: str | None, value: Stored) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of gpt-oss's experts: inputs last, and rows of gate and up, which alternate, apart."""
    kind = "bias" if bias else "weight"
    rows = value if bias else made((value.shape[0], value.shape[2], value.shape[1]), value, lambda x: x.transpose(1, 2))
    if projection == "down_proj":
        yield f"{experts}.down_proj.{kind}", rows
        return
    half = (rows.shape[0], rows.shape[1] // 2, *rows.shape[2:])
    yield f"{experts}.gate_proj.{kind}", made(half, rows, lambda x: x[:, ::2])
    yield f"{experts}.up_proj.{kind}", made(half, rows, lambda x: x[:, 1::2])


def in_layout(config: Config, architecture: Architecture, name: str, value: Stored) -> Stored:
    """Return a tensor as llama.cpp expects it."""
    if architecture.norm_offset and name.endswith("norm.weight"):
        return made(value.shape, value, lambda x: x.float() + architecture.norm_offset)
    if architecture.rotates_neighbours and ROTATED.fullmatch(name):
        return made(value.shape, value, lambda x: neighbouring(x, head_dim(config)))
    return value


def neighbouring(rows: Tensor, head: int) -> Tensor:
    """Return rows [heads * head, ...] in which rows i and i + head/2 of each head become rows 2i and 2i+1."""
    by_half = rows.reshape(-1, 2, head // 2, *rows.shape[1:])
    return by_half.transpose(1, 2).reshape(rows.shape)


def made(shape: Sequence[int], value: Stored, change: Callable[[Tensor], Tensor]) -> Made:
    """Return a tensor that is computed from a stored one when it is read."""
    return Made(tuple(shape), value.dtype, lambda: change(value[()]))


def rope_factors(config: Config) -> dict[str, Stored]:
    """Return the numbers by which llama.cpp divides the frequencies of the rotary embedding, if any."""
    rope = full_rope(config)
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": whole(llama3_factors(config))}
    if rope.get("rope_type") == "longrope":
        kinds = ("long", "short")
        return {f"rope_factors_{kind}.weight": whole(torch.tensor(rope[f"{kind}_factor"])) for kind in kinds}
    return {}


def whole(value: Tensor) -> Made:
    """Return a tensor in memory as a stored one."""
    return Made(tuple(value.shape), value.dtype, lambda: value)


def llama3_factors(config: Config) -> Tensor:
    """Return Llama 3's factors, float32 [head/2]: 1 for short waves, `factor` for long ones, in between a blend."""
    rope, head = full_rope(config), head_dim(config)
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - blend) / rope["factor"] + blend)).float()
