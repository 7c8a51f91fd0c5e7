"""On-policy distillation: a student learns a teacher's distributions of the answers that the student draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from commands import call
from digits import arguments, config, run, run_on_two_ranks, taught, write_digits, write_teacher
from short_runs import metrics as records
from short_runs import timeless
from transformers import AutoModelForCausalLM

import compiler_trainer as ct
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.planning.dry import dry_run
from compiler_trainer.training import trainer
from compiler_trainer.training.rollouts import Answers

SGD = {"optim": "sgd", "optim.momentum": 0, "optim.max_norm": "null", "optim.lr": 0.3, "lr_schedule": "constant", "lr_schedule.warmup_ratio": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def teacher(folder, tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher"), folder)


def read(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generalized_jsd(student, teacher, labels, temperature, beta):
    """Return the loss of TRL 1.16, `GKDTrainer.generalized_jsd_loss`, at its ends: beta is 0 or 1."""
    student, teacher = ((logits / temperature).log_softmax(-1) for logits in (student, teacher))
    first, second = (student, teacher) if beta == 0 else (teacher, student)
    return F.kl_div(first, second, reduction="none", log_target=True)[labels != -100].sum() / (labels != -100).sum()


@pytest.mark.sample(1)
@pytest.mark.full
@pytest.mark.parametrize("divergence, temperature, steps", [("reverse", 1.0, 1), ("forward", 0.7, 2)])
def test_the_loss_is_that_of_a_plain_loop_over_the_same_answers(divergence, temperature, steps, folder, teacher, tmp_path, monkeypatch):
    batches, rollout = [], Answers.rollout

    def noted(self, *args):
        for drawn in rollout(self, *args):
            batches.append(drawn.batch)
            yield drawn

    monkeypatch.setattr(Answers, "rollout", noted)
    options = taught(teacher) | SGD | {"loss.divergence": divergence, "loss.temperature": temperature, "loss.steps_per_rollout": steps}
    result = run(folder, tmp_path / "run", **options)
    student, fixed = read(folder), read(teacher)
    assert len(result) == len(batches) == 4 and all(batch.keys() == {"tokens", "labels", "positions", "documents"} for batch in batches)
    for step, batch in zip(result, batches, strict=True):
        with torch.no_grad():
            theirs = fixed(batch["tokens"]).logits
        ours = student(batch["tokens"]).logits
        loss = temperature**2 * generalized_jsd(ours, theirs, batch["labels"], temperature, float(divergence == "reverse"))
        assert step["loss"] == pytest.approx(loss.item(), rel=2e-5)
        student.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in student.parameters():
                parameter -= 0.3 * parameter.grad
    assert call("export", tmp_path / "run", tmp_path / "out") == 0
    for name, value in read(tmp_path / "out").state_dict().items():
        torch.testing.assert_close(value, student.state_dict()[name], rtol=1e-4, atol=2e-6)


@pytest.mark.full
def test_the_student_comes_near_and_the_teacher_stays(folder, teacher, tmp_path):
    class Compares(ct.Callback):
        def on_stop(self, run):
            for name, value in read(teacher).state_dict().items():
                assert torch.equal(run.step.whole(f"model.teacher.model.{name}"), value)

    cfg = config(folder, tmp_path / "run", 60, **taught(teacher))
    trainer.train(cfg, callbacks=[Compares()])
    steps = records(tmp_path / "run")
    assert steps[-1]["loss"] < 0.3 * steps[0]["loss"] and steps[-1]["entropy"] < steps[0]["entropy"]
    assert "reward" not in steps[0] and "gap" not in steps[0] and steps[0]["answer_tokens"] > 1
    assert call("export", tmp_path / "run", tmp_path / "out") == 0  # compares log-probabilities
    assert '"reward"' not in (tmp_path / "run/samples.jsonl").read_text()


@pytest.mark.full
def test_a_run_that_is_killed_and_resumed_equals_one_that_is_not(folder, teacher, tmp_path):
    class Dies(ct.Callback):
        def on_step(self, run, record):
            if record["step"] == 3:
                raise KeyboardInterrupt

    options = taught(teacher) | {"loss.steps_per_rollout": 2}
    expected = run(folder, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(config(folder, tmp_path / "parts", **options), callbacks=[Dies()])
    result = run(folder, tmp_path / "parts", **options, **{"checkpoint.resume": "latest"})
    assert timeless(result) == timeless(expected) and len(result) == 4


@pytest.mark.full
@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp"])
def test_two_ranks_equal_one(axis, folder, teacher, tmp_path):
    options = taught(teacher) | {"train.microbatches": 2, "loss.group_size": 2}
    expected = run(folder, tmp_path / "one", **options)
    result = run_on_two_ranks(folder, tmp_path / "two", **options, **{f"mesh.{axis}": 2})
    assert len(result) == len(expected) == 4
    for step, of_one in zip(result, expected, strict=True):
        names = ("answer_tokens", "cut", "entropy", "loss", "grad_norm")
        assert {name: step[name] for name in names} == pytest.approx({name: of_one[name] for name in names}, abs=3e-6)


@pytest.mark.full
def test_a_student_with_adapters_learns(folder, teacher, tmp_path):
    steps = run(folder, tmp_path / "run", 20, **taught(teacher), **{"model.lora": "{rank:4,targets:[all-linear]}"})
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]


@pytest.mark.full
def test_a_dry_run_counts_the_teacher(folder, teacher, tmp_path):
    options = taught(teacher) | {"cluster": "h100", "cluster.gpus": 2, "mesh.dp_shard": 2}
    cfg = resolve_auto(config(folder, tmp_path / "run", **options), on_gpu=True)
    report = dry_run(replace(cfg, run=replace(cfg.run, dry=True)))
    assert report["prediction"]["memory"]["fits"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss.teacher": "''"}, "loss.teacher: names no model; give the folder of a larger model"),
        ({"rewards": "[digits.correct]"}, r"rewards: \('digits.correct',\) with loss=gkd; loss=grpo needs functions .*, other losses none"),
        ({"data": "text", "data.prompts": "[]", "data.files": "[a.jsonl]"}, "loss: gkd with data=text; grpo and gkd go with data=prompts, other losses with other data"),
        ({"loss.group_size": 3}, "train.global_batch_size: 40 answers are not groups of loss.group_size=3; use a multiple"),
        ({"loss.divergence": "both"}, "loss.divergence: .*both"),
        ({"run.elastic": "true"}, "run.elastic: true with loss=gkd, which does not go on without a rank"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_before_anything_is_written(options, message, folder, teacher, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        trainer.train(to_config(compose(arguments(folder, tmp_path / "run", **taught(teacher) | options))))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
