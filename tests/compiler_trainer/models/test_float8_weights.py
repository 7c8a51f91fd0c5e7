"""Folders in float8: weights within its rounding, the layout of compressed-tensors, and transformers' logits from it."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from compiler_trainer.config.errors import UserError
from compiler_trainer.models.float8 import in_float8, to_float8

SIZES = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16, max_position_embeddings=64)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
}
IDS = torch.arange(24)[None]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MATRICES = {
    "llama": [*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))],
    "mixtral": [*(f"self_attn.{name}" for name in ATTENTION), *(f"block_sparse_moe.experts.{n}.{w}" for n in range(3) for w in ("w1", "w2", "w3"))],
}
MATRICES["qwen3"] = MATRICES["llama"]


def saved(kind, folder, size="50GB"):
    """Write a folder with random weights; return the model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=size)
    return model


def tensors(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("size", ["50GB", "20KB"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_of_linear_layers_are_within_float8s_rounding_and_all_else_in_bfloat16(kind, size, tmp_path):
    saved(kind, tmp_path, size)
    exact = tensors(tmp_path)
    to_float8(tmp_path)
    found = tensors(tmp_path)
    matrices = {f"model.layers.{layer}.{name}" for layer in range(2) for name in MATRICES[kind]}
    assert found.keys() == exact.keys() | {f"{name}.weight_scale" for name in matrices}
    for name, value in exact.items():
        module = name.removesuffix(".weight")
        if module not in matrices:
            assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], value.bfloat16()), name
            continue
        scale = found[f"{module}.weight_scale"]
        assert (found[name].dtype, scale.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, torch.bfloat16, (len(value), 1))
        rounded, step = found[name].float() * scale.float(), scale.float() * 2**-9  # of numbers below 2^-6
        largest = value.abs() == value.abs().amax(1, keepdim=True)  # of a scale that was rounded down
        assert ((rounded - value).abs() <= torch.where(largest, 2**-4 + 2**-8, 2**-4) * value.abs() + step / 2).all(), name
    if size == "20KB":
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == found.keys() and all(name in load_file(tmp_path / file) for name, file in index.items())


def test_rows_of_zeros_stay_and_have_no_infinite_scale():
    weight, scale = in_float8(torch.tensor([[0.0, 0.0], [1.0, -448.0]]))
    assert weight.float().tolist() == [[0, 0], [1, -448]] and scale.tolist() == [[0], [1]]


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_config_is_the_scheme_of_dynamic_float8(kind, tmp_path):
    saved(kind, tmp_path)
    to_float8(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    routers = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(2)] if kind == "mixtral" else []
    part = {"num_bits": 8, "type": "float", "symmetric": True}
    assert config["quantization_config"] == {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed", "ignore": ["lm_head", *routers],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "format": "float-quantized", "weights": part | {"strategy": "channel", "dynamic": False},
            "input_activations": part | {"strategy": "token", "dynamic": True},
        }},
    }
    QuantizationConfig.model_validate(config["quantization_config"])


@pytest.mark.parametrize("kind", CONFIGS)
def test_transformers_reads_the_rounded_weights(kind, tmp_path):
    """With the weights that it reads, the original model gives the same logits."""
    model = saved(kind, tmp_path)
    to_float8(tmp_path)
    settings = {"dtype": torch.float32, "quantization_config": CompressedTensorsConfig(dequantize=True), "output_loading_info": True}
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path, **settings)
    assert not any(info.values())
    found = tensors(tmp_path)
    rounded = {name: value.bfloat16() for name, value in found.items() if not name.endswith("_scale")}
    for name in [name for name in found if name.endswith("weight_scale")]:  # in the dtype of scales, except experts
        weight, dtype = name.removesuffix("_scale"), torch.float32 if ".experts." in name else torch.bfloat16
        rounded[weight] = rounded[weight].to(dtype) * found[name].to(dtype)
    (tmp_path / "plain").mkdir()
    model.config.save_pretrained(tmp_path / "plain")
    save_file(rounded, tmp_path / "plain/model.safetensors", {"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(read(IDS).logits, plain(IDS).logits)
        assert not torch.allclose(read(IDS).logits, model(IDS).logits, atol=1e-3)


def test_experts_in_one_tensor_are_refused(tmp_path):
    config = transformers.GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--dtype: float8: model.layers.0.mlp.experts.* holds all experts of a layer, .*; choose bfloat16"):
        to_float8(tmp_path)
