"""Checkpoints with earlier names of tensors are resumed, and their runs are exported."""

from __future__ import annotations

import json
import shutil

import pytest
from chat_folders import chat_folder
from commands import call

from compiler_trainer.step.step import Step


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a folder with a small model, and a file of conversations beside it."""
    return chat_folder(tmp_path_factory.mktemp("base") / "model", layers=1)


def losses(run):
    return [row.get("loss") for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


@pytest.mark.full
@pytest.mark.parametrize(("name", "frozen"), [("nf4", False), pytest.param("nvfp4", True, marks=pytest.mark.full)])
def test_the_state_of_quantized_layers_had_the_names_of_a_layer(name, frozen, model, tmp_path, monkeypatch):
    options = ["train.seq_len=64", "train.global_batch_size=4", "train.steps=4", "train.microbatches=1", "lower.backend=eager", "run.dump_graphs=false"]
    options += ["checkpoint.interval=2", "eval.interval=2", f"model.quantize={name}", f"checkpoint.frozen={frozen}", "model.init=random"]
    run = ["recipe=qlora", f"model.path={model}", "data=text", "data.chat=true", f"data.files=[{model.parent / 'chats.jsonl'}]", f"run.dir={tmp_path / 'run'}", *options]
    tensors, written = Step.tensors, set()

    def with_earlier_names(step):
        names = {name: name.replace(".quantized.weight.", ".") for name in tensors(step)}
        written.update(names.values())
        return {names[name]: placed for name, placed in tensors(step).items()}

    with monkeypatch.context() as patch:
        patch.setattr(Step, "tensors", with_earlier_names)
        assert call(*run) == 0
    expected = losses(tmp_path / "run")
    assert any(n.endswith("up_proj.base_layer.table") for n in written)
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000004")
    assert call("export", tmp_path / "run", tmp_path / "adapter") == 0
    assert call(*run, "checkpoint.resume=latest") == 0
    assert losses(tmp_path / "run") == expected
