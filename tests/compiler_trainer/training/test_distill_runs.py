"""Runs with a teacher, from a file of conversations to a folder that transformers loads."""

from __future__ import annotations

import json
import math

import pytest
import torch
from commands import call
from doc_places import TEMPLATE, tokenizer
from folders import model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compiler_trainer import checkpoint
from compiler_trainer.models.distill import PREFIX
from compiler_trainer.runs.saved import options_of, trained_model

SMALL = (
    "train.seq_len=64", "train.global_batch_size=4", "train.steps=5", "eval.interval=1", "checkpoint.interval=1", "data.eval_fraction=0.2",
    "optim.lr=3e-3", "lower.backend=eager", "run.dump_graphs=false", "data.cache=cache", "lr_schedule=constant", "lr_schedule.warmup_ratio=0",
)  # fmt: skip
JOB = ("recipe=distill", "model.path=small", "loss.teacher=large", "data=text", "data.files=[chats.jsonl]", "data.chat=true", *SMALL)
LORA = ("model.lora={rank:2,targets:[all-linear]}", "checkpoint.frozen=false")


def save(kind, seed, path):
    torch.manual_seed(seed)
    model(kind).save_pretrained(path)
    tokenizer().save(f"{path}/tokenizer.json")
    with open(f"{path}/tokenizer_config.json", "w") as file:
        file.write('{"eos_token": "<|endoftext|>"}')
    with open(f"{path}/chat_template.jinja", "w") as file:
        file.write(TEMPLATE)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a folder, the current one, with a student, a teacher of another kind, and conversations."""
    monkeypatch.chdir(tmp_path)
    save("qwen3", 0, "small")
    save("llama", 1, "large")
    rows = [{"prompt": f"{i}?", "completion": "Sea." + "!" * (i % 3)} for i in range(30)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def read(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
@pytest.mark.parametrize("options", [(), LORA], ids=["full", "lora"])
def test_a_run_nears_its_teacher_is_resumed_and_exported_without_it(options, place, capsys):
    assert call(*JOB, *options, "run.dir=whole") == 0
    assert call(*JOB, *options, "train.steps=2", "run.dir=parts") == 0
    assert call(*JOB, *options, "checkpoint.resume=latest", "run.dir=parts") == 0
    losses = [[record["loss"] for record in read(place / run)] for run in ("whole", "parts")]
    assert losses[0] == losses[1] and len(losses[0]) == 5 and losses[0][-1] < losses[0][0]
    assert read(place / "whole")[-1]["eval_loss"] < read(place / "whole")[0]["eval_loss"]

    tensors = checkpoint.opened(checkpoint.complete(place / "whole/checkpoints")[-1]).index.tensors
    assert tensors and not any(PREFIX in name for name in tensors)
    capsys.readouterr()
    assert call("eval", "whole") == 0
    line = capsys.readouterr().out
    assert float(line.split()[1].rstrip(",")) == pytest.approx(read(place / "whole")[-1]["eval_loss"], rel=1e-4) and "perplexity" not in line

    assert call("export", "whole", "out", *["--merge"] * bool(options)) == 0
    assert not any("teacher" in name for name in load_file("out/model.safetensors"))
    exported, ids = AutoModelForCausalLM.from_pretrained("out").eval(), torch.randint(4, 260, (1, 9))
    trained, module = trained_model(options_of(place / "whole", []))
    batch = {"tokens": ids, "positions": torch.arange(9)[None], "documents": torch.zeros_like(ids)}
    torch.testing.assert_close(exported(input_ids=ids).logits, trained.logits(module, batch), atol=1e-5, rtol=1e-5)
    assert call("check-export", "whole", "out") == 0
    assert call("generate", "whole", "--prompt", "a", "--tokens", "2") == 0


@pytest.mark.full
def test_samples_while_training_are_of_the_student(place):
    assert call(*JOB, "train.steps=1", "eval.prompts=[a]", "eval.sample_tokens=2", "run.dir=run") == 0
    assert (place / "run/samples.jsonl").read_text().count('"prompt"') == 1


@pytest.mark.full
def test_a_student_that_equals_its_teacher_has_no_loss(place):
    for divergence in ("forward", "reverse"):
        options = ("loss.teacher=small", f"loss.divergence={divergence}", "train.steps=1", "eval.interval=null", "checkpoint.keep_best=0")
        assert call(*JOB, *options, f"run.dir={divergence}") == 0
        (record,) = read(place / divergence)
        assert math.isclose(record["loss"], 0.0, abs_tol=1e-6)


def other_ids(place):
    content = json.loads((place / "large/tokenizer.json").read_text())
    content["model"]["vocab"] = {word: len(content["model"]["vocab"]) - 1 - i for word, i in content["model"]["vocab"].items()}
    (place / "large/tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change, options, message",
    [
        (None, ["loss.teacher=''"], "loss.teacher: names no model; give the folder of a larger model"),
        (None, ["loss.teacher=nowhere"], "loss.teacher: nowhere holds no config.json; name a folder that transformers wrote"),
        (None, ["data.pairs=true"], "data.pairs: true with loss=distill, which compares no answers"),
        (None, ["model.head=score"], "model.head: score has no next tokens to learn"),
        (lambda place: (place / "large/tokenizer.json").unlink(), [], "loss.teacher: large/tokenizer.json is missing, so the token ids"),
        (other_ids, [], "loss.teacher: large has another tokenizer.json than the student; use a teacher of the same family"),
        (lambda place: resize(place / "large"), [], "loss.teacher: large has a vocabulary of 301 tokens, the student one of 300"),
    ],
    ids=["none", "nowhere", "pairs", "head", "no tokenizer", "other ids", "other size"],
)
def test_teachers_that_do_not_fit_are_refused_in_one_line(change, options, message, place, capsys):
    if change:
        change(place)
    assert call(*JOB, *options, "run.dir=run") == 2
    assert message in " ".join(capsys.readouterr().err.split())


def resize(path):
    large = AutoModelForCausalLM.from_pretrained(path)
    large.resize_token_embeddings(301)
    large.save_pretrained(path)
