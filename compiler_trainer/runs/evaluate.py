"""The loss of a trained model on its run's validation text or on other text."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint.load import MODEL
from compiler_trainer.config.schema import STREAM_WINDOW, Config
from compiler_trainer.config.validate import validate
from compiler_trainer.data.datasets import Datasets, check_labels, check_vocabulary
from compiler_trainer.data.loader import Batch, Loader
from compiler_trainer.models.folder import plain
from compiler_trainer.models.subject import Subject, subject
from compiler_trainer.runs.saved import check_names, from_newest
from compiler_trainer.step.ranks import rank, start_ranks, stop_ranks
from compiler_trainer.step.step import Step
from compiler_trainer.training.evaluate import by_source, evaluating_step, means, samples_left_out, validation_batches
from compiler_trainer.training.loggers import Working
from compiler_trainer.training.prepare import read_data
from compiler_trainer.training.reference import refer
from compiler_trainer.training.trainer import peek


def evaluate(cfg: Config, other: bool) -> str:
    """Return a line with the mean loss in nats, metrics, perplexity of next tokens, and the number of tokens or pairs.

    A loss that is no cross-entropy alone has no perplexity.
    It evaluates `eval.batches` of the run's validation text or, for `other` text, of all data that `cfg.data` names.
    Every rank calls it.
    """
    cfg = validate(cfg, start_ranks())
    datasets, trained = data_of(cfg, other), subject(cfg)
    check_vocabulary(datasets, trained.vocab_size)
    check_labels(datasets)
    refer(cfg, datasets)
    loader = datasets.eval or datasets.train
    left_out = samples_left_out(cfg, loader)
    with Working(sys.stderr) if rank() == 0 else nullcontext(lambda what: None) as tell:
        step = measuring(cfg, trained, peek(loader), datasets.below, tell)
        datasets.read_only(step.samples_read(step.ranks).numpy())
        results, count = means(step, told(loader, cfg, tell))
    stop_ranks()
    if not cfg.loss and not has_further_terms(trained):
        results["perplexity"] = math.exp(results["loss"]) if results["loss"] < 700 else math.inf
    shown = ", ".join(f"{name} {value:.6g}" for name, value in results.items())
    terms = "pairs" if cfg.data.has_groups else "tokens"
    terms = {"answers": "answers", "classes": "texts"}.get(cfg.data.records, terms)
    note = f"; note: {left_out}" if left_out else ""
    return f"{shown}, {terms} {count:,} in {taken(loader, cfg.eval.batches)}{note}"


def has_further_terms(trained: Subject) -> bool:
    """Return True if transformers adds terms to the cross-entropy: then the loss has no perplexity."""
    model = plain(trained.module)
    balances = getattr(getattr(model, "config", None), "output_router_logits", False)
    return balances or getattr(model, "z_loss_coefficient", 0) > 0


def data_of(cfg: Config, other: bool) -> Datasets:
    """Return the data to evaluate: the run's validation text, or all of `other` text."""
    if other:
        data = dataclasses.replace(cfg.data, eval_fraction=0.0, validation=(), stream=False)
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(data, stream_window=STREAM_WINDOW))
    return read_data(cfg)


def measuring(
    cfg: Config,
    trained: Subject,
    batch: Batch,
    below: Mapping[str, int],
    tell: Callable[[str], None],
    averaged: bool = False,
) -> Step:
    """Return the compiled evaluation step of a run for batches like `batch`, with the weights of its newest checkpoint.

    With `averaged` these are the averages of weights. Raises UserError if there are none.
    """
    step = evaluating_step(cfg, trained, trained.loss, batch, below, tell)
    load = checkpoint.load_averaged if averaged else checkpoint.load_model

    def load_checked(path: Path) -> None:
        names = checkpoint.opened(path).index.tensors
        check_names([name.removeprefix(MODEL) for name in names if name.startswith(MODEL)], trained)
        load(step, path)

    from_newest(cfg, load_checked)
    return step


def told(loader: Loader, cfg: Config, tell: Callable[[str], None]) -> Iterator[tuple[str, Batch]]:
    """Yield the batches to evaluate and report the progress of each."""
    choice = cfg.eval.batches, not cfg.has_own_loss
    count = len(by_source(loader, *choice))
    for number, batch in enumerate(validation_batches(loader, *choice), 1):
        tell(f"batch {number:,} of {count:,}")
        yield batch


def taken(loader: Loader, batches: int | None) -> str:
    """Return a text on the number of sequences evaluated, and on the option to evaluate more."""
    all_rows = f"all {len(loader.rows):,} rows"
    return (
        all_rows if batches is None else f"{batches:,} x {loader.batch_size:,} rows; eval.batches=null takes {all_rows}"
    )
