"""Lines printed before compilation: a description of the run, and notes on settings that are probably mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
from torch import Tensor

from compiler_trainer.config.device import CPU, device_name
from compiler_trainer.config.schema import Config, DataConfig, FolderConfig, GrpoConfig, OptimConfig, RolloutConfig
from compiler_trainer.config.targets import name_of as target_of
from compiler_trainer.data.datasets import name_of
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.models.folder import text_config_of
from compiler_trainer.models.place import folder_of
from compiler_trainer.models.quantized import entries_of
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.training.speed import peak_flops

LARGE = 500_000_000  # parameters; from here on, settings of the default job get a note
MOST_CPU_S = 3 * 3600  # a run on CPUs that takes longer gets a note
MOST_LR = 1e-4  # for AdamW on pretrained weights; published rates lie between 1e-6 and 5e-5
SCHEDULES = {"constant": "constant", "cosine": "cosine decay", "linear": "linear decay", "wsd": "decay at the end"}


def data_names(data: DataConfig) -> str:
    """Return the names of the data that are read."""
    return ", ".join(map(name_of, data.read))


# ---- description of a run ----------------------------------------------------------------------------


def describe(cfg: Config, trained: Subject, batch: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield lines on the model, the precision, the update, and the size of a step, from a batch."""
    yield f"model: {trained.name}, {parameters(trained)}; {precision(cfg)}"
    yield f"update: {update(cfg)}; {cfg.train.steps:,} steps"
    yield f"a step: {rows(cfg) if 'tokens' in batch else entries(batch)}; {contents(cfg, batch)}on {devices(cfg)}"


def contents(cfg: Config, batch: Mapping[str, Tensor]) -> str:
    """Return the share of tokens with labels, or the prompts; empty for a batch without tokens or labels."""
    if isinstance(cfg.loss, RolloutConfig):
        return f"{cfg.loss.group_size} answers to each of {len(batch['tokens']) // cfg.loss.group_size:,} prompts; "
    if not {"tokens", "labels"} <= batch.keys():
        return ""
    share = float((batch["labels"] != IGNORED_LABEL).float().mean())
    return f"{share:.1%} of the tokens of the first batch are labels; "


def entries(batch: Mapping[str, Tensor]) -> str:
    """Return the entries of a batch that has no tokens, as text."""
    return ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())


def parameters(trained: Subject) -> str:
    """Return the numbers of parameters and of trained parameters, as text."""
    count = entries_of(trained.module)
    trained_count = sum(p.numel() for p in trained.module.parameters() if p.requires_grad)
    return f"{count:,} parameters" if trained_count == count else f"{trained_count:,} of {count:,} parameters trained"


def precision(cfg: Config) -> str:
    """Return the dtypes of computation, of matmuls and of master weights, as text."""
    cast, masters = cfg.passes.cast, cfg.train.dtype
    float8_text = f", linear layers in float8 ({cast.float8})" if cast.float8 else ""
    if cast.param_dtype in (None, masters):
        return f"{masters} throughout{float8_text}{tensor_cores(masters)}"
    return f"computed in {cast.param_dtype}{float8_text}, master weights in {masters}"


def tensor_cores(dtype: str) -> str:
    """Return the rounding of float32 matmuls on this GPU, as text; empty for other dtypes and devices."""
    if dtype != "float32" or not torch.cuda.is_available():
        return ""
    setting = torch.get_float32_matmul_precision()
    rounding = {"highest": "not rounded to TF32", "high": "rounded to TF32", "medium": "rounded to bfloat16"}[setting]
    return f", matmuls {rounding} (torch.set_float32_matmul_precision is {setting!r})"


def update(cfg: Config) -> str:
    """Return the optimizer, the learning rate and its schedule, as text."""
    schedule = cfg.lr_schedule
    if schedule._target_ is not None:
        target = {"_target_": schedule._target_, **schedule.arguments}
        return f"{optimizer(cfg.optim)}, learning rate {cfg.optim.lr:.3g} times {target_of(target)}"
    steps = schedule.warmup(cfg.train.steps)
    warmup = f"{steps:,} step{'s' * (steps > 1)} of warm-up, " if steps else ""
    lowest = "" if schedule.name == "constant" else f" to {schedule.min_ratio * cfg.optim.lr:.3g}"
    return f"{optimizer(cfg.optim)}, learning rate {cfg.optim.lr:.3g}, {warmup}{SCHEDULES[schedule.name]}{lowest}"


def optimizer(optim: OptimConfig) -> str:
    """Return the optimizer's name."""
    return target_of({"_target_": optim._target_, **optim.arguments}) if optim._target_ else optim.name


def rows(cfg: Config) -> str:
    """Return the tokens and sequences of a step, and the number of microbatches, as text."""
    train = cfg.train
    count = train.global_batch_size * train.seq_len
    tokens = f"{count:,} tokens ({train.global_batch_size:,} rows of {train.seq_len:,})"
    parts = f"{train.microbatches} microbatches (gradient accumulation)"
    return tokens if train.microbatches == 1 else f"{tokens} in {parts}"


