"""The comparison for the model, mesh and options of a job, on a few random batches."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from compiler_trainer.capture.returned import parted
from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.config.schema import EIGHT_BITS, PASSAGES, Config, FolderConfig, GrpoConfig
from compiler_trainer.data.image_rows import image_tokens_of_row
from compiler_trainer.models.folder import plain
from compiler_trainer.models.grids import TABLE
from compiler_trainer.models.loss import LossFn
from compiler_trainer.models.place import folder_of
from compiler_trainer.models.processor import PIXELS, Processor, Seen, processor_of
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import subject as trained_by
from compiler_trainer.parity import compare
from compiler_trainer.parity.compare import Outcome
from compiler_trainer.parity.one_device import on_one_device
from compiler_trainer.parity.subject import Batch, Settings, Subject

STEPS = 3
SMALL = (  # defaults; the large epsilon hides rounding noise where a gradient is zero
    "mesh.dp_shard=1", "train.seq_len=13", "train.global_batch_size=3", "optim.eps=1e-3", "optim.lr=0.05",
)  # fmt: skip
OTHER = 257  # token ids (bytes and the end of a document) if a model does not state them


def check(cfg: Config) -> Outcome:
    """Return the verdict on a job's step against eager PyTorch; raise UserError if they cannot be compared."""
    if cfg.optim.name in EIGHT_BITS:
        raise UserError(
            "optim", f"{cfg.optim.name} rounds its moments, which eager PyTorch does not do; use optim=adamw"
        )
    if cfg.optim.name == "custom":
        raise UserError("optim", f"{cfg.optim._target_} is no optimizer of eager PyTorch; use optim=adamw")
    cast = cfg.passes.cast
    dtypes = {f"passes.cast.{name}": getattr(cast, name) for name in ("param_dtype", "reduce_dtype", "output_dtype")}
    for option, dtype in (dtypes | {"optim.state": cfg.optim.state}).items():
        if dtype in ("bfloat16", "float16"):
            raise UserError(option, f"is {dtype}, whose rounding would hide an error; set it to null")
    subject, settings = subject_of(cfg), settings_of(cfg)
    try:
        draws_random = compare.draws(subject)
    except Exception as error:
        message = f"{type(error).__name__}: {one_line(error)}"
        raise UserError("model", f"eager PyTorch cannot run it in float64 on the CPU ({message})") from error
    return compare_random(subject, settings) if draws_random else compare.compare(subject, settings)


def settings_of(cfg: Config) -> Settings:
    """Return the settings of a job for steps at its learning rate."""
    mesh = {axis: size for axis, size in vars(cfg.mesh).items() if size > 1}
    return Settings(mesh, cfg.optim, cfg.passes, cfg.train.microbatches, (cfg.optim.lr,) * STEPS)


def compare_random(subject: Subject, settings: Settings) -> Outcome:
    """Return the verdict on a model that draws random numbers, by two comparisons.

    Without dropout it is compared with eager PyTorch. With it, it is compared with a compiled step of one rank, because
    eager PyTorch draws other numbers. Raises UserError if neither can be done.
    """
    outcomes, still = [], replace(subject, model=without_dropout(subject.model))
    if not (draws_more := compare.draws(still)):
        outcomes.append(compare.compare(still, settings))
    elif not settings.mesh:
        problem = "draws random numbers other than dropout, so only meshes can be compared"
        raise UserError("model", f"{problem}; state one, as mesh.dp_shard=2")
    if settings.mesh:
        remark = "compared with a compiled step on one rank, because it draws random numbers" if draws_more else ""
        outcome = compare.compare(subject, settings, alone=True)
        outcomes.append(replace(outcome, why=outcome.why or remark))
    return next((o for o in outcomes if o.verdict != "right"), max(outcomes, key=lambda o: o.error))


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a copy of the model whose dropout drops nothing."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.modules.dropout._DropoutNd)):
                setattr(module, name, 0.0)
    return model


