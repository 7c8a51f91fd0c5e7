"""Answers drawn by a server: its runs are those of a sampler in the process, and each failure is one line."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch
from answer_server import answering
from digits import SEVERAL, arguments, config, run, run_on_two_ranks, taught, write_digits, write_teacher
from short_runs import timeless
from transformers import AutoConfig, AutoModelForCausalLM

import compiler_trainer as ct
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.data.chat import Prompt
from compiler_trainer.models.sampling import Sampling, group
from compiler_trainer.training import rollouts, server, trainer
from compiler_trainer.training.samplers import InProcess, short_seed_of, whole_model
from compiler_trainer.training.server import Server, connect


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(server, "WAITS_S", (0.01, 0.01))


class OneByOne(InProcess):
    """A sampler in this process that draws each answer by itself, with the server's seeds."""

    def __call__(self, step, prompts, before):
        model, drawn = whole_model(self.cfg, self.trained, step), []
        for number, (ids, ends, _) in enumerate(prompts):
            for answer in range(self.loss.group_size):
                seed = short_seed_of(self.cfg.data.seed, before + number, answer)
                drawn += group(model, ids, ends, Sampling(self.loss.answer_tokens, self.loss.temperature, seed=seed), 1)
        return [answer._replace(entropy=-answer.logs.mean(dtype=float)) for answer in drawn]


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_run_with_a_server_equals_one_without(engine, folder, tmp_path, monkeypatch):
    with answering(engine, folder) as stand_in:
        result = run(folder, tmp_path / "served", **SEVERAL, **{"loss.server": f"{stand_in.url}/"})
    assert stand_in.loaded == 2 and len({*stand_in.seeds}) == len(stand_in.seeds) == 160 and max(stand_in.seeds) < 2**31
    assert not (tmp_path / "served/rollout_weights").exists() and max(step["gap"] for step in result) < 1e-6
    monkeypatch.setattr(rollouts, "sampler_of", OneByOne)
    assert timeless(result) == timeless(run(folder, tmp_path / "without", **SEVERAL)) and result[1]["clip_fraction"] > 0
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("served", "without")]
    assert samples[0] == samples[1]


@pytest.mark.full
def test_a_student_of_a_teacher_gets_answers_from_a_server(folder, tmp_path, monkeypatch):
    (tmp_path / "teacher").mkdir()
    options = taught(write_teacher(tmp_path / "teacher", folder))
    with answering("sglang", folder) as stand_in:
        result = run(folder, tmp_path / "served", **options, **{"loss.server": stand_in.url})
        assert stand_in.loaded == 4
    monkeypatch.setattr(rollouts, "sampler_of", OneByOne)
    assert timeless(result) == timeless(run(folder, tmp_path / "without", **options))


@pytest.mark.full
def test_a_run_that_is_killed_and_resumed_equals_one_that_is_not(folder, tmp_path):
    """The server has other weights at the resumed run's start, and the folder of the killed one is still there."""

    class Dies(ct.Callback):
        def on_step(self, run, record):
            if record["step"] == 3:
                raise KeyboardInterrupt

    with answering("vllm", folder) as stand_in:
        served = SEVERAL | {"loss.server": stand_in.url}
        expected = run(folder, tmp_path / "whole", **served)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(config(folder, tmp_path / "parts", **served), callbacks=[Dies()])
    (tmp_path / "parts/rollout_weights").mkdir()
    (tmp_path / "parts/rollout_weights/model.safetensors").write_bytes(b"half")
    with answering("vllm", folder) as stand_in:
        options = served | {"loss.server": stand_in.url, "checkpoint.resume": "latest"}
        result = run(folder, tmp_path / "parts", **options)
        assert stand_in.loaded == 1
    assert timeless(result) == timeless(expected) and len(result) == 4


@pytest.mark.sweep(2)
@pytest.mark.full
@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp"])
def test_two_ranks_with_a_server_equal_one(axis, folder, tmp_path):
    with answering("sglang", folder) as stand_in:
        options = SEVERAL | {"train.microbatches": 2, "loss.server": stand_in.url}
        expected = run(folder, tmp_path / "one", **options)
        before = len(stand_in.seeds)
        result = run_on_two_ranks(folder, tmp_path / "two", **options, **{f"mesh.{axis}": 2})
        assert sorted(stand_in.seeds[:before]) == sorted(stand_in.seeds[before:])
    assert len(result) == len(expected) == 4
    for step, of_one in zip(result, expected, strict=True):
        names = ("reward", "reward_std", "answer_tokens", "cut", "entropy", "loss", "grad_norm", "clip_fraction", "kl")
        assert {name: step[name] for name in names} == pytest.approx({name: of_one[name] for name in names}, abs=1e-5)  # of fp32, in another order
        assert step["gap"] < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("quantize", ["null", "int8"])
