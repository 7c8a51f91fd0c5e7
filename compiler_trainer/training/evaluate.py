"""Evaluations: loss and metrics on validation data, samples generated from prompts, and early stopping.

For samples the full model is gathered on rank 0, in host memory, and copied to its GPU if there is room; other ranks
wait. They appear on the console, in samples.jsonl, and in TensorBoard. A run ends early if its validation loss has not
fallen for `eval.patience` evaluations.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compiler_trainer.checkpoint.load import MODEL
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.data.chat import Prompt, prompt_of
from compiler_trainer.data.loader import Batch, Loader
from compiler_trainer.data.tokenizers import tokenizer_of
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.models.loss import PADDING_DOCUMENT
from compiler_trainer.models.sampling import Sampling, check_prompt, continued, in_use
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import Subject, model_of
from compiler_trainer.step.compile import LossFn, compile_step
from compiler_trainer.step.program_cache import ProgramCache
from compiler_trainer.step.ranks import from_rank_0, local_device
from compiler_trainer.step.step import Step
from compiler_trainer.training.callbacks import Callback, Run
from compiler_trainer.training.loggers import Logger
from compiler_trainer.training.metrics import FILE, JsonLines, Record, TensorBoard, read


class Measures(Protocol):
    """An object that returns loss and metrics of a global batch, their counts, and sums over its samples."""

    def measure(self, batch: dict[str, Tensor], /) -> dict[str, float]: ...
    def weights(self, batch: dict[str, Tensor], /) -> dict[str, float]: ...
    def total(self, values: Tensor, /) -> float: ...


def evaluating_step(
    cfg: Config,
    trained: Subject,
    loss: LossFn,
    batch: Batch,
    below: Mapping[str, int] | None = None,
    tell: Callable[[str], None] = lambda task: None,
) -> Step:
    """Return a compiled program that only computes a loss and metrics, with the model's initial weights.

    The options are those of a run; `below` are the upper bounds of the batch's entries.
    """
    return compile_step(
        trained.module,
        loss,
        batch,
        mesh=cfg.mesh,
        passes=cfg.passes,
        lower=cfg.lower,
        microbatches=cfg.train.microbatches,
        seed=cfg.train.seed,
        initial=trained.initial(),
        device=local_device(),
        train=False,
        below=below,
        cache=ProgramCache(),
        cluster=cfg.cluster,
        tell=tell,
    )


def means(step: Measures, batches: Iterable[tuple[str, Batch]]) -> tuple[dict[str, float], int]:
    """Return loss and metrics of all batches, and the number of labelled tokens, or of pairs.

    A mean over entries of the batch is one over those of all batches; other terms are weighted by these numbers. With
    several sources, whose names come with the batches, also return the loss of each one as `loss/NAME`.
    """
    totals, weights = defaultdict[str, float](float), defaultdict[str, float](float)
    count, sources = 0, set[str]()
    for source, batch in batches:
        terms = int(step.total(count_terms(batch)))
        if not terms:
            continue  # its loss is a mean of nothing
        metrics, name, counts = step.measure(batch), f"loss/{source}", step.weights(batch)
        for metric, value, of in (*((m, v, m) for m, v in metrics.items()), (name, metrics["loss"], "loss")):
            if weight := counts.get(of, terms):  # else it is a mean of nothing
                totals[metric] += value * weight
                weights[metric] += weight
        count, sources = count + terms, sources | {name}
    if not count:
        raise UserError("eval", "no sequence of the validation data has a label; set eval.interval=null")
    left_out = sources if len(sources) == 1 else ()
    return {name: total / weights[name] for name, total in totals.items() if name not in left_out}, count


def count_terms(batch: Batch) -> Tensor:
    """Return the terms of each sample that a batch's loss is the mean of, int64[samples]: pairs, or labelled tokens."""
    if "pairs" in batch:
        return batch["pairs"]
    labels = batch["labels"]
    return (labels != IGNORED_LABEL).reshape(len(labels), -1).sum(1)


