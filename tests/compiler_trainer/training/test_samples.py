"""Samples during training equal those of `generate` on the same checkpoint, on every mesh, and do not affect it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import folders
import pytest
import torch
from oracle import batches, compile_lockstep, llama, llama_loss
from short_runs import FakeStep, options, resuming, timeless
from short_runs import metrics as records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import FolderConfig
from compiler_trainer.data.tokenizers import ByteTokenizer
from compiler_trainer.models.sampling import Sampling, continued, in_use
from compiler_trainer.runs.saved import trained_model
from compiler_trainer.training import trainer
from compiler_trainer.training.evaluate import on_rank_0

PROMPTS = ("def f", "The sea")
FOLDER = FolderConfig(path=str(folders.folder("llama")))


def sampling(cfg, prompts=PROMPTS):
    """Return a run that samples, and changes its weights noticeably."""
    return replace(cfg, eval=replace(cfg.eval, prompts=prompts, sample_tokens=5), optim=replace(cfg.optim, lr=0.3))


def lines(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [options("x").model, FOLDER], ids=["decoder", "folder"])
def test_a_line_an_evaluation_with_what_the_weights_of_that_step_add(model, tmp_path, capsys):
    cfg = sampling(options(tmp_path / "run", model=model))
    trainer.train(cfg)
    output = capsys.readouterr().out
    result, tokenizer = lines(tmp_path / "run"), ByteTokenizer()
    assert [line["step"] for line in result] == [4, 6] and result[0]["samples"] != result[1]["samples"]
    of_last, trained = trained_model(cfg)
    trained = in_use(cfg, trained, torch.device("cpu"))
    for sample, prompt in zip(result[-1]["samples"], PROMPTS, strict=True):
        ids = continued(cfg, of_last, trained, list(prompt.encode()), {256}, Sampling(5))
        assert sample == {"prompt": prompt, "text": tokenizer.decode(ids)}
        assert f"sample at step 6: {json.dumps(sample, ensure_ascii=False)}\n" in output
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    shown = [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors("sample/1/text_summary")]
    assert shown == [(line["step"], json.dumps(line["samples"][1], ensure_ascii=False)) for line in result]
    trainer.train(replace(cfg, eval=replace(cfg.eval, prompts=()), run=replace(cfg.run, dir=str(tmp_path / "without"))))
    assert timeless(records(tmp_path / "run")) == timeless(records(tmp_path / "without"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"cp": 2, "dp_replicate": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_the_model_is_put_together_on_any_mesh(mesh):
    model = llama(n_layers=2)
    step = compile_lockstep(model, llama_loss, batches(rows=4)[0], mesh, **({"microbatches": 2} if "pp" in mesh else {}))
    result = on_rank_0(step, 0)
    assert result.keys() == {*dict(model.named_parameters()), *(name for name in result if name in dict(model.named_buffers()))}
    assert all(torch.equal(result[name], parameter) for name, parameter in model.named_parameters())
    assert on_rank_0(step, 1) == {}


def test_a_run_that_goes_on_has_each_line_once(tmp_path):
    cfg = sampling(options(tmp_path / "run"))
    trainer.train(cfg)
    before = lines(tmp_path / "run")
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"run/checkpoints/step_0000000{step}")
    trainer.train(resuming(cfg, "latest"))
    assert lines(tmp_path / "run") == before and len(before) == 2


@pytest.mark.parametrize(("change", "message"), [
    ({"eval": {"interval": None}}, "^eval.prompts: .*eval.interval=null has none"),
    ({"data": {"name": "custom", "_target_": "x.Y"}}, "^eval.prompts: .*data=custom has no tokenizer"),
    ({"data": {"tokenizer": "nowhere.json"}}, "nowhere.json: no such file"),
])
def test_what_cannot_be_sampled_is_refused_before_anything_is_written(change, message, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "compile_step", FakeStep)
    cfg = sampling(options(tmp_path / "run"))
    cfg = replace(cfg, **{group: replace(getattr(cfg, group), **values) for group, values in change.items()})
    with pytest.raises(UserError, match=message):
        trainer.train(cfg)
    assert not (tmp_path / "run").exists()


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"^prompt: has 64 tokens, but the model has 64 positions \(max_position"):
        trainer.train(sampling(options(tmp_path / "run", model=FOLDER), prompts=(64 * "a",)))
    assert not (tmp_path / "run").exists()