def subject_of(cfg: Config) -> Subject:
    """Return the job's model in fp64 with its initial weights, and random batches of its sizes."""
    trained = trained_by(cfg)
    model = fill(trained.module, ((name, value[()]) for name, value in trained.initial())).double().train()

    def terms(model: nn.Module, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        return None, parted(trained.loss(model, batch))[0]  # all labels count: a mean over sequences is the same

    def batch(step: int, vocabulary: int) -> Batch:
        generator, sequences = torch.Generator().manual_seed(cfg.train.seed + step), cfg.train.global_batch_size
        entries = batch_of(generator, sequences, cfg.train.seq_len, vocabulary, cfg.train.microbatches)
        if cfg.data.labels:
            entries["labels"] %= len(cfg.data.labels)
        if cfg.sees:
            return with_images(cfg, generator, plain(model).config.image_token_id, entries)
        return entries | further_entries(cfg, generator, sequences)

    vocabulary = trained.vocab_size or vocabulary_of(trained.loss, on_one_device(model), batch(0, 2))
    return Subject(model, terms, [batch(step, vocabulary) for step in range(STEPS)], on_one_device)


def vocabulary_of(loss: LossFn, model: nn.Module, batch: Batch) -> int:
    """Return the number of token ids: the rows of the smallest table that the model looks tokens up in."""
    sizes = []

    def record(table: nn.Embedding, inputs: tuple[Tensor, ...]) -> None:
        if inputs and inputs[0].shape == batch["tokens"].shape and bool((inputs[0] == batch["tokens"]).all()):
            sizes.append(table.num_embeddings)

    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(record)
    with suppress(Exception), torch.no_grad():  # an error is raised again, and reported, by the comparison
        loss(model, batch)
    return min(sizes, default=OTHER)


def batch_of(generator: torch.Generator, rows: int, length: int, vocabulary: int, microbatches: int) -> Batch:
    """Return random tokens and labels, in sequences of several documents.

    Documents are as long in each microbatch: a mean over the further tokens of documents is then one over microbatches.
    """
    tokens, labels = (torch.randint(0, vocabulary, (rows, length), generator=generator) for _ in range(2))
    begins = torch.rand(rows, length, generator=generator) < 0.2
    begins[:, 0] = True
    begins = begins[: rows // microbatches].repeat(microbatches, 1)
    place = torch.arange(length).expand(rows, length)
    positions = place - torch.where(begins, place, 0).cummax(1).values
    return {"tokens": tokens, "labels": labels, "positions": positions, "documents": begins.cumsum(1) - 1}


def with_images(cfg: Config, generator: torch.Generator, token: int, batch: Batch) -> Batch:
    """Return a batch with one document a row, which begins with its images, and random pixels.

    Raises UserError if a row is too short for its images.
    """
    assert isinstance(cfg.model, FolderConfig)
    processor = processor_of(folder_of(cfg).path, cfg.data.image_size)
    rows, length = batch["tokens"].shape
    limit = image_tokens_of_row(cfg.data, processor)
    count = limit or processor.blank.text.count(processor.token) * cfg.data.images_per_row
    if count >= length:
        raise UserError("train.seq_len", f"is {length}, and the images of a row have {count} tokens; increase it")
    counts = [count - row % count if limit else count for row in range(rows)]  # images of any size leave some
    tokens = batch["tokens"].where(batch["tokens"] != token, (token + 1) % 2)
    for row, taken in zip(tokens, counts):
        row[:taken] = token
    arrays = [processor.row(strip(processor, taken), cfg.data.images_per_row, limit) for taken in counts]
    pixels = {name: torch.stack([torch.from_numpy(a[name]) for a in arrays]) for name in arrays[0]}
    for name, value in pixels.items():
        if value.is_floating_point():
            pixels[name] = torch.randn(value.shape, generator=generator)
    positions = torch.arange(length).expand(rows, length)
    return batch | pixels | {"tokens": tokens, "positions": positions, "documents": torch.zeros_like(tokens)}


def strip(processor: Processor, tokens: int) -> list[Seen]:
    """Return an image with a row of tokens, of a model that takes images of any size; none for others."""
    if (merge := processor.merge) is None:
        return []
    blank = processor.blank.arrays[PIXELS]
    patches = np.ones((tokens * merge**2, *blank.shape[1:]), blank.dtype)
    return [Seen({PIXELS: patches, TABLE: np.array([[1, merge, merge * tokens]])}, {}, processor.token * tokens)]


def further_entries(cfg: Config, generator: torch.Generator, rows: int) -> Batch:
    """Return the additional entries of a batch of preference pairs, or of sampled answers."""
    if isinstance(cfg.loss, GrpoConfig):
        shape = rows, cfg.train.seq_len
        logs = {name: -torch.rand(shape, generator=generator) for name in cfg.loss.entries}
        return {**logs, "advantages": torch.randn(rows, generator=generator)}
    entries = {"pairs": torch.ones(rows, dtype=torch.int64)} if cfg.data.has_groups else {}
    if cfg.data.records == "answers":
        entries["desirable"] = (torch.arange(rows) % 2).float()
    entries |= {name: torch.arange(rows) % 3 for name in PASSAGES.get(cfg.data.records, ())}
    entries |= {"margins": torch.rand(rows, generator=generator)} if cfg.data.margins else {}
    return entries | {name: -torch.rand(rows, generator=generator) for name in cfg.reference_entries}
