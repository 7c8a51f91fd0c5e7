"""A model of 16 bits has in float32 what transformers keeps so: in exports, from folders, and in graphs."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compiler_trainer.capture.capture import capture
from compiler_trainer.config.schema import Config, FolderConfig, TrainConfig
from compiler_trainer.models.float8 import to_float8
from compiler_trainer.models.shrunk import shrunk
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import subject
from compiler_trainer.models.weights import stored_in
from compiler_trainer.runs.export import write_folder
from passes.ir import ir

GATE = "model.layers.1.mlp.gate"
WIDE = {  # model type -> names of tensors in float32
    "deepseek_v3": {f"{GATE}.e_score_correction_bias"},
    "ernie4_5_moe": {f"{GATE}.weight", "model.layers.1.mlp.moe_statics.e_score_correction_bias"},
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return folders of small models by type, with values that bfloat16 does not have."""
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(shrunk(transformers.AutoConfig.for_model(kind)), dtype=torch.float32)
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    tensor.copy_(0.3 * torch.randn(tensor.shape) + (5 if "correction" in name else 0))
            model.save_pretrained(made[kind])
        return made[kind]

    return folder


def same(folder, expected):
    """Assert that two folders have the same tensors; return the names of those in float32."""
    tensors, theirs = stored_in(folder), stored_in(expected)
    assert tensors.keys() == theirs.keys()
    for name, value in tensors.items():
        assert value.dtype == theirs[name].dtype and torch.equal(value[()], theirs[name][()]), name
    return {name for name, value in tensors.items() if value.dtype == torch.float32}


@pytest.mark.parametrize("kind", WIDE)
def test_exports_are_those_of_transformers(published, kind, tmp_path):
    path, ours, theirs = published(kind), tmp_path / "ours", tmp_path / "theirs"
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(theirs)
    cfg = Config(model=FolderConfig(str(path)))
    trained = subject(cfg)
    write_folder(cfg, fill(trained.module, ((name, value[()]) for name, value in trained.initial())), ours, torch.bfloat16, merge=False)
    assert same(ours, theirs) == WIDE[kind]
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).save_pretrained(tmp_path / "narrow")
    to_float8(tmp_path / "narrow")
    tensors, exact = load_file(tmp_path / "narrow/model.safetensors"), load_file(path / "model.safetensors")
    assert {name for name, value in tensors.items() if value.dtype == torch.float32} == WIDE[kind]
    assert all(torch.equal(tensors[name], exact[name]) for name in WIDE[kind])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_folders_and_graphs_have_the_parameters_of_transformers(published, dtype):
    path = published("ernie4_5_moe")
    trained = subject(Config(model=FolderConfig(str(path)), train=TrainConfig(dtype=dtype)))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    assert {name: p.dtype for name, p in trained.module.named_parameters()} == {name: p.dtype for name, p in theirs.named_parameters()}
    tokens = torch.arange(24).view(2, 12)
    batch = {"tokens": tokens, "labels": tokens, "positions": tokens % 12, "documents": tokens // 12}
    program, _ = capture(trained.module, trained.loss, batch, torch.device("cpu"), torch.bfloat16)
    used = {i.name: ir.example(node).dtype for i, node in zip(program.inputs, program.placeholders()) if i.kind in ir.WEIGHTS}
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    assert used == {name: p.dtype for name, p in expected.named_parameters() if name in used} and used[f"{GATE}.weight"] == torch.float32
