"""Answers drawn while training: rewards rise, sampler and trainer agree, and neither ranks nor interruptions matter."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from byte_tokenizer import write_tokenizer
from commands import call
from digits import SEVERAL, arguments, config, correct, run, run_on_two_ranks, write_digits
from short_runs import metrics as records
from short_runs import timeless
from transformers import AutoModelForCausalLM

import compiler_trainer as ct
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import GrpoConfig
from compiler_trainer.data.datasets import datasets_of
from compiler_trainer.data.tokenizers import build_tokenizer
from compiler_trainer.models.sampling import Sampling, group
from compiler_trainer.planning.dry import dry_run
from compiler_trainer.training import trainer
from compiler_trainer.training.rollouts import advantages, checked
from compiler_trainer.training.samplers import seed_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.mark.full
def test_the_reward_rises_and_answers_are_shown(folder, tmp_path):
    steps = run(folder, tmp_path / "run", 40, **{"train.global_batch_size": 80})
    assert steps[0]["reward"] < 0.1 and np.mean([step["reward"] for step in steps[-5:]]) > 0.4
    assert steps[-1]["entropy"] < steps[0]["entropy"] == pytest.approx(np.log(12), abs=0.05)
    assert max(step["gap"] for step in steps) < 1e-6
    line = json.loads((tmp_path / "run/samples.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 40 and len(line["samples"]) == 8
    for sample in line["samples"]:
        assert sample["reward"] == sample["text"].count(sample["prompt"][0]) / 4
    assert call("export", tmp_path / "run", tmp_path / "out") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generate(torch.tensor([[9, 1]]), max_new_tokens=4, do_sample=False)[0, 2:].tolist().count(9) >= 3  # "7:"


def test_the_sampler_and_the_trainer_agree_and_the_first_step_has_no_divergence(folder, tmp_path):
    first, second, third, fourth = run(folder, tmp_path / "run", **SEVERAL)
    assert all(step["gap"] < 1e-6 for step in (first, second, third, fourth))
    assert first["kl"] == first["clip_fraction"] == third["clip_fraction"] == 0
    assert second["clip_fraction"] > 0.05 and second["kl"] > 1e-3 and fourth["clip_fraction"] > 0.05


@pytest.mark.full
def test_a_run_that_is_resumed_equals_one_that_is_not(folder, tmp_path):
    """A stop within a rollout ends the run after the rollout."""
    expected = run(folder, tmp_path / "whole", **SEVERAL)

    class Stops(ct.Callback):
        def on_step(self, run, record):
            run.stop("the test asks")

    trainer.train(config(folder, tmp_path / "parts", **SEVERAL), callbacks=[Stops()])
    assert len(records(tmp_path / "parts")) == 2
    result = run(folder, tmp_path / "parts", **SEVERAL, **{"checkpoint.resume": "latest"})
    assert timeless(result) == timeless(expected) and len(result) == 4
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("parts", "whole")]
    assert samples[0] == samples[1]


@pytest.mark.full
@pytest.mark.parametrize("axis", ["dp_shard", "tp", "cp", "pp"])
def test_two_ranks_equal_one(axis, folder, tmp_path):
    options = SEVERAL | {"train.microbatches": 2}
    expected = run(folder, tmp_path / "one", **options)
    result = run_on_two_ranks(folder, tmp_path / "two", **options, **{f"mesh.{axis}": 2})
    assert len(result) == len(expected) == 4
    for step, of_one in zip(result, expected, strict=True):
        names = ("reward", "reward_std", "answer_tokens", "cut", "entropy", "loss", "grad_norm", "clip_fraction", "kl")
        assert {name: step[name] for name in names} == pytest.approx({name: of_one[name] for name in names}, abs=3e-6)
        assert step["gap"] < 1e-6


@pytest.mark.full
def test_several_rewards_are_added_and_shown(folder, tmp_path):
    step, _ = run(folder, tmp_path / "run", "1epochs", rewards="[digits.correct,digits.short]")  # of 5 prompts each
    parts = [step[f"reward/digits.{name}"] for name in ("correct", "short")]
    assert step["reward"] == pytest.approx(sum(parts)) and parts[1] == pytest.approx(1 - step["cut"])


@pytest.mark.full
def test_a_dry_run_predicts_the_step(folder, tmp_path):
    cfg = resolve_auto(config(folder, tmp_path / "run", **SEVERAL, **{"cluster": "h100", "cluster.gpus": 2, "mesh.dp_shard": 2}), on_gpu=True)
    report = dry_run(replace(cfg, run=replace(cfg.run, dry=True)))
    assert report["prediction"]["memory"]["fits"]


@pytest.mark.full
def test_lora_trains_on_rollouts_from_python(folder, tmp_path):
    own = ct.Trainer(
        {"path": str(folder), "lora": {"rank": 2, "targets": ["all-linear"]}},
        {"name": "grpo", "answer_tokens": 4, "beta": 0.1},
        {"name": "prompts", "prompts": [str(folder / "prompts.jsonl")], "tokenizer": str(folder / "tokenizer.json"), "eval_fraction": 0.0},
        rewards=[correct],
        train={"steps": 2, "seq_len": 8, "global_batch_size": 16},
        eval={"interval": None},
        lower={"backend": "eager"},
        run={"dir": str(tmp_path / "run"), "dump_graphs": False},
    )
    own.train()
    first, second = records(tmp_path / "run")
    assert first["kl"] == 0 < second["kl"] and max(first["gap"], second["gap"]) < 1e-6
    with pytest.raises(UserError, match="rewards: .*<lambda> is not found by that name; define the function at the top"):
        ct.Trainer(rewards=[lambda records, answers: []])


# ---- parts of a rollout ---------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_drawn_tokens_up_to_the_end(folder):
    """Whatever generation_config.json says."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.update(repetition_penalty=5.0, top_k=3, min_p=0.2, suppress_tokens=[4])
    drawn = group(model, [5, 1], {0, 2, 3}, Sampling(6, 0.7, seed=1), 20)
    assert len({tuple(answer.ids) for answer in drawn}) > 10 and {answer.ended for answer in drawn} == {True, False}
    for answer in drawn:
        assert answer.ended == (answer.ids[-1] in (0, 2, 3)) and not {0, 2, 3} & set(answer.ids[:-1])
        assert answer.ended or len(answer.ids) == 6
        logs = (model(torch.tensor([[5, 1, *answer.ids]])).logits[0, 1:-1].double() / 0.7).log_softmax(-1)
        expected = logs[range(len(answer.ids)), answer.ids].tolist()
        assert answer.logs.tolist() == pytest.approx(expected, abs=1e-5)
        assert answer.entropy == pytest.approx(-(logs.exp() * logs).sum(-1).mean().item(), abs=1e-5)
    again = group(model, [5, 1], {0, 2, 3}, Sampling(6, 0.7, seed=1), 20)
    assert [answer.ids for answer in again] == [answer.ids for answer in drawn]
    assert len({seed_of(seed, number) for seed in range(3) for number in range(50)}) == 150