def validation_batches(loader: Loader, batches: int | None, fills: bool = True) -> Iterator[tuple[str, Batch]]:
    """Yield (source, batch) over the validation data.

    With `batches`, take the samples of that many first global batches, each once, the same ones each time. With None,
    take all samples. Without `fills`, leave out those that do not make a full batch.
    """
    return ((name, fill_batch(loader, numbers)) for name, numbers in by_source(loader, batches, fills))


def by_source(loader: Loader, batches: int | None, fills: bool = True) -> list[tuple[str, NDArray[np.int64]]]:
    """Return (source, numbers of samples) for each batch to evaluate; if it `fills`, a source's last may be smaller."""
    rows, size = loader.rows, loader.batch_size
    none = (0,) * len(rows.parts)
    numbers = np.arange(len(rows)) if batches is None else loader.draw(none, batches * size)[0]
    numbers = numbers[np.sort(np.unique(numbers, return_index=True)[1])]  # few samples are drawn more than once
    owners = np.searchsorted(rows.firsts, numbers, side="right") - 1
    parts = [(name, numbers[owners == owner]) for owner, name in enumerate(rows.names)]
    cut = [(name, part[first : first + size]) for name, part in parts for first in range(0, len(part), size)]
    return [(name, part) for name, part in cut if fills or len(part) == size]


def samples_left_out(cfg: Config, loader: Loader) -> str:
    """Return a note on the samples that evaluations leave out, or an empty string.

    A loss of the user's may count the samples that fill a batch, whatever their labels. Raises UserError without a full
    batch.
    """
    if not cfg.has_own_loss:
        return ""
    counts = [sum(len(n) for _, n in by_source(loader, cfg.eval.batches, fills)) for fills in (True, False)]
    if not counts[1]:
        most = max(map(len, loader.rows.parts))
        problem = f"is {loader.batch_size:,}, but a source of validation data has at most {most:,} samples"
        fix = "a loss of your own might count samples that fill a batch; make it smaller, or set eval.interval=null"
        raise UserError("train.global_batch_size", f"{problem}: {fix}")
    left = counts[0] - counts[1]
    reason = "make no full batch, and a loss of your own might count samples that fill one"
    return f"evaluations leave out {left:,} of {counts[0]:,} samples: they {reason}" if left else ""


def fill_batch(loader: Loader, numbers: NDArray[np.int64]) -> Batch:
    """Return a global batch of these samples; if there are too few, fill it with padding."""
    missing = loader.batch_size - len(numbers)
    batch = loader.batch(np.pad(numbers, (0, missing), mode="edge"))
    for name, value in (("labels", IGNORED_LABEL), ("documents", PADDING_DOCUMENT), ("pairs", 0)):
        if name in batch:
            batch[name][len(numbers) :] = value
    return batch


# ---- samples -------------------------------------------------------------------------------------------

SAMPLES = "samples.jsonl"
ROOM = 1.5  # free GPU memory needed to generate, in sizes of the weights


class SampleLines(JsonLines):
    """The file `samples.jsonl`: one JSON object per evaluation."""

    name, kind = SAMPLES, dict[str, Any]