def test_adapters_are_merged_into_the_weights_of_the_server(quantize, folder, tmp_path):
    lora = {"model.lora": "{rank:4,targets:[all-linear]}", "model.quantize": quantize, "optim.lr": 0.1}
    with answering("vllm", folder) as stand_in:
        result = run(folder, tmp_path / "run", **lora, **{"loss.server": stand_in.url})
        names = [*stand_in.model.state_dict()]
    assert max(step["gap"] for step in result) < 1e-5 and result[0]["grad_norm"] > 0
    assert names == [*AutoModelForCausalLM.from_pretrained(folder).state_dict()]
    assert len({step["reward"] for step in result}) > 1


def test_adapters_of_a_tied_head_are_refused(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tied = tmp_path / "tied"
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tied)
    for name in ("tokenizer.json", "tokenizer_config.json", "prompts.jsonl"):
        (tied / name).write_bytes((folder / name).read_bytes())
    with answering("vllm", tied) as stand_in:
        options = {"model.lora": "{rank:4,targets:[lm_head]}", "loss.server": stand_in.url}
        with pytest.raises(UserError, match=r"^model.lora.targets: \['lm_head'\] adapts the embedding or the head, which the server ties"):
            run(tied, tmp_path / "run", **options)


# ---- failures ------------------------------------------------------------------------------------------


def test_a_server_with_other_weights_ends_the_run(folder, tmp_path):
    """This one says that it has loaded the weights, and keeps its own."""
    other = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        other.lm_head.weight.mul_(40)
    other.save_pretrained(tmp_path / "other")
    with answering("sglang", tmp_path / "other") as stand_in:
        stand_in.load = lambda folder: None
        with pytest.raises(UserError, match=r"^loss.server: log-probabilities of http\S+ and of the trainer differ by \d.\d\d nats"):
            run(folder, tmp_path / "run", **{"loss.server": stand_in.url})


def test_a_server_of_another_model_ends_the_run(folder, tmp_path):
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 3
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    with answering("vllm", tmp_path / "other") as stand_in:
        with pytest.raises(UserError, match=r"^loss.server: \S+ has not loaded the weights in \S+/rollout_weights \(HTTP 500: .*Missing key.*\); it needs the model"):
            run(folder, tmp_path / "run", **{"loss.server": stand_in.url})


def test_a_server_that_is_not_there_is_refused_before_anything_is_written(folder, tmp_path):
    with answering("vllm", folder) as stand_in:
        url = stand_in.url
    with pytest.raises(UserError, match=rf"^loss.server: {url} does not answer \(.*refused.*\); start vLLM or SGLang there$"):
        run(folder, tmp_path / "run", **{"loss.server": url})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["host:8000", "ftp://host", "http://host:8000/v1", "http://"])
def test_an_address_has_no_path(address, folder, tmp_path):
    with pytest.raises(UserError, match="loss.server: .* must be the address of a server without a path, as http://localhost:8000"):
        to_config(compose(arguments(folder, tmp_path / "run", **{"loss.server": address})))


@pytest.mark.parametrize(
    "reply, message",
    [
        ({"data": [{"owned_by": "openai"}]}, "is a server of openai, whose weights cannot be updated; use vLLM or SGLang"),
        ({"data": []}, r"/v1/models names no model \(list index out of range\); start vLLM or SGLang there"),
        ([], r"/v1/models names no model \(list indices .*\); start vLLM or SGLang there"),
        (b"<html>\nhello</html>", r"/v1/models names no model \(HTTP 200: no JSON: <html> hello</html>\)"),
    ],
    ids=["openai", "none", "list", "html"],
)
def test_other_servers_are_refused(reply, message, folder):
    with answering("vllm", folder, change=lambda path, _: (200, reply)) as stand_in:
        with pytest.raises(UserError, match=f"^loss.server: {stand_in.url}.?{message}") as caught:
            connect(stand_in.url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "engine, status, reply, message",
    [
        ("vllm", 404, {"detail": "Not Found"}, r"\(HTTP 404: Not Found\); start vLLM with VLLM_SERVER_DEV_MODE=1"),
        ("vllm", 500, b"Internal Server Error", r"\(HTTP 500: Internal Server Error\); it needs the model of model.path"),
        ("sglang", 400, {"success": False, "message": "no\nsuch"}, r"\(HTTP 400: no such\); it needs the model of model.path"),
        ("sglang", 200, {"success": False}, r'\(HTTP 200: {"success": false}\); it needs the model of model.path'),
    ],
)
def test_a_server_that_cannot_load_the_weights_ends_the_run(engine, status, reply, message, folder):
    with answering(engine, folder, change=lambda path, usual: (200, usual) if path == "/v1/models" else (status, reply)) as stand_in:
        with pytest.raises(UserError, match=rf"^loss.server: {stand_in.url} has not loaded the weights in {folder} {message}") as caught:
            connect(stand_in.url).load(folder)
    assert "\n" not in str(caught.value)


