"""`new`: print a job file to start from, with a recipe's values and the meaning of each option as a comment.

    compiler-trainer new lora > job.yaml
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from compiler_trainer.cli.table import parser
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.descriptions import choices_of, comments, summary, types_of, words
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import not_one_of, spelled
from compiler_trainer.config.schema import (
    Config,
    DistillationConfig,
    FolderConfig,
    GrpoConfig,
    HeadLossConfig,
    ModelConfig,
    PreferenceConfig,
)

PATH = "model.path=Qwen/Qwen3-0.6B"
EXAMPLES = {  # data for a model's folder, by their kind
    "documents": ("data=text", "data.files=[chats.jsonl]", "data.chat=true"),
    "pairs": ("data=text", "data.files=[pairs.jsonl]"),
    "prompts": ("data.prompts=[prompts.jsonl]", "rewards=[my_rewards.correct]"),
    "classes": ("data=text", "data.files=[reviews.jsonl]", "data.labels=[negative,positive]"),
    "passages": ("data=text", "data.files=[queries.jsonl]"),
    "answers": ("data=text", "data.files=[answers.jsonl]"),
    "distill": ("data=text", "data.files=[chats.jsonl]", "data.chat=true", "loss.teacher=Qwen/Qwen3-8B"),
    "gkd": ("data.prompts=[prompts.jsonl]", "loss.teacher=Qwen/Qwen3-8B"),
}
TEXT = ("data=text", "data.files=[books]", "data.tokenizer=FOLDER/tokenizer.json")
MODEL = "model: llama3_8b  # or one of: "  # of a recipe for any model
USUAL = (
    "train.steps", "train.seq_len", "train.global_batch_size", "optim.lr", "lr_schedule.warmup_ratio",
    "passes.remat.policy", "eval.interval", "checkpoint.interval", "checkpoint.keep",
)  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Print the job file of a recipe."""
    arg_parser = parser("new")
    arg_parser.add_argument("recipe", nargs="?", default="", metavar="RECIPE", help=", ".join(choices_of("recipe")))
    print("\n".join(lines(arg_parser.parse_args(arguments).recipe)))


def lines(recipe: str) -> Iterator[str]:
    """Yield the lines of a recipe's job file; raise UserError if there is no such recipe."""
    if recipe not in choices_of("recipe"):
        raise UserError("new", not_one_of(choices_of("recipe"), recipe, "recipe"))
    cfg = job_of(recipe)
    yield f"# {summary('recipe', recipe)}. Edit this file, then:"
    yield "#   compiler-trainer job.yaml                train (on 8 GPUs: compiler-trainer launch -n 8 job.yaml)"
    yield "#   compiler-trainer job.yaml --cfg job      print every option; compiler-trainer --help explains them"
    yield f"recipe: {recipe}"
    if isinstance(cfg.model, ModelConfig) and cfg.model.name == ModelConfig().name:
        yield MODEL + ", ".join(choices_of("model"))
    groups: list[str] = []
    for name in names(cfg):
        *parts, option = name.split(".")
        for depth, part in enumerate(parts):
            if groups[: depth + 1] != parts[: depth + 1]:
                yield f"{'  ' * depth}{part}:"
                groups = parts[: depth + 1]
        owner = inside(cfg, parts)
        takes, meaning = words(types_of(type(owner))[option]), comments(type(owner))[option]
        values = f"{takes}: " if re.fullmatch(r"\w+( \| \w+)+", takes) else ""
        yield f"{'  ' * len(parts)}{option}: {spelled(getattr(owner, option))}  # {values}{meaning}"


def job_of(recipe: str) -> Config:
    """Return the job of a recipe, with files of text or conversations that the reader has to replace."""
    return to_config(compose([f"recipe={recipe}", *placeholders(recipe)]))


def placeholders(recipe: str) -> tuple[str, ...]:
    """Return the options of a recipe's data, and of its model's folder if it needs one."""
    try:
        to_config(compose([f"recipe={recipe}", *TEXT]))
        return TEXT
    except UserError as missing:
        if missing.place != "model.path":
            raise
    cfg = to_config(compose([f"recipe={recipe}", PATH]))
    kind = "prompts" if cfg.has_rollouts else "pairs" if cfg.data.pairs else cfg.data.records
    return PATH, *EXAMPLES[cfg.loss.name if isinstance(cfg.loss, DistillationConfig) else kind]


def names(cfg: Config) -> Iterator[str]:
    """Yield the options that a user of a job is likely to change."""
    if isinstance(cfg.model, FolderConfig):
        yield "model.path"
        yield from (f"model.lora.{name}" for name in ("rank", "alpha", "targets") if cfg.model.lora)
        yield from ("model.quantize" for _ in range(cfg.model.quantize is not None))
    yield from ("data.name", "data.prompts" if cfg.has_rollouts else "data.files")
    if not isinstance(cfg.model, FolderConfig) or cfg.data.chat:
        yield "data.chat" if cfg.data.chat else "data.tokenizer"
    yield from ("data.labels" for _ in range(bool(cfg.data.labels)))
    yield from ("rewards" for _ in range(isinstance(cfg.loss, GrpoConfig)))
    if isinstance(cfg.loss, PreferenceConfig | DistillationConfig | HeadLossConfig):
        yield from (f"loss.{name}" for name in comments(type(cfg.loss)) if name != "name")
    yield from USUAL


def inside(cfg: Config, parts: Sequence[str]) -> Any:
    """Return a group of options."""
    group: Any = cfg
    for part in parts:
        group = getattr(group, part)
    return group