class Samples(Callback):
    """A callback that continues each of `eval.prompts`, with the same random draws each time.

    Raises UserError if the model cannot take a prompt.
    """

    def __init__(self, cfg: Config, trained: Subject, loggers: Sequence[Logger]):
        self.cfg, self.trained, self.tokenizer, self.lines = cfg, trained, tokenizer_of(cfg.data), SampleLines()
        self.module = model_of(cfg).module if trained.teacher else trained.module
        self.boards = [logger for logger in loggers if isinstance(logger, TensorBoard)]
        self.prompts = {text: prompt_of(text, cfg.data.chat, self.tokenizer) for text in cfg.eval.prompts}
        for prompt in self.prompts.values():
            check_prompt(cfg, trained, prompt.ids)

    def on_start(self, run: Run) -> None:
        """Open the file."""
        if run.rank == 0:
            self.lines.start(run.cfg, run.done)

    def on_evaluation(self, run: Run, record: Record) -> None:
        """Gather the model on rank 0 and generate there."""
        weights = on_rank_0(run.step, run.rank, self.trained.teacher)
        if run.rank != 0:
            return
        module = fill(copy.deepcopy(self.module), weights.items())
        model = in_use(self.cfg, module, device_with_room(run.step.device, weights))
        texts = {text: self.continuation(model, prompt) for text, prompt in self.prompts.items()}
        self.tell(int(record["step"]), [{"prompt": prompt, "text": text} for prompt, text in texts.items()])

    def tell(self, step: int, samples: list[dict[str, str]]) -> None:
        """Write the samples to the file, the console and TensorBoard."""
        line: dict[str, Any] = {"step": step, "samples": samples}
        self.lines.log(line)
        for number, sample in enumerate(samples):
            text = json.dumps(sample, ensure_ascii=False)
            say(f"sample at step {step:,}: {text}")
            for board in self.boards:
                board.text(step, f"sample/{number}", text)

    def continuation(self, model: nn.Module, prompt: Prompt) -> str:
        """Return the model's continuation of a prompt."""
        sampling = Sampling(self.cfg.eval.sample_tokens)
        return self.tokenizer.decode(continued(self.cfg, self.trained, model, prompt.ids, prompt.ends, sampling))

    def on_stop(self, run: Run) -> None:
        """Write the rest of the file, which a full disk may have refused before."""
        if run.rank == 0:
            self.lines.close(False)


def on_rank_0(step: Step, rank: int, left_out: Set[str] = frozenset()) -> dict[str, Tensor]:
    """Return full parameters and buffers in host memory on rank 0, an empty dict elsewhere; all ranks must call it.

    Those in `left_out` are not gathered.
    """
    weights = {}
    for name in (name for name in step.state if name.startswith(MODEL) and name not in left_out):
        full = step.whole(name)
        if rank == 0:
            weights[name.removeprefix(MODEL)] = full.to("cpu", copy=True)
    return weights


def device_with_room(device: torch.device, weights: dict[str, Tensor]) -> torch.device:
    """Return a rank's device, or the CPU if the weights and their working memory do not fit next to its state."""
    size = sum(value.nbytes for value in weights.values())
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < ROOM * size:
        return torch.device("cpu")
    return device


# ---- early stopping ------------------------------------------------------------------------------------


class Patience(Callback):
    """A callback that ends a run after `most` evaluations without a new lowest loss, counted across resumed parts."""

    def __init__(self, most: int):
        self.most, self.losses = most, dict[int, float]()

    def on_start(self, run: Run) -> None:
        """Read the losses of earlier validations."""
        if run.done:
            self.losses = from_rank_0(lambda: read_losses(run.folder / FILE, run.done))
            self.judge(run)

    def on_evaluation(self, run: Run, record: Record) -> None:
        """Add a loss; after a rollback, drop those of later steps."""
        earlier = {step: loss for step, loss in self.losses.items() if step < record["step"]}
        self.losses = {**earlier, int(record["step"]): record["eval_loss"]}
        self.judge(run)

    def judge(self, run: Run) -> None:
        """End the run if the loss has not fallen for too long."""
        if since_lowest(list(self.losses.values())) >= self.most:
            run.stop(f"its validation loss has not fallen for eval.patience={self.most} evaluations")


def since_lowest(losses: Sequence[float]) -> int:
    """Return the number of evaluations after the first lowest loss."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def read_losses(path: Path, done: int) -> dict[int, float]:
    """Return the recorded validation losses up to step `done`, by step."""
    records = read(path) if path.exists() else []
    return {int(r["step"]): r["eval_loss"] for r in records if r["step"] <= done and "eval_loss" in r}
