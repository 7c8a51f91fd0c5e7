"""A folder with small versions of the files that commands on the pages name: text, chats, models, runs, a cluster."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow
import yaml
from doc_pages import ROOT
from folders import cached, model
from object_store import Store
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from vision_folders import picture, vision_folder

from compiler_trainer import checkpoint
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.files import CONF
from compiler_trainer.config.schema import (
    Config,
    DataConfig,
    EvalConfig,
    FolderConfig,
    LoraConfig,
    LowerConfig,
    LrScheduleConfig,
    MeshConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    save,
)
from compiler_trainer.data import tokenized
from compiler_trainer.data.stored import ALL
from compiler_trainer.planning.dry import dry_run
from compiler_trainer.training.trainer import train

SENTENCE = "The fjord is a long, narrow inlet of the sea between steep cliffs. "
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = {"text": SENTENCE, "messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": SENTENCE}]}
PAIR = {"prompt": "?", "chosen": "Sea.", "rejected": "No."}
REVIEWS = [{"text": "The fjord was cold.", "label": "negative"}, {"text": "The fjord was fine!", "label": "positive"}]
QUERY = {"query": "What is a fjord?", "positive": "An inlet.", "negative": "A fish."}
SEEN = {"messages": [{"role": "user", "content": [{"type": "image", "path": "photos/1.jpg"}]}, {"role": "assistant", "content": "It"}]}
ASKED = {"prompt": "7 * 8?", "result": "56"}
DECODER = ModelConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=24)
QWEN = FolderConfig(path="qwen", attention="causal")

# a run's name on a page -> the kind of run
RUNS = {
    "RUN": "decoder", "RUN_A": "decoder", "RUN_B": "decoder", "runs/first": "decoder", "runs/a": "decoder",
    "runs/8b": "decoder", "runs/1b": "decoder", "runs/profiled": "profiled", "runs/x": "decoder", "runs/1": "decoder",
    "runs/ema": "averaged", "runs/dry": "dry", "runs/tuned": "tuned", "runs/lora": "lora",
    "runs/seen": "seen", "runs/seen_lora": "lora",
    "runs/reward": "reward", "runs/classes": "classes", "runs/embed": "embed",
    "runs/distilled": "distilled",
}


HEADS = {  # runs of models with other heads, or with a teacher
    "reward": ("recipe=reward", "data.files=[pairs.jsonl]"),
    "embed": ("recipe=embed", "data.files=[queries.jsonl]"),
    "distilled": ("recipe=distill", "loss.teacher=teacher", "data.files=[chats.jsonl]", "data.chat=true"),
    "seen": ("recipe=finetune", "model.path=llava", "data.files=[seen.jsonl]", "data.chat=true", "data.images_per_row=2"),
    "classes": ("recipe=classify", "data.files=[reviews.jsonl]", "data.labels=[negative,positive]"),
}


JOB_FILES = (("docs/start.md", "job.yaml"), ("docs/guides/finetune.md", "tuned.yaml"), ("docs/guides/several-nodes.md", "8b.yaml"))


def furnish(folder: Path) -> None:
    """Make the files that commands read in `folder`, the current folder."""
    for name in ("books/a.txt", "code/a.txt", "notes.txt", "shared/books/a.txt"):
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_text(SENTENCE * 40)
    for name in ("chats.jsonl", "test.jsonl", "notes/a.jsonl", "FOLDER/train.jsonl"):
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_text("".join(json.dumps(TALK) + "\n" for _ in range(60)))
    Path(folder, "fineweb/sample/10BT").mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({"text": [SENTENCE] * 40, "id": ["a"] * 40}), folder / "fineweb/sample/10BT/000.parquet")
    (folder / "pairs.jsonl").write_text((json.dumps(PAIR) + "\n") * 30)
    (folder / "reviews.jsonl").write_text("".join(json.dumps(review) + "\n" for review in REVIEWS) * 20)
    (folder / "queries.jsonl").write_text("".join(json.dumps({**QUERY, "query": f"What is {i}?"}) + "\n" for i in range(30)))
    judged = ({"prompt": PAIR["prompt"], "completion": PAIR[key], "label": key == "chosen"} for key in ("chosen", "rejected"))
    (folder / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in judged) * 15)
    (folder / "prompts.jsonl").write_text((json.dumps(ASKED) + "\n") * 3)
    (folder / "my_rewards.py").write_text(shown_module("docs/guides/finetune.md", "my_rewards"))
    model("qwen3").save_pretrained(folder / "qwen")
    tokenizer().save(str(folder / "qwen/tokenizer.json"))
    (folder / "qwen/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "qwen/chat_template.jinja").write_text(TEMPLATE)
    for name in ("smol", "teacher", "gpt-oss"):
        shutil.copytree(folder / "qwen", folder / name)
    model("gpt_oss").save_pretrained(folder / "gpt-oss")
    for name in ("llava", "seen"):
        shutil.copytree(vision_folder(), folder / name)
    shutil.copytree(vision_folder("qwen2_vl"), folder / "qwen-vl")
    (folder / "photos").mkdir()
    (folder / "photos/1.jpg").write_bytes(picture(1))
    (folder / "seen.jsonl").write_text((json.dumps(SEEN) + "\n") * 30)
    tokenizer(of_chat=False).save(str(folder / "TOK"))
    for out, files in (("tokens", "books"), ("tokens/books", "books"), ("tokens/code", "code")):
        tokenized.write(DataConfig(name="text", files=(files,), tokenizer="TOK"), folder / out, ALL)
    fineweb = DataConfig(name="text", files=("fineweb/sample/10BT",), tokenizer="smol/tokenizer.json")
    tokenized.write(fineweb, folder / "fineweb-tokens", ALL)
    Path(folder, "my_package.py").write_text(python_of("docs/guides/your-model.md"))
    for name in ("my_parts", "my_rules"):
        Path(folder, f"{name}.py").write_text(shown_module("docs/guides/your-loop.md", name))
    (folder / "conf/model").mkdir(parents=True)
    (folder / "conf/model/reader.yaml").write_text(shown_file("docs/guides/your-model.md", "conf/model/reader.yaml"))
    cluster = yaml.safe_load((CONF / "cluster/cpu.yaml").read_text())
    (folder / "mine/cluster").mkdir(parents=True)
    (folder / "mine/cluster/desk.yaml").write_text(yaml.safe_dump(cluster | {"name": "desk"}))
    (folder / "runs/plan64").mkdir(parents=True)
    (folder / "runs/plan64/plan.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: llama3_8b\n"
        "train: {seq_len: 8192, global_batch_size: 16, microbatches: 1}\n"
        "passes: {remat: {policy: selective}, cast: {param_dtype: bfloat16, reduce_dtype: float32}}\n"
    )
    for page, name in JOB_FILES:
        (folder / name).write_text(shown_file(page, name))
    (folder / "runs/first").mkdir()
    save(to_config(compose(["train.steps=100", "run.dir=runs/first"])), folder / "runs/first/config.yaml")


def furnish_elsewhere(folder: Path, store: Store) -> None:
    """Put the files that pages name into a store and the hub's cache."""
    for name in ("books", "tokens", "qwen"):
        store.put(folder / name, name)
    store.put(folder / "TOK", "tok/tokenizer.json")
    cached(folder / "hub", "Qwen/Qwen3-0.6B", folder / "qwen")
    run = run_of("decoder")
    store.put(checkpoint.complete(run / "checkpoints")[-1], "runs/a/step_00000400")