def devices(cfg: Config) -> str:
    """Return the number of ranks, the mesh, and the device, as text."""
    mesh = mesh_of(cfg.mesh)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes if size > 1)
    return f"{mesh.world_size:,} ranks ({axes}), {device}" if axes else f"one {device}"


# ---- notes on probable mistakes ----------------------------------------------------------------------


def notes(cfg: Config, trained: Subject) -> Iterator[str]:
    """Yield a line for each setting that runs, but is probably a mistake."""
    lines = (
        default_job(cfg, trained),
        padding_ranks(cfg),
        high_rate(cfg),
        long_inputs(cfg),
        pure_bfloat16(cfg),
        slow_run(cfg, trained),
    )
    yield from (f"note: {text}" for text in (*lines, *trained.remarks) if text)


def default_job(cfg: Config, trained: Subject) -> str:
    """Return a note if a large model trains on the default job's data."""
    count = sum(p.numel() for p in trained.module.parameters())
    if count < LARGE or cfg.data.name not in ("stdlib", "synthetic"):
        return ""
    settings = f"{count:,} parameters on data={cfg.data.name} in rows of {cfg.train.seq_len:,} tokens"
    return f"this trains {settings}, the settings of the default job; recipe=llama3_8b has those of a large model"


def padding_ranks(cfg: Config) -> str:
    """Return a note if some data ranks compute padding because the samples do not divide among them."""
    ranks, batch_size = cfg.mesh.dp_replicate * cfg.mesh.dp_shard, cfg.train.global_batch_size
    part_size = batch_size // cfg.train.microbatches
    if part_size % ranks == 0:
        return ""
    part = "a step" if cfg.train.microbatches == 1 else f"a microbatch ({batch_size} in {cfg.train.microbatches} parts)"
    lost = 1 - part_size / (-(-part_size // ranks) * ranks)
    fix = f"set train.global_batch_size to a multiple of {ranks * cfg.train.microbatches}"
    problem = f"the {part_size} rows of {part} do not divide among {ranks} data ranks"
    return f"{problem}: {lost:.0%} of their work is padding; {fix}"


def high_rate(cfg: Config) -> str:
    """Return a note if a pretrained model has a learning rate for training from scratch."""
    if not isinstance(cfg.model, FolderConfig) or cfg.model.init != "weights" or cfg.model.lora is not None:
        return ""
    if cfg.optim.lr <= MOST_LR or cfg.optim.name == "sgd":
        return ""
    fix = "set optim.lr=1e-5, as recipe=finetune has"
    fix = "set optim.lr=5e-7, as recipe=dpo has" if cfg.has_preference_loss else fix
    fix = "set optim.lr=1e-6, as recipe=grpo has" if isinstance(cfg.loss, GrpoConfig) else fix
    return f"optim.lr={cfg.optim.lr:g} is for training from scratch, and {cfg.model.path} has trained weights; {fix}"


def long_inputs(cfg: Config) -> str:
    """Return a note if sequences are longer than the positions that a folder's model was trained on."""
    if not isinstance(cfg.model, FolderConfig):
        return ""
    limit = getattr(text_config_of(folder_of(cfg), cfg.sees), "max_position_embeddings", None)
    if not limit or cfg.train.seq_len <= limit:
        return ""
    problem = f"train.seq_len={cfg.train.seq_len:,} goes beyond the {limit:,} positions of {cfg.model.path}/config.json"
    return f"{problem} (max_position_embeddings), for which its weights were not trained"


def pure_bfloat16(cfg: Config) -> str:
    """Return a note if small updates are lost in bfloat16 weights."""
    if cfg.train.dtype != "bfloat16" or cfg.optim.stochastic_rounding:
        return ""
    fix = "set passes.cast.param_dtype=bfloat16 instead for mixed precision, or optim.stochastic_rounding=true"
    return f"train.dtype=bfloat16 keeps no float32 master weights and rounds small updates away; {fix}"


def slow_run(cfg: Config, trained: Subject) -> str:
    """Return a note if a run takes hours or days on CPUs, at the FLOP/s per core of `cluster=cpu`."""
    if not device_name() == cfg.cluster.device == CPU:
        return ""
    train, cores = cfg.train, torch.get_num_threads() * mesh_of(cfg.mesh).world_size
    tokens = train.global_batch_size * train.seq_len
    step_s = trained.flops_per_token(train.seq_len) * tokens / (cores * peak_flops(cfg))
    if step_s * train.steps < MOST_CPU_S:
        return ""
    step, total = (timedelta(seconds=round(seconds)) for seconds in (step_s, step_s * train.steps))
    trial = "train.seq_len=128 train.global_batch_size=8 train.steps=30"
    return f"on {cores} CPU cores a step takes at least {step} and the run {total}; for a trial set {trial}"
