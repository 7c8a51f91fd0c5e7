"""Option names of other trainers get an answer that names existing options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import compiler_trainer
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.descriptions import groups
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.foreign import ANSWERS, VALUES, answer
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from tools.reference import FEATURES

GROUPS = (
    "train",
    "optim",
    "lr_schedule",
    "data",
    "mesh",
    "passes",
    "lower",
    "checkpoint",
    "eval",
    "run",
    "model",
    "loss",
    "cluster",
    "plan",
)
NAMED = re.compile(rf"(?<![\w./-])(?:{'|'.join(GROUPS)})\.[a-z_][a-z_.0-9]*[a-z_0-9](?![\w/]|\()")
NO_OPTIONS = {  # names of state, parameters, files, functions, and options of earlier versions
    "optim.step", "model.safetensors.index", "model.embed_tokens", "model.norm", "model.layers",
    "passes.ir.ir", "passes.rules.add_rule", "checkpoint.enabled", "passes.segment.enabled", "passes.roll",
    "passes.schedule.bucket_mib", "passes.schedule.ahead",
}  # fmt: skip
FILES = (".yaml", ".json", ".jsonl", ".html", ".js", ".md", ".py", ".safetensors")
DENIALS = re.compile(r"there is (?:no|none)\b[^;,:]*|[^;,:]* (?:is|are) not (?:computed|called)[^;,:]*")
REFUSED = {  # beginning of a denial -> options that ask for the denied feature
    "there is no fp16": ["passes.cast.param_dtype=float16"],
    "there is no MXFP8 and no NVFP4": ["passes.cast.float8=mxfp8"],
    "matmuls of experts are not computed in float8": ["passes.moe.fp8_grouped_mm=true"],
    "recipe=qlora, or model.quantize=nf4": ["train.load_in_4bit=true"],
    "there is no quantized LoRA": ["model=hf", "model.path=FOLDER", "model.lora.bits=4"],
    "matmuls of float32 are not computed in TF32": ["train.tf32=true"],
    "torch.compile is not called": ["train.torch_compile=true"],
    "there is none": ["run.push_to_hub=true"],
    "there is no PPO": ["loss=ppo"],
}


def options() -> set[str]:
    named = {option.name for group in groups() for option in group.options} | {group.name for group in groups()}
    return named | {"model._target_", "loss._target_", "recipe"}


def messages() -> Iterator[tuple[str, str]]:
    """Yield the strings of the program that are not docstrings, with their places."""
    root = Path(compiler_trainer.__file__).parents[1]
    for path in sorted([*root.glob("compiler_trainer/**/*.py"), *root.glob("passes/**/*.py")]):
        tree = ast.parse(path.read_text())
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield f"{path.relative_to(root)}:{node.lineno}", node.value


def test_every_option_that_a_message_names_exists():
    existing = options()
    missing = [
        (place, name)
        for place, text in messages()
        for name in NAMED.findall(text)
        if not name.endswith(FILES)
        and name not in existing | NO_OPTIONS
        and not any(option.startswith(f"{name}.") for option in existing)
    ]
    assert not missing


@pytest.mark.parametrize(
    "denial", sorted({d for answer in {*ANSWERS.values(), *VALUES.values()} for d in DENIALS.findall(answer)})
)
def test_what_an_answer_denies_is_refused_and_no_feature(denial):
    """Answers must not become outdated: one denied pipeline parallelism after it had been added."""
    (refused_overrides,) = (overrides for beginning, overrides in REFUSED.items() if denial.startswith(beginning))
    with pytest.raises(UserError):
        validate(resolve_auto(to_config(compose(refused_overrides)), on_gpu=True), 1)
    features = {feature.name.partition(" (")[0].lower() for row in FEATURES.values() for feature in row}
    assert denial.lower().removeprefix("there is no ") not in features


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"train": {"gradient_accumulation_steps": 4}},
            "train.gradient_accumulation_steps: no such option; gradient accumulation is train.microbatches",
        ),
        ({"mesh": {"dp": 2}}, "mesh.dp: no such option; data parallelism is mesh.dp_shard"),
        ({"pipeline_model_parallel_size": 2}, "no such option; pipeline parallelism is mesh.pp"),
        ({"train": {"num_train_epochs": 3}}, "epochs as in train.steps=3epochs"),
        ({"train": {"bf16": True}}, "mixed precision is passes.cast.param_dtype=bfloat16"),
        ({"train": {"lr": 1e-4}}, "train.lr: no such option; the learning rate is optim.lr"),
        ({"learning_rate": 1e-4}, "learning_rate: no such option; the learning rate is optim.lr"),
        ({"wandb": True}, "wandb: no such option; metrics go to metrics.jsonl, TensorBoard and run.loggers="),
        ({"model": {"attn_implementation": "sdpa"}}, "kernels are chosen automatically"),
        (
            {"train": {"dtype": "bf16"}},
            "did you mean 'bfloat16'?; it is the dtype of master weights; mixed precision is passes.cast.param_dtype",
        ),
        (
            {"passes": {"cast": {"float8": "mxfp8"}}},
            "'mxfp8' is not one of tensorwise, rowwise; there is no MXFP8 and no NVFP4",
        ),
        ({"passes": {"cast": {"nvfp4": True}}}, "passes.cast.nvfp4: no such option; there is no MXFP8 and no NVFP4"),
        ({"passes": {"moe": {"fp8_grouped_mm": True}}}, "no such option; matmuls of experts are not computed in float8"),
        (
            {"passes": {"moe": {"dispatch": "exact"}}},
            "'exact' is not one of auto, all_gather, dropless, bounded; counts of rows stay",
        ),
        ({"train": {"stepz": 4}}, "train.stepz: no such option; did you mean 'steps'?"),
    ],
)
def test_a_name_of_another_trainer_is_answered_where_it_is_refused(mapping, message):
    with pytest.raises(UserError) as refused:
        build(Config, mapping)
    assert message in str(refused.value)


def test_case_hyphens_and_groups_do_not_matter():
    assert answer("train.Per-Device-Train-Batch-Size") == ANSWERS["per_device_train_batch_size"]
    assert answer("optim.lrr") is None
