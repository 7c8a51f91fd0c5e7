"""A toy task of answers: asked for a digit, a tiny model should answer it four times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from short_runs import metrics as records
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.training import trainer

DIGITS = "0123456789"


def correct(records, answers):
    """Return the share of four places that have the digit asked for."""
    return [answer.count(record["digit"]) / 4 for record, answer in zip(records, answers, strict=True)]


def short(records, answers):
    return [float(len(answer) < 4) for answer in answers]


def none_at_all(records, answers):
    return []


def write_digits(folder):
    """Write a tiny model with random weights, whose tokens are digits, and a prompt for each digit; return the folder."""
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(("<end>", ":", *DIGITS))}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = LlamaConfig(vocab_size=12, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=0, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    lines = [json.dumps({"prompt": f"{digit}:", "digit": digit}) + "\n" for digit in DIGITS]
    (folder / "prompts.jsonl").write_text("".join(lines))
    return folder


def arguments(folder, run, steps=4, **options):
    """Return the options of a run on the digits, as a command line has them."""
    defaults = {
        "recipe": "grpo",
        "model.path": folder,
        "data.prompts": f"[{folder}/prompts.jsonl]",
        "rewards": f"[{__name__}.correct]",
        "data.chat": "false",
        "loss.answer_tokens": 4,
        "train.seq_len": 8,
        "train.global_batch_size": 40,
        "train.microbatches": 1,
        "train.steps": steps,
        "optim.lr": 1e-2,
        "lower.backend": "eager",
        "checkpoint.interval": 2,
        "run.dump_graphs": "false",
        "run.dir": run,
    }
    return [f"{name}={value}" for name, value in (defaults | options).items()]


def config(*args, **options):
    return to_config(compose(arguments(*args, **options)))


def run(*args, **options):
    """Train in this process; return the records of its steps."""
    cfg = config(*args, **options)
    trainer.train(cfg)
    return records(cfg.run.dir)


SEVERAL = {"loss.steps_per_rollout": 2, "loss.beta": 0.1, "optim.lr": 3e-2}


def run_on_two_ranks(*args, **options):
    """Train in two processes; return the records of the steps."""
    given = arguments(*args, **options)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-m", "compiler_trainer", "launch", "-n", "2", *given]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return records(to_config(compose(given)).run.dir)


def write_teacher(folder, student):
    """Write a wider model with the student's tokenizer, whose answers are far from even; return the folder."""
    config = LlamaConfig.from_pretrained(student, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((student / name).read_bytes())
    return folder


def taught(teacher):
    """Return the options of a run that learns from a teacher's distributions of its own answers."""
    return {"recipe": "gkd", "rewards": "[]", "loss.teacher": teacher}
