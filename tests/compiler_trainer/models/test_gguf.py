"""GGUF files by value: read by transformers, or by hand where it does not read them, they give the folder's logits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from byte_tokenizer import write_tokenizer
from gguf import GGMLQuantizationType as Types
from gguf import GGUFReader, LlamaFileType, dequantize
from safetensors.torch import load_file, save_file

from compiler_trainer.config.errors import UserError
from compiler_trainer.models.gguf.architectures import ARCHITECTURES
from compiler_trainer.models.gguf.file import write_gguf
from compiler_trainer.runs import plainly

SIZES = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=48)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
LONG = dict(rope_type="longrope", rope_theta=1e4, long_factor=[1.0, 1.5, 2, 2.5, 3, 3.5, 4, 5], short_factor=[1.0] * 4 + [1.1] * 4,
            original_max_position_embeddings=16)
CONFIGS = {
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**SIZES | {"num_hidden_layers": 7}, sliding_window=8, query_pre_attn_scalar=16),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES | {"head_dim": 32}, sliding_window=32),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "phi3": lambda: transformers.Phi3Config(**SIZES, rope_parameters=LONG, original_max_position_embeddings=16),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, rope_parameters=YARN, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
}
IDS = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return folders by kind, and the log-probability of each token but the first; each is made on first use."""
    made = {}

    def of(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval()
            with torch.no_grad():
                for parameter in model.parameters():  # norms and biases, too
                    parameter.add_(0.1 * torch.randn_like(parameter))
            model.save_pretrained(folder)
            write_tokenizer(folder)
            made[kind] = folder, plainly.values_of(str(folder), "lm", IDS.tolist())["values"][0]
        return made[kind]
    return of


def fields(file):
    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


def values(file):
    return {t.name: torch.from_numpy(np.copy(dequantize(t.data, t.tensor_type))) for t in GGUFReader(file).tensors}


def config_with(folder, tmp_path, **changes):
    """Return a copy of a folder with other options."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


# Values


def test_every_architecture_is_tested():
    assert CONFIGS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("kind", sorted(kind for kind, entry in ARCHITECTURES.items() if entry.is_read))
def test_transformers_computes_the_same_with_a_file(kind, saved, tmp_path):
    folder, wanted = saved(kind)
    write_gguf(folder, tmp_path / "a.gguf", "float32", "a")
    found = plainly.values_of(str(tmp_path / "a.gguf"), "lm", IDS.tolist(), str(folder))
    assert found["dtype"] == "float32" and np.std(wanted) > 0.3
    np.testing.assert_allclose(found["values"][0], wanted, atol=2e-6)


def by_hand(kind, found):
    """Return the tensors of a file under transformers' names, undone by index rather than by reshaping."""
    state, experts = {}, {"gate": {}, "up": {}, "down": {}}
    plain = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "post_attention_norm": "post_attention_layernorm",
             "ffn_gate_inp": "mlp.router" if kind == "gpt_oss" else "mlp.gate"}
    ends = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
    for name, value in found.items():
        if name in ends:
            state[ends[name]] = value
            continue
        _, layer, part, suffix = name.split(".")
        if match := re.fullmatch("ffn_(gate|up|down)_exps", part):
            experts[match[1]][f"model.layers.{layer}.mlp.experts", suffix] = value
        elif part == "attn_sinks":
            state[f"model.layers.{layer}.self_attn.sinks"] = value
        else:
            if kind == "mixtral" and part in ("attn_q", "attn_k"):
                head = range(16)
                rows = [first + (i // 2 if i % 2 == 0 else 8 + i // 2) for first in range(0, len(value), 16) for i in head]
                value = torch.empty_like(value).index_copy_(0, torch.tensor(rows), value)
            state[f"model.layers.{layer}.{plain[part]}.{suffix}"] = value
    for (name, suffix), gate in experts["gate"].items():
        up, down = experts["up"][name, suffix], experts["down"][name, suffix]
        tail = "_bias" if suffix == "bias" else ""
        if kind == "mixtral":
            state[f"{name}.gate_up_proj"], state[f"{name}.down_proj"] = torch.cat([gate, up], 1), down
        else:
            pairs = torch.stack([gate, up], 2).flatten(1, 2)  # gate and up alternate
            state[f"{name}.gate_up_proj{tail}"] = pairs if tail else pairs.transpose(1, 2)
            state[f"{name}.down_proj{tail}"] = down if tail else down.transpose(1, 2)
    return state


@pytest.mark.parametrize("kind", sorted(kind for kind, entry in ARCHITECTURES.items() if not entry.is_read))
def test_mixtures_that_transformers_does_not_read_are_rebuilt_by_hand(kind, saved, tmp_path):
    folder, wanted = saved(kind)
    write_gguf(folder, tmp_path / "a.gguf", "float32", "a")
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval()
    model.load_state_dict(by_hand(kind, values(tmp_path / "a.gguf")))
    with torch.no_grad():
        found = plainly.of_tokens(model, IDS)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize(("dtype", "kind", "bound"), [
    ("float32", Types.F32, 0), ("float16", Types.F16, 2**-11), ("bfloat16", Types.BF16, 2**-8), ("q8_0", Types.Q8_0, None),
])
def test_matrices_are_rounded_and_vectors_and_routers_are_not(dtype, kind, bound, saved, tmp_path):
    folder, _ = saved("qwen3_moe")
    write_gguf(folder, tmp_path / "exact.gguf", "float32", "a")
    write_gguf(folder, tmp_path / "a.gguf", dtype, "a")
    exact, found = values(tmp_path / "exact.gguf"), values(tmp_path / "a.gguf")
    types = {tensor.name: tensor.tensor_type for tensor in GGUFReader(tmp_path / "a.gguf").tensors}
    for name, value in exact.items():
        if name.endswith(("norm.weight", "ffn_gate_inp.weight")):
            assert types[name] == Types.F32 and torch.equal(found[name], value)
            continue
        assert types[name] == kind, name
        error = (found[name] - value).abs()
        if bound is None:  # half a step of 1/127 of a block's largest number, which is in float16
            blocks = value.reshape(-1, 32)
            assert (error.reshape(-1, 32) <= blocks.abs().amax(1, keepdim=True) * (0.5 / 127 + 2**-10)).all() and error.any()
        else:
            assert (error <= bound * value.abs() + 2**-24).all()
    assert fields(tmp_path / "a.gguf")["general.file_type"] == {"float32": 0, "float16": 1, "bfloat16": 32, "q8_0": 7}[dtype]
    assert LlamaFileType.MOSTLY_Q8_0 == 7


def test_rows_that_are_no_blocks_are_in_float16(tmp_path):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"hidden_size": 40})).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    write_gguf(tmp_path, tmp_path / "a.gguf", "q8_0", "a")
    types = {tensor.name: tensor.tensor_type for tensor in GGUFReader(tmp_path / "a.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == Types.Q8_0 and types["blk.0.ffn_up.weight"] == types["token_embd.weight"] == Types.F16
    assert types["blk.0.attn_norm.weight"] == Types.F32


def test_llama_3s_factors_divide_the_frequencies(saved, tmp_path):
    folder, _ = saved("llama")
    write_gguf(folder, tmp_path / "a.gguf", "float32", "a")
    scaled = transformers.AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    plain = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    factors = values(tmp_path / "a.gguf")["rope_freqs.weight"]
    torch.testing.assert_close(plain / factors, scaled)
    assert factors.min() == 1 and factors.max() == 4 and ((factors > 1) & (factors < 4)).any()


# Options


@pytest.mark.parametrize(("kind", "wanted"), [
    ("gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 8}),
    ("gemma3_text", {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.sliding_window": 8, "block_count": 7}),
    ("gpt_oss", {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
                 "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "expert_count": 4, "expert_used_count": 2,
                 "expert_feed_forward_length": 96, "attention.sliding_window": 8}),
    ("llama", {"context_length": 64, "embedding_length": 64, "block_count": 3, "feed_forward_length": 96, "attention.head_count": 4,
               "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16,
               "rope.freq_base": 1e4, "vocab_size": 300}),
    ("mistral", {"context_length": 32, "attention.key_length": 32, "rope.dimension_count": 32}),  # llama.cpp has no window here
    ("mixtral", {"expert_count": 4, "expert_used_count": 2}),
    ("phi3", {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": (1 + np.log(4) / np.log(16)) ** 0.5}),
    ("qwen3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}),
    ("qwen3_moe", {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}),
])
def test_options_have_llama_cpps_names(kind, wanted, saved, tmp_path):
    write_gguf(saved(kind)[0], tmp_path / "a.gguf", "float16", "a")
    found = fields(tmp_path / "a.gguf")
    name = ARCHITECTURES[kind].name
    assert found["general.architecture"] == name and found["general.name"] == "a" and found["general.type"] == "model"
    assert {option: found[f"{name}.{option}"] for option in wanted} == pytest.approx(wanted)
    assert not [option for option in found if "sliding_window" in option and "sliding_window" not in str(wanted)] or kind == "phi3"


@pytest.mark.parametrize(("kind", "changes", "problem"), [
    ("gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar=64"),
    ("gemma3_text", {"layer_types": ["full_attention"] * 7}, "layer_types=full_attention,"),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                                         "sliding_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}}, "rope_type=linear"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type=dynamic"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
    ("qwen2", {"rope_parameters": LLAMA3}, "rope_type=llama3"),
    ("qwen3", {"rope_parameters": YARN | {"attention_factor": 2.0}}, "attention_factor=2.0"),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ("qwen3", {"attention_bias": True}, "attention_bias=true"),
    ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
])
def test_options_that_llama_cpp_does_not_have_are_refused(kind, changes, problem, saved, tmp_path):
    with pytest.raises(UserError, match=re.escape(f"has {problem}") + ".* in its config, and llama.cpp computes"):
        write_gguf(config_with(saved(kind)[0], tmp_path, **changes), tmp_path / "a.gguf", "float16", "a")


def test_other_architectures_are_refused_with_the_known_ones(saved, tmp_path):
    with pytest.raises(UserError, match="is of type gpt2, and GGUF is written for gemma2, gemma3_text, .* qwen3_moe; export a folder"):
        write_gguf(config_with(saved("llama")[0], tmp_path, model_type="gpt2"), tmp_path / "a.gguf", "float16", "a")


def test_a_tensor_without_a_name_is_refused(saved, tmp_path):
    folder = config_with(saved("llama")[0], tmp_path)
    save_file(load_file(folder / "model.safetensors") | {"model.extra.weight": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="model.extra.weight: is no tensor that llama.cpp has in llama"):
        write_gguf(folder, tmp_path / "a.gguf", "float16", "a")
