"""The loss of a trained model on text: all of it, or what its run held out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from compiler_trainer import checkpoint
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from compiler_trainer.data.datasets import check_vocabulary
from compiler_trainer.data.mixture import Mixture
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.models.subject import subject
from compiler_trainer.runs.saved import from_newest
from compiler_trainer.step.compile import compile_step
from compiler_trainer.step.ranks import start_ranks, stop_ranks
from compiler_trainer.training.evaluate import means
from compiler_trainer.training.prepare import read_data
from compiler_trainer.training.trainer import local_device


def evaluate(cfg: Config, everything: bool, most_batches: int | None) -> dict[str, float]:
    """Mean loss of labelled tokens in nats, metrics, of next tokens the perplexity, and how many tokens were labelled.

    `everything` takes all text that `cfg.data` names, else what the run held out; of it at most so many batches. Every
    rank calls it.
    """
    cfg = validate(cfg, start_ranks())
    if everything:
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, eval_fraction=0.0))
    datasets, trained = read_data(cfg), subject(cfg)
    check_vocabulary(datasets, trained.vocab_size)
    rows = (datasets.eval or datasets.train).rows
    step = compile_step(
        trained.module,
        trained.loss,
        next(batches(rows, cfg.train.global_batch_size, 1)),
        mesh=cfg.mesh,
        passes=cfg.passes,
        lower=cfg.lower,
        initial=trained.initial(),
        device=local_device(),
        below={"tokens": datasets.vocab_size, "positions": cfg.train.seq_len},
        train=False,
    )
    from_newest(cfg, lambda path: checkpoint.load_model(step, path))
    found = list(batches(rows, cfg.train.global_batch_size, most_batches))
    measured = means(step, found)
    stop_ranks()
    labelled = sum(int((batch["labels"] != IGNORED_LABEL).sum()) for batch in found)
    perplexity = {} if cfg.loss else {"perplexity": math.exp(measured["loss"])}
    return {**measured, **perplexity, "tokens": labelled}


def batches(rows: Mixture, size: int, most: int | None) -> Iterator[dict[str, Tensor]]:
    """Every row once, in order, in at most so many batches; what fills the last one has no labels."""
    for first in range(0, len(rows), size) if most is None else range(0, min(len(rows), most * size), size):
        numbers = np.arange(first, first + size)
        batch = rows.batch(np.minimum(numbers, len(rows) - 1))
        batch["labels"][numbers >= len(rows)] = IGNORED_LABEL
        yield {name: torch.from_numpy(array) for name, array in batch.items()}
