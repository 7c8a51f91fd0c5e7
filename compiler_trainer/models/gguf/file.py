"""The writing of a GGUF file from a folder of transformers, one tensor in memory at a time."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from compiler_trainer.models.gguf.architectures import architecture_of, options
from compiler_trainer.models.gguf.tensors import tensors
from compiler_trainer.models.gguf.vocabulary import write_vocabulary
from compiler_trainer.models.weights import stored_in
from passes.ir.spec import Stored

TYPES = {
    "float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0",
}  # fmt: skip  # names of gguf's LlamaFileType
IN_FLOAT32 = ("_norm.weight", "ffn_gate_inp.weight", "rope_freqs.weight")  # ends of names


def is_gguf(name: Path | str) -> bool:
    """Return True for the name of a GGUF file."""
    return str(name).endswith(".gguf")


def write_gguf(folder: Path, file: Path, dtype: str, name: str) -> None:
    """Write a folder of transformers as a GGUF file.

    Matrices are in `dtype`, one of `TYPES`, except routers; vectors and routers are in float32. In q8_0, a matrix whose
    rows are no multiple of 32 numbers is in float16. `name` is the model's name. Raises UserError for an architecture
    or a tokenizer that llama.cpp does not have.
    """
    gguf = import_module("gguf")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = architecture_of(str(folder), config)
    writer = gguf.GGUFWriter(file, architecture.name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(gguf.LlamaFileType[TYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for option, value in options(config, architecture).items():
        getattr(writer, f"add_{option}")(value)
    write_vocabulary(writer, folder, config["vocab_size"], name)
    values = tensors(config, architecture, stored_in(folder))
    write_tensors(writer, values, dtype)


def write_tensors(writer: Any, values: dict[str, Stored], dtype: str) -> None:
    """Write the header, and each tensor as it is read."""
    gguf = import_module("gguf")
    types = {name: type_of(name, tuple(value.shape), dtype) for name, value in values.items()}
    for name, value in values.items():
        size = int(np.prod(gguf.quant_shape_to_byte_shape(value.shape, types[name])))
        writer.add_tensor_info(name, value.shape, np.dtype(np.float32), size, types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, value in values.items():
        writer.write_tensor_data(gguf.quants.quantize(value[()].float().contiguous().numpy(), types[name]))
    writer.close()


def type_of(name: str, shape: tuple[int, ...], dtype: str) -> Any:
    """Return gguf's type for a tensor."""
    types = import_module("gguf").GGMLQuantizationType
    if len(shape) == 1 or name.endswith(IN_FLOAT32) or not name.endswith(".weight"):
        return types.F32
    if dtype == "q8_0":
        return types.Q8_0 if shape[-1] % 32 == 0 else types.F16
    return {"float32": types.F32, "float16": types.F16, "bfloat16": types.BF16}[dtype]
