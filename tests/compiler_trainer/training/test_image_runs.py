"""Conversations with images, from the command to an exported folder that answers about an image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers as tf
from commands import call
from short_runs import options
from vision_folders import picture, vision_folder

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import for_predicting
from compiler_trainer.config.schema import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    FolderConfig,
    LoraConfig,
    MeshConfig,
    TrainConfig,
)
from compiler_trainer.models.processor import processor_of
from compiler_trainer.planning.compiled import compile_setting
from compiler_trainer.runs.export import export
from compiler_trainer.training import trainer
from compiler_trainer.training.metrics import read

pytestmark = pytest.mark.full  # about a minute each
ROOT = Path(__file__).parents[3]


def records(tmp_path, count=8):
    """Write images, and return conversations about them; one in four has none."""
    made = []
    for number in range(count):
        (tmp_path / f"{number}.png").write_bytes(picture(number, (20 + 4 * number, 18)))
        parts = [{"type": "image", "path": f"{number}.png"}] if number % 4 else []
        parts.append({"type": "text", "text": f"what is {number}?"})
        answer = [{"type": "text", "text": f"it is {number * number}"}]
        made.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]})
    return made


def config(tmp_path, kind="llava", name="chats.jsonl", steps=4, **changes):
    """Return a run on images from a file of records, or from a table with their bytes."""
    made, file = records(tmp_path), tmp_path / name
    if name.endswith(".parquet"):
        for number, record in enumerate(made):
            has_image = len(record["messages"][0]["content"]) > 1
            record["images"] = [{"bytes": picture(number, (20 + 4 * number, 18)), "path": None}] if has_image else []
            record["messages"][0]["content"] = [{k: v for k, v in p.items() if k != "path"} for p in record["messages"][0]["content"]]
        pq.write_table(pa.Table.from_pylist(made), file)
    else:
        file.write_text("\n".join(map(json.dumps, made)))
    folder = vision_folder(kind)
    image_tokens = 60 if kind == "qwen2_vl" else None
    data = DataConfig(name="text", files=(str(file),), chat=True, images_per_row=2, eval_fraction=0.0,
                      image_tokens_per_row=image_tokens, tokenizer=str(folder / "tokenizer.json"), cache=str(tmp_path / "cache"))
    return options(
        tmp_path / f"run-{name}", steps, data=data, model=FolderConfig(path=str(folder)),
        train=TrainConfig(steps=steps, seq_len=128, global_batch_size=2), mesh=MeshConfig(dp_shard=1),
        eval=EvalConfig(interval=None), checkpoint=CheckpointConfig(interval=2, keep=9), **changes,
    )


def losses(cfg):
    return [record["loss"] for record in read(Path(cfg.run.dir) / "metrics.jsonl") if "loss" in record]


def answer(folder, tmp_path):
    """Return the ids that transformers generates about an image."""
    processor = processor_of(str(folder), None)
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    model = tf.AutoModelForImageTextToText.from_pretrained(folder).eval()
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is 1?"}]}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor.inputs(text, [picture(1)])
    return model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_a_run_from_a_table_has_the_losses_of_one_from_files_and_resumes(kind, tmp_path):
    from_files, from_table = config(tmp_path, kind), config(tmp_path, kind, name="chats.parquet")
    for cfg in (from_files, from_table):
        trainer.train(cfg)
    assert losses(from_files) == losses(from_table) and losses(from_files)[-1] < losses(from_files)[0]
    half = replace(from_files, run=replace(from_files.run, dir=str(tmp_path / "half")), train=replace(from_files.train, steps=2))
    trainer.train(half)
    rest = replace(from_files, run=half.run, checkpoint=replace(from_files.checkpoint, resume="auto"))
    trainer.train(rest)
    assert losses(rest) == losses(from_files)


@pytest.mark.parametrize("kind, parts", [("idefics3", ("vision_model", "connector")), ("qwen2_vl", ("visual.",))])
def test_an_export_answers_about_an_image(kind, parts, tmp_path, capsys):
    cfg = config(tmp_path, kind, steps=2)
    trainer.train(cfg)
    sentence = export(cfg, tmp_path / "out", None, merge=False, check=True)
    assert "AutoModelForImageTextToText" in sentence and "are equal" in sentence
    assert len(answer(tmp_path / "out", tmp_path)) > 0
    (tmp_path / "1.png").write_bytes(picture(1))
    asked = ["--chat", "--image", tmp_path / "1.png", "--prompt", "what is 1?", "--tokens", "3", "--temperature", "0"]
    capsys.readouterr()
    assert call("generate", cfg.run.dir, *asked) == 0
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert capsys.readouterr().out == tokenizer.decode(answer(tmp_path / "out", tmp_path), skip_special_tokens=True) + "\n"
    trained = tf.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    before = tf.AutoModelForImageTextToText.from_pretrained(vision_folder(kind))
    changed = [n for (n, a), b in zip(trained.named_parameters(), before.parameters()) if not torch.equal(a, b)]
    assert all(any(part in name for name in changed) for part in parts)


def test_lora_trains_its_terms_alone_and_merges(tmp_path):
    lora = FolderConfig(path=str(vision_folder()), lora=LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    cfg = replace(config(tmp_path, steps=2), model=lora)
    trainer.train(cfg)
    assert losses(cfg)[0] == pytest.approx(losses_of_full(tmp_path)[0], rel=1e-6)
    export(cfg, tmp_path / "merged", None, merge=True, check=True)
    assert len(answer(tmp_path / "merged", tmp_path)) > 0


def losses_of_full(tmp_path):
    cfg = config(tmp_path, steps=2)
    cfg = replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "full")))
    trainer.train(cfg)
    return losses(cfg)


def test_two_ranks_have_the_losses_of_one(tmp_path):
    cfg = config(tmp_path, steps=3)
    cfg = replace(cfg, optim=replace(cfg.optim, eps=1e-3))  # rounding noise would move entries whose gradient is zero
    trainer.train(cfg)
    command = [sys.executable, "-m", "compiler_trainer", "launch", "-n", "2", "model=hf", f"model.path={cfg.model.path}",
               "data=text", f"data.files=[{cfg.data.files[0]}]", "data.chat=true", "data.images_per_row=2",
               "data.eval_fraction=0", "eval.interval=null", f"data.cache={cfg.data.cache}", "train.steps=3", "train.seq_len=128",
               "train.global_batch_size=2", "optim.lr=1e-2", "optim.max_norm=1", "optim.eps=1e-3", "optim.betas=[0.9,0.999]", "optim.weight_decay=0", "lower.backend=eager", "mesh.tp=2",
               "lr_schedule=cosine", "lr_schedule.warmup_steps=2", "lr_schedule.min_ratio=0.1",
               f"run.dir={tmp_path / 'two'}"]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    two = replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "two")))
    assert losses(two) == pytest.approx(losses(cfg), rel=1e-4)


def test_dry_runs_compile_the_tower(tmp_path):
    cfg = config(tmp_path)
    step = compile_setting(for_predicting(replace(cfg, mesh=MeshConfig(dp_shard=1, tp=2), cluster=to_config(compose(["cluster=h100"])).cluster)))
    entries = {i.name: i.spec.shape for program, _ in step.programs.values() for i in program.inputs if i.kind == "batch"}
    shape = processor_of(cfg.model.path, cfg.data.image_size).blank.arrays["pixel_values"].shape
    assert entries["pixel_values"] == (cfg.train.global_batch_size, cfg.data.images_per_row, *shape)
