"""Option names of other trainers get an answer that names existing options."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from commands import call

import compiler_trainer
from compiler_trainer.cli.table import VERBS
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.descriptions import choices_of, groups
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
    "passes.schedule.bucket_mib", "passes.schedule.ahead", "lr_schedule.warmup_fraction", "lr_schedule.decay_fraction",
}  # fmt: skip
FILES = (".yaml", ".json", ".jsonl", ".html", ".js", ".md", ".py", ".safetensors")
DENIALS = re.compile(r"there (?:is|are) no(?:ne)?\b[^;,:]*|[^;,:]* (?:is|are) not (?:computed|called|supported)\b[^;,:]*")
CHOICES = re.compile(r"(?<![\w./-])(recipe|model|data|optim|lr_schedule|cluster|loss)=([a-z_0-9|]+)(?![\w./(])")
NO_FEATURES = {  # begin messages that are true by what the program has just looked at
    "there is no trained state", "there is no validation data", "there is no answer", "there is no folder", "there is no GPU",
    "there is no trace of this run", "there are no experts to spread", "there is no kernel by interval for",
}  # fmt: skip
REFUSED = {  # beginning of a denial -> options that ask for the denied feature
    "there is no fp16": ["passes.cast.param_dtype=float16"],
    "matmuls are not computed in MXFP8 or NVFP4": ["passes.cast.float8=mxfp8"],
    "matmuls of experts are not computed in float8": ["passes.moe.fp8_grouped_mm=true"],
    "torch.compile is not called": ["train.torch_compile=true"],
    "there is none": ["run.push_to_hub=true"],
    "there is no PPO": ["loss=ppo"],
}


def options() -> set[str]:
    named = {option.name for group in groups() for option in group.options} | {group.name for group in groups()}
    return named | {"model._target_", "loss._target_", "recipe"}


@functools.cache
def messages() -> list[tuple[str, str]]:
    """Return the strings of the program that are not docstrings, with their places."""
    root, strings = Path(compiler_trainer.__file__).parents[1], []
    for path in sorted([*root.glob("compiler_trainer/**/*.py"), *root.glob("passes/**/*.py")]):
        tree = ast.parse(path.read_text())
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                strings.append((f"{path.relative_to(root)}:{node.lineno}", node.value))
    return strings


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


def test_every_choice_verb_and_page_that_a_message_names_exists():
    choices = [(group, choice) for _, text in messages() for group, names in CHOICES.findall(text) for choice in names.split("|")]
    assert len(choices) > 30 and not [pair for pair in choices if pair[1] and pair[1] not in choices_of(pair[0])]
    verbs = {verb for _, text in messages() for verb in re.findall(r"compiler-trainer ([a-z][a-z-]+)(?![\w.=/-])", text)}
    assert len(verbs) > 5 and verbs - {"and"} <= VERBS.keys()  # "compiler-trainer and PyTorch"
    pages = {page for _, text in messages() for page in re.findall(r"docs/[\w/-]+\.md", text)}
    assert len(pages) > 5 and not [page for page in pages if not Path(page).is_file()]


def test_every_answer_is_for_a_name_that_is_no_option_here():
    """Otherwise the answer would never be seen, or hide an option."""
    assert not [name for name in ANSWERS if name != name.lower() or "-" in name or "." in name]
    known = options() | {*GROUPS, "recipe"}
    assert not [name for name in VALUES if name not in known]


@pytest.mark.parametrize(
    "denial",
    sorted({d for _, text in messages() for d in DENIALS.findall(text) if not d.startswith(tuple(NO_FEATURES))}),
)
def test_what_a_message_denies_is_refused_and_no_feature(denial):
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
        ({"train": {"bf16": True}}, "mixed precision is train.precision=bf16"),
        ({"train": {"lr": 1e-4}}, "train.lr: no such option; the learning rate is optim.lr"),
        ({"learning_rate": 1e-4}, "learning_rate: no such option; the learning rate is optim.lr"),
        ({"wandb": True}, "wandb: no such option; metrics go to metrics.jsonl, TensorBoard and run.loggers=[wandb]"),
        ({"model": {"attn_implementation": "sdpa"}}, "kernels are chosen automatically"),
        (
            {"train": {"dtype": "bf16"}},
            "'bf16' is not one of float32, bfloat16; mixed precision is train.precision=bf16: compute in",
        ),
        (
            {"passes": {"cast": {"float8": "mxfp8"}}},
            "'mxfp8' is not one of tensorwise, rowwise; matmuls are not computed in MXFP8 or NVFP4",
        ),
        ({"passes": {"cast": {"nvfp4": True}}}, "passes.cast.nvfp4: no such option; matmuls are not computed in MXFP8 or NVFP4"),
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


@pytest.mark.parametrize(("arguments", "line"), [
    (["plan", "--gpus", "8"], "--gpus: options are OPTION=VALUE, without dashes; "),
    (["plan", "--learning-rate=1"], "--learning-rate=1: options are OPTION=VALUE, without dashes; the learning rate is optim.lr"),
    (["eval"], "compiler-trainer eval: the following arguments are required: RUN; compiler-trainer eval --help describes them"),
    (["chat", "--optim.lr=2"], "compiler-trainer chat: the following arguments are required: RUN"),
    (["fine-tune"], "fine-tune: supervised fine-tuning (SFT) is recipe=finetune"),
    (["quantize=nf4"], "quantize: no such option; weights under LoRA are stored in few bits by recipe=qlora"),
    (["model.quantize=nf4"], "model.quantize: goes with recipe=qlora model=FOLDER"),
    (["model.path=qwen"], "model.path: goes with model=hf; model=FOLDER"),
    (["checkpoint.resume=last"], "checkpoint.resume: last is not a folder here; it takes one, latest, or auto"),
])  # fmt: skip
def test_wrong_commands_are_answered_in_one_line(arguments, line, capfd):
    assert call(*arguments) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: {line}") and error.count("\n") == 1
