"""Generated parts of the documentation: the pages of options and words, and the table of supported features.

python -m tools.reference        writes options.md and glossary.md in docs/reference, and the table in README.md
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from compiler_trainer.config.descriptions import Group, Option, choices_of, groups, recipes
from tools import glossary, pages
from tools.pages import table

ROOT = Path(__file__).resolve().parents[1]
OPTIONS, GLOSSARY = ROOT / "docs/reference/options.md", ROOT / "docs/reference/glossary.md"
README = ROOT / "README.md"
TEXT = "data=text data.files=[a] data.tokenizer=TOK"


class Feature(NamedTuple):
    """A feature of the trainer: the options that request it, and the test that shows it."""

    name: str
    options: str
    test: str
    on_gpu: bool = False  # docs/measured/gpu.md has it


class Missing(NamedTuple):
    """A feature of other trainers that is missing here, and the options that are refused."""

    name: str
    options: str


FEATURES = {
    "Parallelism": (
        Feature("FSDP", "mesh.dp_shard=2", "tests/compiler_trainer/step/test_fsdp.py", True),
        Feature("HSDP", "mesh.dp_replicate=2", "tests/passes/communication/test_communicators.py"),
        Feature("tensor and sequence parallelism", "mesh.tp=2", "tests/passes/sharding/test_tensor_parallel.py", True),
        Feature(
            "context parallelism (ring attention, Ulysses)", "mesh.cp=2", "tests/passes/context/test_context.py", True
        ),
        Feature(
            "expert parallelism", "model=moe_debug mesh.ep=2", "tests/passes/sharding/test_expert_parallel.py", True
        ),
        Feature(
            "pipeline parallelism (1F1B, interleaved, zero bubble)",
            "mesh.pp=2 train.microbatches=4",
            "tests/compiler_trainer/step/test_pipeline_stages.py",
            True,
        ),
    ),
    "Faults": (
        Feature("goes on without lost ranks", "run.elastic=true", "tests/multirank/test_survive.py", True),
        Feature("resume on any mesh", "checkpoint.resume=auto", "tests/compiler_trainer/training/test_going_on.py"),
        Feature("NaN rollback", "train.nonfinite=rollback", "tests/compiler_trainer/training/test_nonfinite.py"),
    ),
    "Precision": (
        Feature("mixed precision (bf16)", "train.precision=bf16", "tests/passes/precision/test_cast.py", True),
        Feature("float8", "train.precision=fp8", "tests/passes/precision/test_float8.py", True),
    ),
    "Memory": (
        Feature("gradient accumulation", "train.microbatches=4", "tests/passes/update/test_token_mean.py"),
        Feature("activation checkpointing", "train.activation_checkpointing=full", "tests/passes/memory/test_remat.py"),
        Feature("offloading", "passes.remat.policy=offload", "tests/passes/memory/test_remat.py", True),
        Feature("loss in chunks", "passes.chunk_loss.chunks=4", "tests/passes/idioms/test_chunk_loss.py"),
        Feature("8-bit moments", "optim=adamw8bit", "tests/passes/update/test_moments.py"),
    ),
    "Training": (
        Feature("multi-token prediction", "model.mtp.layers=1", "tests/compiler_trainer/models/test_mtp.py"),
        Feature(
            "multi-token prediction of folders that have it",
            "model=hf model.path=FOLDER model.mtp.weight=0.3",
            "tests/compiler_trainer/models/test_mtp_of_folders.py",
        ),
        Feature("models of transformers", "model=hf model.path=FOLDER", "tests/compiler_trainer/models/test_folder.py"),
        Feature(
            "models with linear attention, Mamba 2 and short convolutions, packed and over cp",
            "model=hf model.path=FOLDER mesh.cp=2",
            "tests/compiler_trainer/models/test_recurrences.py",
        ),
        Feature("LoRA", "model=hf model.path=FOLDER model.lora.rank=8", "tests/compiler_trainer/models/test_folder.py"),
        Feature(
            "QLoRA (nf4, mxfp4, nvfp4, int8)",
            "model=hf model.path=FOLDER model.lora.rank=8 model.quantize=nf4",
            "tests/compiler_trainer/models/test_quantized.py",
        ),
        Feature("chat data with packing", f"{TEXT} data.chat=true", "tests/compiler_trainer/data/test_chat.py"),
        Feature(
            "DPO, IPO, SimPO, ORPO, CPO, KTO, pairs for a loss of your own",
            f"{TEXT} data.chat=true data.pairs=true loss=dpo model.attention=documents",
            "tests/compiler_trainer/training/test_preference.py",
        ),
        Feature(
            "GRPO, Dr. GRPO, DAPO, GSPO by reward functions of your own",
            "model=hf model.path=FOLDER loss=grpo data=prompts data.prompts=[a] rewards=[a.b] eval.interval=null "
            "train.global_batch_size=8",
            "tests/compiler_trainer/training/test_rollouts.py",
        ),
        Feature(
            "answers of GRPO from a server (vLLM's and SGLang's interface, with a stand-in)",
            "model=hf model.path=FOLDER loss=grpo data=prompts data.prompts=[a] rewards=[a.b] eval.interval=null "
            "train.global_batch_size=8 loss.server=http://localhost:8000",
            "tests/compiler_trainer/training/test_rollout_server.py",
        ),
        Feature(
            "KTO with single answers",
            f"{TEXT} data.chat=true data.records=answers loss=kto model.attention=documents",
            "tests/compiler_trainer/training/test_preference.py",
        ),
        Feature(
            "reward models",
            f"model=hf model.path=FOLDER model.head=score loss=reward {TEXT} data.chat=true data.pairs=true",
            "tests/compiler_trainer/models/test_heads.py",
        ),
        Feature(
            "text classification",
            f"model=hf model.path=FOLDER model.head=score loss=classify {TEXT} data.records=classes data.labels=[a,b]",
            "tests/compiler_trainer/models/test_heads.py",
        ),
        Feature(
            "embeddings with in-batch negatives over all ranks",
            f"model=hf model.path=FOLDER model.head=none loss=embed {TEXT} data.records=passages",
            "tests/compiler_trainer/models/test_heads.py",
        ),
        Feature(
            "conversations with images",
            f"model=hf model.path=FOLDER {TEXT} data.chat=true data.images_per_row=2",
            "tests/compiler_trainer/data/test_images_of_records.py",
        ),
        Feature(
            "distillation from a teacher of transformers",
            f"model=hf model.path=FOLDER loss=distill loss.teacher=FOLDER {TEXT} data.chat=true",
            "tests/compiler_trainer/models/test_distill.py",
        ),
        Feature(
            "on-policy distillation (GKD)",
            "model=hf model.path=FOLDER loss=gkd loss.teacher=FOLDER data=prompts data.prompts=[a] eval.interval=null",
            "tests/compiler_trainer/training/test_on_policy.py",
        ),
        Feature("mixtures", "data=mixture data.sources=[{files:[a]}]", "tests/compiler_trainer/data/test_mixture.py"),
        Feature(
            "data streamed from files, object storage and the hub, resumed exactly",
            f"{TEXT} data.stream=true data.eval_fraction=0 eval.interval=null",
            "tests/compiler_trainer/data/test_stream.py",
        ),
        Feature("Muon", "optim=muon", "tests/passes/update/test_muon.py", True),
        Feature(
            "models of the hub, by name",
            "model=hf model.path=Qwen/Qwen3-0.6B",
            "tests/compiler_trainer/places/test_reading.py",
        ),
        Feature(
            "data, models, checkpoints and exports in object storage",
            "checkpoint.store=s3://bucket/runs/a",
            "tests/compiler_trainer/training/test_store.py",
        ),
        Feature(
            "exports to GGUF (llama.cpp), to float8 (vLLM) and to the hub",
            "train.steps=1",
            "tests/compiler_trainer/runs/test_export_gguf.py",
        ),
        Feature("EMA", "train.ema=0.999", "tests/compiler_trainer/training/test_averages.py"),
        Feature("early stopping", "eval.patience=3", "tests/compiler_trainer/training/test_lengths.py"),
        Feature("samples while training", "eval.prompts=[a]", "tests/compiler_trainer/training/test_samples.py"),
        Feature("sweeps", "run.dir=runs/sweep", "tests/compiler_trainer/sweep/test_sweep.py"),
    ),
    "Your own": (
        Feature("a loop in Python (`Trainer`)", "train.steps=1", "tests/compiler_trainer/test_api.py"),
        Feature("callbacks", "train.callbacks=[{_target_:a.B}]", "tests/compiler_trainer/training/test_callbacks.py"),
        Feature(
            "Weights & Biases, MLflow",
            "run.loggers=[{_target_:compiler_trainer.WandB}]",
            "tests/compiler_trainer/training/test_loggers.py",
        ),
        Feature("optimizers", "optim=custom optim._target_=a.Lion", "tests/docs/test_your_loop.py"),
        Feature("schedules", "lr_schedule=custom lr_schedule._target_=a.b", "tests/docs/test_your_loop.py"),
        Feature("datasets", "data=custom data._target_=a.Data", "tests/compiler_trainer/data/test_own_rows.py"),
        Feature("passes", "passes.extra=[{_target_:a.Pass}]", "tests/compiler_trainer/test_extra.py"),
        Feature("rules", "passes.rules=[a.b]", "tests/docs/test_your_loop.py"),
    ),
    "Insight": (
        Feature("dry runs and plans", "run.dry=true", "tests/compiler_trainer/planning/test_plan.py"),
        Feature("profiles", "run.profile=true", "tests/compiler_trainer/profile/test_profile.py", True),
        Feature("graph pages, diffs", "run.dump_graphs=true", "tests/compiler_trainer/inspect/test_page.py"),
        Feature("bisection of wrong numbers", "passes.verify=numeric", "tests/compiler_trainer/bisect/test_bisect.py"),
    ),
}
MISSING = (
    Missing("fp16, matmuls in MXFP8 and NVFP4", "passes.cast.param_dtype=float16"),
    Missing("PPO", "loss=ppo"),
    Missing("video and audio without a dataset of your own", "data=video"),
)


def support() -> str:
    """Return the table of supported features, and the line of missing ones."""
    rows = [(title, named(features, True), named(features, False)) for title, features in FEATURES.items()]
    missing = "; ".join(feature.name for feature in MISSING)
    return table(("area", "has run on an H100", "tested on CPUs"), [*rows, ("**not supported**", "", missing)])


def named(features: Sequence[Feature], on_gpu: bool) -> str:
    """Return the names of the features that have run on a GPU, or have not."""
    return ", ".join(feature.name for feature in features if feature.on_gpu == on_gpu)


def options() -> str:
    """Return the page of options."""
    head = (
        "# Options\n\n`python -m tools.reference` makes this page from the schema. On the command line\n"
        "`compiler-trainer --help optim` shows a group, `compiler-trainer --cfg job` the values of a job.\n"
    )
    listed = recipes()
    rows = [(f"`{option.name}`", option.meaning) for option in listed.options]
    of_recipes = f"## recipe\n\n{listed.about}\n\n{table(('recipe', ''), rows)}\n"
    return "\n".join([head, of_recipes, *(section(group) for group in groups() if group.options)])


def section(group: Group) -> str:
    """Return the section of a group: its text, its choices, and a row an option."""
    choices = choices_of(group.name)
    intro = f"Choices: {', '.join(f'`{group.name}={choice}`' for choice in choices)}.\n\n" if choices else ""
    rows = [(f"`{o.name}`", cell(o.takes), cell(default(o)), o.meaning) for o in group.options]
    about = " ".join(group.about.split()) if group.name else "These belong to no group."
    return f"## {title(group)}\n\n{about}\n\n{intro}{table(('option', 'takes', 'default', ''), rows)}\n"


def title(group: Group) -> str:
    """Return a group's name, with the choice that it belongs to if several groups have the same name."""
    if not group.name:
        return "Other options"
    first = group.options[0]
    choice = {"loss.name": first.takes, "model.path": "hf"}.get(first.name)
    return f"{group.name}={choice}" if choice else group.name


def default(option: Option) -> str:
    """Return an option's default, the same at each generation."""
    return "runs/DATE_TIME" if option.name == "run.dir" else option.default


def cell(text: str) -> str:
    """Return a text in a table; long tables of rates are cut."""
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return f"`{short}`".replace("|", "\\|") if short else ""


def renewed(text: str) -> str:
    """Return README with a new table between its markers."""
    return pages.renewed(text, "support", support())


def main() -> None:
    """Write the generated files."""
    OPTIONS.write_text(options())
    GLOSSARY.write_text(glossary.page())
    README.write_text(renewed(README.read_text()))
    print(f"{OPTIONS}, {GLOSSARY}, {README}")


if __name__ == "__main__":
    main()
