"""DoRA trains lengths and directions of weights: peft's steps on every mesh, from plain and from quantized weights."""

from __future__ import annotations

import json

import pytest
import torch
from commands import call
from folders import model as folder_model
from oracle import trained_alike
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.models.quantized import FORMATS, quantized_in
from compiler_trainer.models.subject import subject


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def adapted():
    """Return layers inside peft's, in fp64, with terms that are not zero."""
    torch.manual_seed(0)
    options = LoraConfig(r=3, lora_alpha=5, use_dora=True, target_modules=["up", "down"])
    module = get_peft_model(Layers(), options).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def error(module, batch):
    return (module(batch["x"]) - batch["y"]).square().mean()


def data(rows=5):
    generator = torch.Generator().manual_seed(2)
    return [{k: torch.randn(rows, 6, 10, dtype=torch.float64, generator=generator) for k in "xy"} for _ in range(3)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_shard": 3}, {"tp": 3, "dp_shard": 2}, {"tp": 2}, {}, {"cp": 2}], ids=str)
def test_steps_are_pefts(mesh):
    module = adapted()
    step = trained_alike(module, error, data(), mesh, {"name": "adamw"})
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert len(trained) == 6 and sum(".lora_magnitude_vector." in name for name in trained) == 2
    assert step.report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("dora") / "model"
    torch.manual_seed(0)
    folder_model("qwen3").save_pretrained(path)
    (path.parent / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"{i} and {i + 1}"}) for i in range(60)))
    return path


def job(folder, *options):
    files = f"data.files=[{folder.parent / 'texts.jsonl'}]"
    sizes = ["train.seq_len=32", "train.global_batch_size=4", "train.steps=3", "train.microbatches=1", "lower.backend=eager", "run.dump_graphs=false"]
    return ["recipe=lora", f"model.path={folder}", "data=text", "data.chat=false", "data.tokenizer=bytes", files, "model.lora.dora=true", *sizes, *options]


@pytest.mark.parametrize("options", [[], ["model.quantize=nf4"], ["model.init=random"]])
def test_lengths_start_as_those_of_the_weights(folder, options):
    trained = subject(to_config(compose(job(folder, *options))))
    values = dict(trained.initial())
    base = "base_model.model.model.layers.1.mlp.down_proj"
    if options == ["model.quantize=nf4"]:
        names = quantized_in(trained.module)[f"{base}.base_layer.weight"].names
        state = {key: values[f"{base}.base_layer.quantized.weight.{key}"][()] for key in names}
        weight = FORMATS["nf4"].dequantize(state)
    else:
        weight = values[f"{base}.base_layer.weight"][()]
    torch.testing.assert_close(values[f"{base}.lora_magnitude_vector.default.weight"][()], weight.float().norm(dim=1))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_lengths_are_those_that_peft_starts_with(kind, tmp_path):
    """GPT-2 stores its weights transposed; an embedding has lengths of another kind."""
    folder_model(kind).save_pretrained(tmp_path)
    targets = "[c_attn,wte]" if kind == "gpt2" else "[q_proj,embed_tokens]"
    sizes = ["recipe=lora", f"model.path={tmp_path}", "data=text", "data.tokenizer=bytes", "model.lora.dora=true", f"model.lora.targets={targets}"]
    trained = subject(to_config(compose(sizes)))
    values = dict(trained.initial())
    module = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), trained.module.peft_config["default"])
    lengths = {name: value for name, value in module.named_parameters() if ".lora_magnitude_vector." in name}
    assert len(lengths) == 3
    for name, value in lengths.items():
        torch.testing.assert_close(values[name][()], value.detach(), msg=name)


@pytest.mark.full
def test_a_job_trains_and_its_exports_are_pefts(folder, tmp_path, capsys):
    assert call(*job(folder, f"run.dir={tmp_path / 'run'}")) == 0
    for number, flags in enumerate((["--merge"], [])):
        assert call("export", tmp_path / "run", tmp_path / str(number), *flags) == 0
        assert "are equal: " in capsys.readouterr().out
    assert json.loads((tmp_path / "1/adapter_config.json").read_text())["use_dora"] is True
