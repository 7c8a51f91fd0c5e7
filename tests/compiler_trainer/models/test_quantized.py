"""Weights in 4 and 8 bits: the formats are torchao's by value, and steps on every mesh are those of eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from chat_folders import chat_folder
from commands import call
from oracle import trained_alike
from torch import nn
from torch.nn import functional as F
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
from transformers import AutoModelForCausalLM

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.validate import validate
from compiler_trainer.models.flops import of_weights
from compiler_trainer.models.quantized import (
    FORMATS,
    NF4,
    dequantize_weights,
    entries_of,
    quantize_weights,
    quantized_in,
)
from compiler_trainer.models.subject import subject
from passes.ir import ir
from passes.ir.operators import kind_of
from passes.memory.recompute import saved_nodes


def by_torchao(weight, name):
    """Return the weight that torchao's format stands for."""
    if name == "nf4":
        return to_nf4(weight, 64, 256).get_original_weight()
    if name == "mxfp4":
        return MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32).dequantize(torch.float32)
    scale = per_tensor_amax_to_scale(weight.abs().max())
    return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale).dequantize(torch.float32)


@pytest.mark.parametrize("name", ["nf4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("scale", [0.02, 30.0])
def test_a_format_is_torchaos(name, scale, monkeypatch):
    weight = scale * torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    table = to_nf4(weight, 64, 256).nf4
    torch.testing.assert_close(torch.tensor(NF4), table, rtol=0, atol=5.1e-5)  # torchao's has four digits
    monkeypatch.setattr("compiler_trainer.models.quantized.NF4", tuple(table.tolist()))
    ours = FORMATS[name].dequantize(FORMATS[name].quantize(weight))
    torch.testing.assert_close(ours, by_torchao(weight, name), rtol=2e-6, atol=1e-7 * scale)
    assert 0 < (ours - weight).abs().mean() / weight.abs().mean() < 0.13


def test_int8_is_off_by_half_a_step_at_most():
    weight = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
    state = FORMATS["int8"].quantize(weight)
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert state["codes"].dtype == torch.int8 and state["codes"].abs().max() == 127
    assert ((FORMATS["int8"].dequantize(state) - weight).abs() <= 0.5001 * steps).all()


def test_scales_of_nf4_need_not_fill_their_last_block():
    weight = torch.randn(5, 192, generator=torch.Generator().manual_seed(1))
    longer = torch.cat((weight.view(1, -1), weight.new_zeros(1, 256 * 64 - weight.numel())), 1)
    state = FORMATS["nf4"].quantize(weight)
    assert state["factors"].shape == (1,) and state["scales"].shape == (5, 3)
    assert (FORMATS["nf4"].dequantize(state) - weight).abs().mean() < 0.1
    assert FORMATS["nf4"].quantize(longer)["scales"].shape == (1, 256)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros(name):
    assert not FORMATS[name].dequantize(FORMATS[name].quantize(torch.zeros(4, 64))).any()


# ---- steps -----------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A trained layer between two frozen ones, of which one has a bias."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.trained, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 192), nn.Linear(192, 64, bias=False)
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.trained(x))))


def quantized(name):
    """Return the module in fp64 with quantized frozen layers."""
    module = Adapted().double()
    values = {name: weight.detach() for name, weight in module.state_dict().items()}
    assert quantize_weights(module, name, []) == f"2 of 2 frozen linear layers are stored in {name}"
    return filled(module, values)


def filled(module, values):
    """Return a module whose quantized weights stand for values, by their names."""
    for key, weight in quantized_in(module).items():
        for part, value in weight.state_of(values[key]).items():
            is_parameter = part in dict(weight.named_parameters())
            setattr(weight, part, nn.Parameter(value, requires_grad=False) if is_parameter else value)
    return module


def error(module, batch):
    return (module(batch["x"]) - batch["y"]).square().mean()


def data(rows=5):
    generator = torch.Generator().manual_seed(2)
    return [{k: torch.randn(rows, 3, 64, dtype=torch.float64, generator=generator) for k in "xy"} for _ in range(3)]


MESHES = [{}, {"dp_shard": 2}, {"dp_shard": 3}, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2}, {"dp_replicate": 2, "tp": 3}]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(8)
def test_steps_are_those_of_eager_pytorch(name, mesh):
    trained_alike(quantized(name), error, data(), mesh, {"name": "adamw"})


@pytest.mark.parametrize("gather", ["microbatch", "step"])
def test_bytes_are_gathered_packed_and_unpacked_again_in_the_backward(gather):
    module = quantized("nf4")
    passes = {"accumulate": {"gather": gather}}
    step = trained_alike(module, error, data(4), {"dp_shard": 2}, {"name": "adamw"}, microbatches=2, passes=passes)
    programs = [compiled.program for compiled in step.train.values()]
    gathers = [n for p in programs for n in p.calls() if kind_of(n) == "all_gather"]
    packed = [n for n in gathers if not ir.example(n).is_floating_point()]
    assert packed and all(ir.example(n).dtype in (torch.uint8, torch.int8) for n in packed)
    largest = max(ir.example(n).numel() for n in gathers if ir.example(n).is_floating_point())
    assert largest <= 64 * 65 + 192  # the trained layer and the bias, no unpacked weight
    kept = [ir.example(n) for p in programs for n in saved_nodes(p)]
    assert not [v for v in kept if v.is_floating_point() and v.shape in ((192, 64), (64, 192))]