def test_advantages_are_rewards_compared_within_their_group():
    rewards = np.array([1.0, 0, 0, 3, 5, 5, 5, 5])
    scaled, plain = (advantages(GrpoConfig("grpo", group_size=4, scale_rewards=scale), rewards) for scale in (True, False))
    assert plain.tolist() == [0, -1, -1, 2, 0, 0, 0, 0]
    assert scaled == pytest.approx(plain / (np.sqrt(2) + 1e-4))  # standard deviation as TRL has it, of 4 - 1 answers


def test_prompts_are_rendered_by_the_template_and_records_keep_their_fields(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "1+1?", "system": "Be brief.", "answer": 2}\n{"prompt": [{"role": "user", "content": "2?"}], "answer": [4]}\n'
    )
    options = {"data.prompts": f"[{tmp_path}/a.jsonl]", "data.chat": "true", "data.tokenizer": tmp_path / "tokenizer.json"}
    options |= {"train.seq_len": 200, "model.attention": "causal"}
    loader = datasets_of(config(tmp_path, tmp_path / "run", **options)).train
    (rows,) = loader.rows.parts
    assert [record["answer"] for record in rows.records] == [2, [4]]
    tokenizer = build_tokenizer(str(tmp_path / "tokenizer.json"))
    texts = ["".join(map(tokenizer.name_of, prompt.ids)) for prompt in rows.prompts]
    system, asked = "<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [system + asked.format("1+1?"), asked.format("2?")]