def shown_file(page: str, name: str) -> str:
    """Return the contents of a file shown on a page, in a block whose first line is its name."""
    (text,) = re.findall(rf"^```\w+\n# {re.escape(name)}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return text


def python_of(page: str) -> str:
    """Return the Python of a page's first two blocks, which belong together."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return "\n\n".join(blocks[:2])


def shown_module(page: str, name: str) -> str:
    """Return the blocks of a page that belong to one module; each begins with its name."""
    return "\n\n".join(re.findall(rf"^```python\n(# {name}\.py.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE))


def tokenizer(of_chat: bool = True) -> Tokenizer:
    """Return a tokenizer with a token a byte, the end of a document, and special tokens for chats."""
    special = ["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *letters])}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(special if of_chat else special[:1])
    return made


def run_of(kind: str) -> Path:
    """Return a run of four steps in `kept/`, made once; `dry` is the dry run of a mesh."""
    path = Path("kept", kind)
    if kind == "dry" and not path.exists():
        mesh = MeshConfig(dp_shard=2, tp=2)
        job = tiny(to_config(compose(["cluster=h100"])), path)
        dry_run(replace(job, mesh=mesh, run=RunConfig(dir=str(path), dry=True)))
    elif not path.exists():
        lora = replace(QWEN, lora=LoraConfig(rank=2, targets=("q_proj",)))
        models = {"decoder": DECODER, "profiled": DECODER, "averaged": DECODER, "tuned": QWEN, "lora": lora}
        chats = DataConfig(name="text", files=("chats.jsonl",), tokenizer="qwen/tokenizer.json", chat=True)
        corpus = DataConfig(name="synthetic", documents=40) if models.get(kind) is DECODER else chats
        ema = TrainConfig(ema=0.9 if kind == "averaged" else None)
        job = HEADS[kind] if kind in HEADS else Config(models[kind], data=corpus, train=ema, run=RunConfig(profile=kind == "profiled"))
        train(tiny(job if isinstance(job, Config) else to_config(compose(["model.path=qwen", "data=text", *job])), path))
    return path


def store_of(cfg: Config, folder: Path) -> str | None:
    """Return a separate store for a job that has one."""
    return cfg.checkpoint.store and f"s3://bucket/{folder.parent.name}"


def tiny(cfg: Config, folder: Path) -> Config:
    """Return a small job with its kind of model, data and optimizer: two layers of 16 features, four steps."""
    small = cfg.model
    if isinstance(small, ModelConfig):
        vocabulary = 300 if cfg.data.tokenizer != "bytes" else 257
        experts = small.experts and replace(small.experts, width=8)
        small = replace(DECODER, vocab_size=vocabulary, attention=small.attention, experts=experts)
    is_evaluated = not cfg.has_rollouts and (not cfg.data.stream or bool(cfg.data.validation))
    corpus = replace(cfg.data, cache="kept/tokens", eval_fraction=0.2 * (is_evaluated and not cfg.data.stream))
    if corpus.name == "stdlib":
        corpus = replace(corpus, name="synthetic", documents=40)
    seq_len = 128 if cfg.data.images_per_row else 32
    if cfg.data.image_tokens_per_row is not None:
        corpus = replace(corpus, image_tokens_per_row=64)
    remat = replace(cfg.passes.remat, layers={}) if cfg.passes.remat.layers else cfg.passes.remat
    return replace(
        cfg,
        model=small,
        loss=cfg.loss if not cfg.has_rollouts else replace(cfg.loss, group_size=2, answer_tokens=8, server=None),  # no server is there
        data=corpus,
        train=replace(cfg.train, steps=4, seq_len=seq_len, global_batch_size=4, microbatches=1 if cfg.train.microbatches == 1 else 2),
        lr_schedule=cfg.lr_schedule if cfg.lr_schedule._target_ else LrScheduleConfig(cfg.lr_schedule.name, warmup_steps=1, min_ratio=0.1),
        optim=replace(cfg.optim, block=8),
        mesh=Config().mesh,
        passes=replace(cfg.passes, remat=remat),
        lower=LowerConfig("eager"),
        checkpoint=replace(cfg.checkpoint, interval=2, keep=2, keep_best=int(is_evaluated), dir=None, resume=None, store=store_of(cfg, folder)),
        eval=EvalConfig(interval=1 if is_evaluated else None, batches=1),
        run=RunConfig(dir=str(folder), profile=cfg.run.profile),
    )
