"""`chat` sends the whole conversation to the model, and goes on after a message that cannot be answered."""

from __future__ import annotations

import io
import json
import sys

import folders
import pytest
from byte_tokenizer import CHATML, write_tokenizer
from commands import call

from compiler_trainer.cli.verbs import chat
from compiler_trainer.cli.verbs.chat import converse
from compiler_trainer.config.errors import UserError


def typed(monkeypatch, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_each_answer_sees_the_conversation_so_far(monkeypatch, capsys):
    seen = []

    def answer(messages):
        seen.append([(m["role"], m["content"]) for m in messages])
        if messages[-1]["content"] == "long":
            raise UserError("prompt", "has 99 tokens")
        return f"answer {len(seen)}"

    typed(monkeypatch, "a", "", "long", "b", "/new", "c")
    converse(answer, [{"role": "system", "content": "be brief"}])
    system, first = ("system", "be brief"), [("user", "a"), ("assistant", "answer 1")]
    assert seen == [[system, first[0]], [system, *first, ("user", "long")], [system, *first, ("user", "b")], [system, ("user", "c")]]
    printed = capsys.readouterr()
    assert printed.out == "answer 1\nanswer 3\nanswer 4\n"
    assert printed.err == "error: prompt: has 99 tokens; or begin a new conversation with /new\n"


@pytest.fixture
def model(tmp_path):
    """Return a copy of a model folder with a tokenizer that has a chat template."""
    folder = tmp_path / "model"
    folders.model("qwen3").save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|endoftext|>"}))
    return folder


@pytest.mark.full
def test_a_model_answers_as_generate_does_after_a_run(model, tmp_path, monkeypatch, capsys):
    chats = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    chats.write_text("\n".join(json.dumps({"messages": chat}) for _ in range(8)))
    job = ["model=hf", f"model.path={model}", "data=text", "data.chat=true", f"data.files=[{chats}]", "data.eval_fraction=0", "train.steps=1",
           "train.seq_len=64", "train.global_batch_size=2", "eval.interval=null", "lower.backend=eager", f"run.dir={tmp_path / 'run'}"]
    assert call(*job) == 0
    capsys.readouterr()
    assert call("generate", tmp_path / "run", "--chat", "--prompt", "hi", "--tokens", "5", "--temperature", "0") == 0
    expected = capsys.readouterr().out
    typed(monkeypatch, "hi")
    assert call("chat", tmp_path / "run", "--tokens", "5", "--temperature", "0") == 0
    printed = capsys.readouterr()
    assert printed.out == expected and "/new begins a new conversation, Ctrl-D ends" in printed.err
    typed(monkeypatch, "hi", "and?")
    assert call("chat", model, "--tokens", "5") == 0
    assert printed.err.startswith("qwen3 in ")


@pytest.mark.parametrize("path", ["/m/qwen(1)", "/m/a,b", "/m/größe", "/m/it's", "s3://bucket/model", "a{b}", "1e5", "Qwen/Qwen3-0.6B"])
def test_any_path_of_a_model_is_taken_as_it_is(path, monkeypatch):
    paths = []
    monkeypatch.setattr(chat, "at_checkpoint", lambda cfg, which: paths.append(cfg.model.path) or sys.exit(7))
    assert call("chat", path) == 7 and paths == [path]


@pytest.mark.parametrize(("arguments", "line"), [
    (["nothing"], "model.path: nothing holds no config.json; name a folder that transformers wrote"),
    (["nothing", "--ema"], "--ema: nothing is no run folder, and models have no checkpoints; leave it out"),
    (["nothing", "--checkpoint", "best"], "--checkpoint: nothing is no run folder, and models have no checkpoints; leave it out"),
    (["nothing", "--tokens", "0"], "chat: --tokens and --top-k must be at least 1, --temperature 0 or more"),
])
def test_what_cannot_be_talked_to_is_refused(arguments, line, capsys):
    assert call("chat", *arguments) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
