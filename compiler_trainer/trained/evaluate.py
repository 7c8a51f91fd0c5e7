"""The loss of a trained model on text: all of it, or what its run held out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from compiler_trainer import data
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from compiler_trainer.data import Loader
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.models.subject import subject
from compiler_trainer.step.compile import compile_step
from compiler_trainer.step.ranks import start_ranks, stop_ranks
from compiler_trainer.trained.saved import newest
from compiler_trainer.training import checkpoint
from compiler_trainer.training.evaluate import mean_loss
from compiler_trainer.training.trainer import local_device


def evaluate(cfg: Config, everything: bool, most_batches: int | None) -> dict[str, float]:
    """Mean loss of labelled tokens in nats, of next tokens also the perplexity, and how many tokens were labelled.

    `everything` takes all text that `cfg.data` names, else what the run held out; of it at most so many batches. Every
    rank calls it.
    """
    cfg = validate(cfg, start_ranks())
    if everything:
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, eval_fraction=0.0))
    datasets, trained = data.build(cfg.data, cfg.train.seq_len, cfg.train.global_batch_size), subject(cfg)
    data.check_vocabulary(datasets, trained.vocab_size)
    loader = datasets.eval or Loader(datasets.train.rows, cfg.train.global_batch_size, seed=None)
    step = compile_step(
        trained.module,
        trained.loss,
        next(batches(loader, 1)),
        mesh=cfg.mesh,
        passes=cfg.passes,
        lower=cfg.lower,
        initial=trained.initial(),
        device=local_device(),
        below={"tokens": datasets.vocab_size},
        train=False,
    )
    checkpoint.load_model(step, newest(cfg))
    found = list(batches(loader, most_batches))
    loss = mean_loss(step, found)
    stop_ranks()
    labelled = sum(int((batch["labels"] != IGNORED_LABEL).sum()) for batch in found)
    return {"loss": loss, **({} if cfg.loss else {"perplexity": math.exp(loss)}), "tokens": labelled}


def batches(loader: Loader, most: int | None) -> Iterator[dict[str, Tensor]]:
    """Every row once, in order, in at most so many batches; what fills the last one has no labels."""
    loader.reset()
    rows, size = len(loader.rows), loader.batch_size
    count = -(-rows // size)
    for number in range(count if most is None else min(most, count)):
        batch = loader.next()
        again = torch.arange(number * size, (number + 1) * size) >= rows
        batch["labels"][again] = IGNORED_LABEL
        yield batch
