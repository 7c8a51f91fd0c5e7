"""The check that an export gives tokens the same log-probabilities as the trainer's own evaluation.

With another head than the one for next tokens, the sums of its outputs for a token are compared instead.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, DataConfig, MeshConfig, ModelConfig
from compiler_trainer.config.validate import validate
from compiler_trainer.data.datasets import check_vocabulary
from compiler_trainer.data.loader import Batch, Loader
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.models.decoders import config_of
from compiler_trainer.models.folder import library
from compiler_trainer.models.gguf.architectures import is_read
from compiler_trainer.models.loss import cross_entropy, widened
from compiler_trainer.models.place import folder_of
from compiler_trainer.models.sampling import row
from compiler_trainer.models.subject import Subject, subject
from compiler_trainer.runs import plainly
from compiler_trainer.runs.evaluate import data_of, measuring
from compiler_trainer.step.ranks import rank, start_ranks, stop_ranks
from compiler_trainer.training.evaluate import Measures
from compiler_trainer.training.loggers import Working

ROUNDINGS = 64  # relative roundings of the coarsest dtype by which two correct computations may differ
EPS = {name: torch.finfo(getattr(torch, name)).eps for name in ("float32", "float16", "bfloat16")}
EPS |= {"q8_0": 1 / 127, "float8": 2**-3}
OF_SPREAD = 0.2  # mean difference in float8, as part of the standard deviation over tokens
MOST_ROWS = 8
FEW = 16  # tokens of the short check


class Text(NamedTuple):
    """The first document of a sequence: its batch, its tokens, and the positions (from the second on) to compare."""

    batch: Batch
    ids: list[int]
    places: list[int]


def check_export(cfg: Config, other: bool, out: Path, tokens: int, averaged: bool = False) -> tuple[bool, str]:
    """Return (True if a folder gives the trainer's log-probabilities, a sentence on the largest difference).

    It compares `tokens` tokens of validation or `other` text, from the first document of each sequence, which attends
    only to itself as a server's request does. With `averaged` the weights are those of `train.ema`. Every rank calls
    it. Raises UserError if transformers cannot load the folder.
    """
    if out.is_file() and not is_read(config_of_run(cfg).model_type):
        raise UserError(str(out), "transformers reads no GGUF files of this architecture; check a folder in its place")
    ranks = start_ranks()
    train_options = dataclasses.replace(cfg.train, global_batch_size=ranks, microbatches=1)
    cfg = without_loss(dataclasses.replace(cfg, train=train_options), ranks)
    datasets, trained = data_of(cfg, other), subject(cfg)
    check_vocabulary(datasets, trained.vocab_size)
    texts = texts_of(datasets.eval or datasets.train, tokens)
    return compared_texts(cfg, trained, texts, out, datasets.below, averaged)


def check_export_alone(cfg: Config, out: Path, averaged: bool = False) -> tuple[bool, str]:
    """Return the result of `check_export` for a few random tokens on one device, without data and compilers."""
    train_options = dataclasses.replace(
        cfg.train, global_batch_size=1, microbatches=1, seq_len=min(cfg.train.seq_len, FEW)
    )
    lower = dataclasses.replace(cfg.lower, backend="eager", cudagraphs=False)
    data = dataclasses.replace(cfg.data, image_tokens_per_row=None)  # the tokens are text
    cfg = dataclasses.replace(cfg, mesh=MeshConfig(), train=train_options, lower=lower, data=data)
    cfg = without_loss(cfg, start_ranks())
    trained = subject(cfg)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, trained.vocab_size or 2, (1, train_options.seq_len), generator=generator)
    batch = row(tokens[0].tolist(), torch.device("cpu")) | {"labels": tokens}
    text = Text(batch, tokens[0].tolist(), list(range(1, train_options.seq_len)))
    return compared_texts(cfg, trained, [text], out, {}, averaged)


def config_of_run(cfg: Config) -> Any:
    """Return transformers' config of a run's model."""
    if isinstance(cfg.model, ModelConfig):
        return config_of(cfg.model)
    return library().AutoConfig.from_pretrained(folder_of(cfg).path)


def without_loss(cfg: Config, ranks: int) -> Config:
    """Return validated options that compute log-probabilities in one microbatch, whatever loss the run had.

    Prompts without answers are replaced by the texts of data=stdlib.
    """
    if cfg.has_rollouts:
        texts = DataConfig(tokenizer=cfg.data.tokenizer, cache=cfg.data.cache)
        data = texts if cfg.data.name == "prompts" else cfg.data
        cfg = dataclasses.replace(cfg, loss={}, rewards=(), data=data)
    communication = dataclasses.replace(cfg.passes.communication, batch_overlap=1)
    cfg = dataclasses.replace(cfg, passes=dataclasses.replace(cfg.passes, communication=communication))
    return dataclasses.replace(validate(cfg, ranks), loss={})


def compared_texts(
    cfg: Config, trained: Subject, texts: list[Text], out: Path, below: Mapping[str, int], averaged: bool
) -> tuple[bool, str]:
    """Return (True if a folder gives texts the trainer's log-probabilities, a sentence on the largest difference)."""
    loss = loss_of_predictions if cfg.head == "lm" else loss_of_outputs
    trained = dataclasses.replace(trained, loss=partial(loss, trained.logits))
    with Working(sys.stderr) if rank() == 0 else nullcontext(lambda what: None) as tell:
        step = measuring(cfg, trained, texts[0].batch, below, tell, averaged)
        ours = torch.tensor([value for text in texts for value in measured(step, text, tell)])
    is_first = rank() == 0
    stop_ranks()
    if not is_first:
        return True, ""
    del step
    torch.cuda.empty_cache()  # transformers' process needs the GPU
    ids = [text.ids for text in texts]
    theirs = by_itself(out, cfg.head, ids) if out.is_dir() else of_gguf(cfg, out, ids)
    pairs = zip(texts, theirs["values"], strict=True)
    theirs_at_places = torch.tensor([values[place - 1] for text, values in pairs for place in text.places])
    name = "log-probabilities" if cfg.head == "lm" else "outputs"
    return compared(ours, theirs_at_places, coarsest(cfg, theirs["dtype"]), len(texts), name)


def loss_of_predictions(
    logits: Callable[[nn.Module, Mapping[str, Tensor]], Tensor], model: nn.Module, batch: Mapping[str, Tensor]
) -> Tensor:
    """Return the cross-entropy alone; auxiliary terms of a loss are no log-probabilities."""
    return cross_entropy(logits(model, batch), batch["labels"])


def loss_of_outputs(
    outputs: Callable[[nn.Module, Mapping[str, Tensor]], Tensor], model: nn.Module, batch: Mapping[str, Tensor]
) -> Tensor:
    """Return minus the mean sum of the outputs of tokens that have labels."""
    sums, has_label = widened(outputs(model, batch)).sum(-1), batch["labels"] != IGNORED_LABEL
    return -torch.where(has_label, sums, 0.0).sum() / has_label.sum()


def texts_of(loader: Loader, tokens: int) -> list[Text]:
    """Return the first documents of a few sequences, with `tokens` positions in total.

    Raises UserError if all documents are too short.
    """
    numbers = range(min(MOST_ROWS, len(loader.rows)))
    candidates = (text_of(loader, number, -(-tokens // len(numbers))) for number in numbers)
    texts = [text for text in candidates if text.places]
    if not texts:
        raise UserError("data", "no row begins with two tokens of one document; name a longer text, data.files=[FILE]")
    return texts


def text_of(loader: Loader, number: int, tokens: int) -> Text:
    """Return the first document of a sequence, and some positions spread over it."""
    rows = loader.rows.batch(np.full(loader.batch_size, number))
    if not {"tokens", "labels", "documents"} <= rows.keys():
        problem = f"has rows of {', '.join(rows)}, and tokens, labels and documents are needed"
        raise UserError("data", f"{problem}; name a text, data=text data.files=[FILE]")
    batch = {name: torch.from_numpy(array) for name, array in rows.items()}
    length = int((batch["documents"][0] == 0).sum())
    places = np.unique(np.linspace(1, length - 1, tokens).round().astype(int)) if length > 1 else np.empty(0, int)
    return Text(batch, batch["tokens"][0, :length].tolist(), places.tolist())


def measured(step: Measures, text: Text, tell: Callable[[str], None]) -> list[float]:
    """Return the log-probability of each token at a text's positions: minus the loss if it is the only label."""
    log_probabilities = []
    for place in text.places:
        labels = torch.full_like(text.batch["labels"], IGNORED_LABEL)
        labels[0, place - 1] = text.ids[place]
        log_probabilities.append(-step.measure(text.batch | {"labels": labels})["loss"])
        tell(f"token {place:,} of {len(text.ids):,} of a row")
    return log_probabilities


def of_gguf(cfg: Config, file: Path, texts: list[list[int]]) -> dict[str, Any]:
    """Return transformers' output for texts with a GGUF file; the run has the options that it does not read there."""
    with tempfile.TemporaryDirectory() as folder:
        config_of_run(cfg).save_pretrained(folder)
        return by_itself(file, cfg.head, texts, folder)


def by_itself(out: Path, head: str, texts: list[list[int]], config: str = "") -> dict[str, Any]:
    """Return transformers' output for texts, from a separate process; raise UserError if it fails.

    `config` is a folder with the model's config, for a GGUF file.
    """
    command = [sys.executable, "-P", plainly.__file__, str(out), head, *([config] if config else [])]
    process = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True)
    if process.returncode:
        last_line = (process.stderr.strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
        raise UserError(str(out), f"transformers does not compute with it: {last_line}")
    return json.loads(process.stdout)


def coarsest(cfg: Config, exported: str) -> str:
    """Return the dtype with the fewest digits among those that either side computes in, or has weights in."""
    return max({exported, cfg.train.dtype, cfg.passes.cast.param_dtype or exported} & EPS.keys(), key=EPS.__getitem__)


def compared(ours: Tensor, theirs: Tensor, dtype: str, rows: int, name: str) -> tuple[bool, str]:
    """Return (True if values called `name` are equal up to roundings of a dtype, a sentence on their difference).

    In float8, which has few digits, the mean difference is compared with the spread of the values.
    """
    if dtype == "float8":
        return compared_on_average(ours, theirs, rows, name)
    allowed = ROUNDINGS * EPS[dtype] * ours.abs().clamp(min=1)
    differences = (ours - theirs).abs()
    worst = int((differences / allowed).nan_to_num(torch.inf).argmax())
    is_same = bool((differences <= allowed).all())
    verdict = f"{name} of {len(ours)} tokens of {rows} rows {'are equal' if is_same else 'differ'}"
    values = f"{theirs[worst]:.7g} where the trainer has {ours[worst]:.7g}"
    return is_same, f"{verdict}: at most {differences[worst]:.2g} apart ({values}); {dtype} allows {allowed[worst]:.2g}"


def compared_on_average(ours: Tensor, theirs: Tensor, rows: int, name: str) -> tuple[bool, str]:
    """Return (True if values differ on average by a small part of their spread, a sentence on their difference)."""
    differences, allowed = (ours - theirs).abs(), OF_SPREAD * float(ours.std(correction=0))
    mean, is_same = float(differences.mean()), bool(differences.mean() <= allowed)
    verdict = f"{name} of {len(ours)} tokens of {rows} rows {'are equal' if is_same else 'differ'}"
    apart = f"{mean:.2g} apart on average, at most {differences.max():.2g}"
    return is_same, f"{verdict}: {apart}; float8 allows {allowed:.2g}"