def without(name):
    """Return a change of replies that leaves out a field of an answer."""

    def change(path, reply):
        for choice in reply.get("choices", ()):
            del choice[name]
        return 200, reply

    return change


def with_value(name, value):
    """Return a change of replies that sets a field of an answer."""

    def change(path, reply):
        for choice in reply.get("choices", ()):
            choice[name] = value
        return 200, reply

    return change


NO_IDS = "gives no answer with token ids and a log-probability of each: .*; use a version of vLLM or SGLang"


@pytest.mark.parametrize(
    "change, message",
    [
        (without("token_ids"), NO_IDS),
        (without("logprobs"), NO_IDS),
        (with_value("token_ids", None), NO_IDS),
        (with_value("token_ids", []), NO_IDS),
        (with_value("token_ids", "1234"), NO_IDS),
        (with_value("token_ids", [3, 4, 5, 6, 7, 8, 9]), NO_IDS),
        (with_value("logprobs", None), NO_IDS),
        (lambda path, reply: (200, {}), NO_IDS),
        (lambda path, reply: (200, []), NO_IDS),
        (with_value("finish_reason", "abort"), r"ends an answer with token \d+ for the reason 'abort', and the model's ends are \[0\]"),
        (lambda path, reply: (400, {"error": {"message": "too long"}}), r"refuses a prompt of 2 tokens \(HTTP 400: too long\)"),
        (lambda path, reply: (400, {"object": "error", "message": "too long"}), r"refuses a prompt of 2 tokens \(HTTP 400: too long\)"),
    ],
)
def test_an_answer_without_ids_or_to_no_end_is_refused(change, message, folder):
    with answering("vllm", folder, change=change) as stand_in:
        with pytest.raises(UserError, match=f"^loss.server: {stand_in.url} {message}") as caught:
            Server(stand_in.url, "vllm").draw([Prompt([5, 1], frozenset({0}))], [Sampling(4, 1.0)])
    assert "\n" not in str(caught.value)


def test_a_server_that_ends_answers_at_other_tokens_is_refused(folder):
    change = with_value("finish_reason", "stop")
    with answering("sglang", folder, change=change) as stand_in:
        with pytest.raises(UserError, match=r"ends an answer with token \d+ for the reason 'stop', and the model's ends are \[11\]"):
            Server(stand_in.url, "sglang").draw([Prompt([5, 1], frozenset({11}))] * 8, [Sampling(2, 1.0, seed=n) for n in range(8)])


@pytest.mark.parametrize("failures, raises", [(2, nullcontext()), (3, pytest.raises(UserError, match=r"refuses a prompt of 2 tokens \(HTTP 503: starting\)"))])
def test_requests_that_fail_for_a_while_are_repeated(failures, raises, folder):
    statuses = [503] * failures + [200] * 9
    with answering("vllm", folder, change=lambda path, reply: (statuses.pop(0), {"detail": "starting"} if len(statuses) > 8 else reply)) as stand_in:
        with raises:
            (answer,) = Server(stand_in.url, "vllm").draw([Prompt([5, 1], frozenset({0}))], [Sampling(4, 1.0)])
            assert len(stand_in.seeds) == failures + 1 and answer.entropy == pytest.approx(-answer.logs.mean(), abs=1e-6)


def test_a_reply_that_takes_too_long_is_one_line(folder, monkeypatch):
    monkeypatch.setattr(server, "PATIENCE_S", 0.2)
    with answering("vllm", folder, change=lambda path, reply: time.sleep(0.5) or (200, reply)) as stand_in:
        with pytest.raises(UserError, match=f"^loss.server: {stand_in.url}/v1/models has not replied after 0 s; look at the server's log"):
            connect(stand_in.url)