# ---- layers ----------------------------------------------------------------------------------------------


def test_what_stays_as_it_is():
    module = nn.ModuleDict({"a": nn.Linear(64, 8), "odd": nn.Linear(65, 8), "head": nn.Linear(64, 8), "tied": nn.Linear(8, 64, bias=False)})
    module["embedding"] = nn.Embedding(64, 8)
    module["tied"].weight = module["embedding"].weight
    module.requires_grad_(False)
    module["trained"] = nn.Linear(64, 8)
    count = entries_of(module)
    assert quantize_weights(module, "nf4", [module["head"]]) == "1 of 4 frozen linear layers are stored in nf4"
    assert list(quantized_in(module)) == ["a.weight"]
    assert entries_of(module) == count


@pytest.mark.parametrize("layer", [nn.Linear(65, 8), nn.Conv1d(64, 8, 1)])
def test_a_format_that_fits_no_layer_is_refused(layer):
    frozen = int(isinstance(layer, nn.Linear))
    with pytest.raises(UserError, match=f"^model.quantize: nf4 fits none of {frozen} frozen linear layers .rows of whole blocks of 64.; set it to null$"):
        quantize_weights(nn.Sequential(layer).requires_grad_(False), "nf4", [])


def test_powers_of_two_of_mxfp4_are_exact():
    """The largest value of a block is just below a power of two, to which log2 rounds in fp32."""
    weight = torch.full((1, 32), 1024 * (1 - 2.0**-24))
    assert FORMATS["mxfp4"].quantize(weight)["scales"].item() == 9 - 2 + 127
    torch.testing.assert_close(FORMATS["mxfp4"].dequantize(FORMATS["mxfp4"].quantize(weight)), by_torchao(weight, "mxfp4"), rtol=0, atol=0)


def test_a_quantized_weight_computes_as_much_as_before():
    plain, module = Adapted(), quantized("nf4")
    assert of_weights(module) == of_weights(plain)


def test_the_weight_that_codes_stand_for_can_be_put_back():
    module, batch = quantized("nvfp4"), data()[0]
    expected = module(batch["x"])
    dequantize_weights(module)
    assert type(module.up) is nn.Linear
    torch.testing.assert_close(module.double()(batch["x"]), expected, rtol=1e-12, atol=1e-12)


# ---- jobs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a folder with a small model, and a file of conversations beside it."""
    return chat_folder(tmp_path_factory.mktemp("base") / "model")


def job(model, *options):
    files = f"data.files=[{model.parent / 'chats.jsonl'}]"
    sizes = ["train.seq_len=64", "train.global_batch_size=4", "train.steps=3", "train.microbatches=1", "lower.backend=eager", "run.dump_graphs=false"]
    return ["recipe=qlora", f"model.path={model}", "data=text", "data.chat=true", files, *sizes, *options]


@pytest.mark.full
def test_a_job_trains_says_what_is_quantized_and_exports(model, tmp_path, capsys):
    assert call(*job(model, f"run.dir={tmp_path / 'run'}", "eval.prompts=[hi]", "passes.cast.param_dtype=bfloat16")) == 0
    output = capsys.readouterr().out
    assert call("generate", tmp_path / "run", "--chat", "--prompt", "7", "--tokens", "3", "--temperature", "0") == 0
    assert call("eval", tmp_path / "run") == 0
    assert "note: 14 of 15 frozen linear layers are stored in nf4\n" in output
    assert f": llama in {model}, 34,816 of 155,456 parameters trained" in output
    assert call("export", tmp_path / "run", tmp_path / "merged", "--merge") == 0
    assert "are equal: " in capsys.readouterr().out
    assert call("export", tmp_path / "run", tmp_path / "adapter") == 0
    assert "not checked, because it was trained on weights in nf4" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(model)
    state = FORMATS["nf4"].quantize(base.model.layers[1].mlp.up_proj.weight.detach())
    difference = merged.model.layers[1].mlp.up_proj.weight - FORMATS["nf4"].dequantize(state)
    assert 0 < torch.linalg.matrix_rank(difference.detach(), rtol=1e-3) <= 16


def test_random_weights_are_drawn_and_then_quantized(model):
    cfg = validate(to_config(compose(job(model, "model.init=random"))), 1)
    plain = to_config(compose([*job(model, "model.init=random"), "model.quantize=null"]))
    values, weights = (dict(subject(c).initial()) for c in (cfg, plain))
    name = "base_model.model.model.layers.0.mlp.up_proj.base_layer"
    state = FORMATS["nf4"].quantize(weights[f"{name}.weight"][()])
    assert torch.equal(values[f"{name}.quantized.weight.codes"][()], state["codes"]) and f"{name}.weight" not in values


def test_weights_that_are_trained_are_not_quantized(model):
    with pytest.raises(UserError, match="^model.quantize: nf4 stores frozen weights, and without model.lora all are trained; use recipe=qlora, or null$"):
        validate(to_config(compose(job(model, "model.lora=null"))), 1)


def test_rslora_divides_by_the_root_of_the_rank(model):
    cfg = to_config(compose(job(model, "model.lora.rslora=true")))
    layer = subject(cfg).module.base_model.model.model.layers[0].mlp.up_proj
    assert layer.scaling["default"] == cfg.model.lora.alpha / cfg.model.lora.rank**0.5 == 8
