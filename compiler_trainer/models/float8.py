"""A folder of transformers with weights in float8, in the layout of compressed-tensors that vLLM reads.

    X.weight          float8_e4m3fn [out, in]: weight / scale, at most 448
    X.weight_scale    bfloat16 [out, 1]: one scale for each row

Activations are quantized by the server, with one scale for each token (compressed-tensors' scheme FP8_DYNAMIC).
Embeddings, norms, the head and routers stay in bfloat16, and what transformers keeps in float32 is in float32.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.models.folder import library
from compiler_trainer.models.skeleton import skeleton
from compiler_trainer.models.transformers_private import conversion_of
from compiler_trainer.models.weights import INDEX, files_of, stored_in
from compiler_trainer.widths import DtypeOf, dtypes_in

FLOAT8 = "float8"  # its name in --dtype
TYPE, LARGEST = torch.float8_e4m3fn, 448.0
EXPERT = re.compile(r".*\.experts\.\d+\.\w+")  # a matrix of one expert; transformers' modules join all of a layer
GATES = ("gate", "router")  # ends of the names of routers, which servers do not quantize


def to_float8(folder: Path) -> None:
    """Rewrite the weights and the config of a folder; raise UserError for experts that are stored as one tensor."""
    stored = stored_in(folder)
    for name, value in stored.items():
        if len(value.shape) == 3 and ".experts." in name:
            problem = "holds all experts of a layer, and compressed-tensors has one tensor for each"
            raise UserError("--dtype", f"float8: {name} {problem}; choose bfloat16")
    matrices = {name.removesuffix(".weight") for name, value in stored.items() if is_matrix(name, value.shape)}
    model = model_of(folder)
    linear = linear_modules(model)
    quantized = {name for name in matrices if name in linear or EXPERT.fullmatch(name)}
    dtype_of = dtypes_in_files(model)
    for file in files_of(folder):
        rewrite(file, quantized, dtype_of)
    if (index := folder / INDEX).is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))
        files = listed["weight_map"]
        files |= {f"{name}.weight_scale": files[f"{name}.weight"] for name in quantized}
        listed.pop("metadata", None)  # sizes in another dtype
        index.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    others = {name for name in matrices - quantized if "embed" not in name}
    config |= {"dtype": "bfloat16", "quantization_config": scheme(sorted({"lm_head", *others}))}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def is_matrix(name: str, shape: Any) -> bool:
    """Return True for the weight of a module with two dims."""
    return name.endswith(".weight") and len(shape) == 2


def model_of(folder: Path) -> Any:
    """Return the skeleton of a folder's model."""
    transformers = library()
    config = transformers.AutoConfig.from_pretrained(folder)
    return skeleton(lambda: transformers.AutoModelForCausalLM.from_config(config))


def dtypes_in_files(model: Any) -> DtypeOf:
    """Return a function from name and value of a stored tensor to its dtype in bfloat16; buffers keep theirs."""
    conversion, state = conversion_of(model), model.state_dict()
    buffers, dtype_of = {name for name, _ in model.named_buffers()}, dtypes_in(model, torch.bfloat16)

    def of_file(name: str, value: Tensor) -> torch.dtype:
        target, _ = conversion.target(name, model, state)
        return value.dtype if target in buffers else dtype_of(target, value)

    return of_file


def linear_modules(model: Any) -> set[str]:
    """Return the names of a model's linear layers, apart from the head and routers."""
    head = model.get_output_embeddings()
    modules = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    return {name for name in modules if not name.endswith(GATES)}


def rewrite(file: Path, quantized: set[str], dtype_of: DtypeOf) -> None:
    """Rewrite a safetensors file: the matrices of some modules in float8 with their scales, all else in its dtype."""
    tensors: dict[str, Tensor] = {}
    with safe_open(file, "pt") as opened:
        for name in opened.keys():
            value, module = opened.get_tensor(name), name.removesuffix(".weight")
            if module in quantized:
                tensors[name], tensors[f"{module}.weight_scale"] = in_float8(value)
            else:
                tensors[name] = value.to(dtype_of(name, value))
    partial = file.with_name(f"{file.name}.partial")
    save_file(tensors, partial, {"format": "pt"})
    partial.replace(file)


def in_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights [out, in] in float8_e4m3fn, and their scales in bfloat16 [out, 1]; they are rounded to nearest."""
    scale = (weight.float().abs().amax(1, keepdim=True) / LARGEST).to(torch.bfloat16)
    divisor = torch.where(scale > 0, scale.float(), 1.0)  # a row of zeros
    return (weight.float() / divisor).clamp(-LARGEST, LARGEST).to(TYPE), scale


def scheme(ignore: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a folder in which all linear layers but those in `ignore` are in float8."""
    quantization = import_module("compressed_tensors.quantization")
    preset = quantization.preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    preset.format = "float-quantized"
    status = quantization.QuantizationStatus.COMPRESSED
    config = quantization.QuantizationConfig(
        config_groups={"group_0": preset}, format="float-quantized", quantization_status=status, ignore=ignore
    )
    return config.model_dump(mode="json", exclude_none=True)