@pytest.mark.parametrize(
    "name, message",
    [
        ("none_at_all", "returns 0 rewards for 40 answers; it must be one for each"),
        ("missing", r"\w+ has no missing$"),
    ],
)
def test_bad_rewards_end_the_run_in_a_line(name, message, folder, tmp_path):
    with pytest.raises(UserError, match=f"^rewards=digits.{name}: {message}") as caught:
        run(folder, tmp_path / "run", 1, rewards=f"[digits.{name}]")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "rewards, message",
    [
        (None, "returns NoneType: .*; it must be a list of numbers"),
        (["good", 1], "returns list: could not convert string to float: 'good'; it must be a list of numbers"),
        ([1.0], "returns 1 rewards for 2 answers; it must be one for each"),
        ([1.0, float("nan")], 'returns nan for the answer "b"; rewards must be finite'),
        ([float("-inf"), 0], 'returns -inf for the answer "a"; rewards must be finite'),
    ],
)
def test_a_reward_is_a_number_for_each_answer(rewards, message):
    with pytest.raises(UserError, match=f"^rewards=my.f: {message}"):
        checked("my.f", rewards, ["a", "b"])
    assert checked("my.f", (True, 2), ["a", "b"]).tolist() == [1, 2]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rewards": "[]"}, r"rewards: \(\) with loss=grpo; loss=grpo needs functions of \(records, answers\)"),
        ({"data": "text", "data.prompts": "[]", "data.files": "[a.jsonl]"}, "loss: grpo with data=text; grpo and gkd go with data=prompts"),
        ({"recipe": "finetune", "data": "prompts", "loss.answer_tokens": None, "rewards": "[]"}, "loss: cross_entropy with data=prompts; grpo and gkd go with data=prompts"),
        ({"data.prompts": "[]"}, r"data.prompts: \(\) with data=prompts; data=prompts needs some"),
        ({"train.global_batch_size": 44}, "train.global_batch_size: 44 answers are not groups of loss.group_size=8; use a multiple"),
        ({"loss.answer_tokens": 8}, "loss.answer_tokens: 8 leaves no room for a prompt in train.seq_len=8"),
        ({"loss.answer_tokens": 7}, r"prompts.jsonl:1: has a prompt of 2 tokens; train.seq_len=8 and loss.answer_tokens=7 leave 1"),
        ({"loss.group_size": 1}, "loss.group_size: 1 must be at least 2"),
        ({"loss.steps_per_rollout": 3}, "checkpoint.interval: 2 is not a multiple of loss.steps_per_rollout=3"),
        ({"loss.steps_per_rollout": 3, "checkpoint.interval": 3}, "train.steps: 4 is not a multiple of loss.steps_per_rollout=3"),
        ({"train.steps": "1Mtokens"}, "train.steps: 1Mtokens counts tokens of answers, not drawn yet; give steps or epochs"),
        ({"data.eval_fraction": 0.1}, r"data.eval_fraction: 0.1 \(or data.validation\); loss=grpo has no validation loss"),
        ({"eval.interval": 2}, "eval.interval: 2, but data.eval_fraction=0 leaves no validation data"),
        ({"data.bad_records": "skip"}, "data.bad_records: skip with data=prompts"),
        ({"data.pairs": "true", "data.chat": "true"}, "data.pairs: true with loss=grpo"),
        ({"run.elastic": "true"}, "run.elastic: true with loss=grpo"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_before_anything_is_written(options, message, folder, tmp_path):
    given = {name: value for name, value in options.items() if value is not None}
    args = [a for a in arguments(folder, tmp_path / "run", **given) if a.partition("=")[0] not in {n for n, v in options.items() if v is None}]
    with pytest.raises(UserError, match=message) as caught:
        trainer.train(to_config(compose(args)))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_a_model_without_transformers_generate_is_refused(folder, tmp_path):
    module = torch.nn.Sequential(torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12))
    cfg = config(folder, tmp_path / "run")
    data = {"name": "prompts", "prompts": list(cfg.data.prompts), "tokenizer": cfg.data.tokenizer, "eval_fraction": 0.0}
    options = {"eval": {"interval": None}, "train": {"seq_len": 8, "global_batch_size": 8}, "run": {"dir": str(tmp_path / "run")}}
    own = ct.Trainer(module, {"name": "grpo", "answer_tokens": 4}, data, rewards=[correct], **options)
    with pytest.raises(UserError, match="loss.name: grpo draws answers with transformers' model, but model: is a module of your own"):
        own.train()


def test_prompts_that_are_none_are_refused_by_their_line(folder, tmp_path):
    for content, message in (('{"digit": 3}\n', 'a.jsonl:1: has no field "prompt"'), ('{"prompt": 3}\n', 'a.jsonl:1: field "prompt" is int'), ("\n", "data.prompts: .*a.jsonl has no record")):
        (tmp_path / "a.jsonl").write_text(content)
        cfg = config(folder, tmp_path / "run", **{"data.prompts": f"[{tmp_path}/a.jsonl]"})
        with pytest.raises(UserError, match=message):
            datasets_of(cfg)
