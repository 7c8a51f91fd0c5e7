"""Answers to prompts, drawn with the current weights, and for GRPO scored by reward functions and compared in groups.

A sampler draws the answers (`samplers`), and rank 0 computes the rewards. Log-probabilities of the reference, and of
the weights before the first of several steps, are those of an evaluation program over the mesh.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import ends_of_answers
from compiler_trainer.config.schema import Config, FolderConfig, GrpoConfig, RolloutConfig
from compiler_trainer.config.targets import function
from compiler_trainer.data.corpus import Ids
from compiler_trainer.data.loader import Batch
from compiler_trainer.data.prompts import PromptRows, Rollout, Rollouts, answer_rows
from compiler_trainer.data.tokenizers import tokenizer_of
from compiler_trainer.models import INPUTS
from compiler_trainer.models.grpo import answer_logs
from compiler_trainer.models.loss import PADDING_DOCUMENT
from compiler_trainer.models.place import folder_of
from compiler_trainer.models.sampling import Drawn, why_uncached
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.ranks import try_on_rank_0
from compiler_trainer.step.step import Step
from compiler_trainer.training.callbacks import Callback, Run
from compiler_trainer.training.evaluate import SampleLines, evaluating_step
from compiler_trainer.training.loggers import announce
from compiler_trainer.training.metrics import Record
from compiler_trainer.training.samplers import sampler_of

MOST_GAP = 1.0  # nats between a server and the trainer, whose rounding differs by a few hundredths in bfloat16
Scores = dict[str, NDArray[np.float64]]  # rewards by each function, [answers]
EPSILON = 1e-4  # added to standard deviations of rewards, as in TRL


class Answers(Callback):
    """A callback that draws the batches of a run, and writes the answers to one prompt of each step to samples.jsonl.

    Raises UserError if transformers does not have the model, or if a reward function cannot be imported.
    """

    def __init__(self, cfg: Config, trained: Subject, loader: Rollouts):
        assert isinstance(cfg.loss, RolloutConfig)
        if why := why_uncached(cfg):
            problem = f"{cfg.loss.name} draws answers with transformers' model, but {why}"
            raise UserError("loss.name", f"{problem}; use model=hf")
        self.cfg, self.loss, self.trained, self.loader = cfg, cfg.loss, trained, loader
        self.sampler = sampler_of(cfg, trained)
        self.rewards = {name: reward_function(name) for name in cfg.rewards}
        self.tokenizer, self.lines = tokenizer_of(cfg.data), SampleLines()
        (rows,) = loader.rows.parts
        assert isinstance(rows, PromptRows)
        self.rows, self.shown = rows, list[dict[str, Any]]()
        is_folder = isinstance(cfg.model, FolderConfig)
        self.ends = set(ends_of_answers(Path(folder_of(cfg).path))) if is_folder else set[int]()

    def on_start(self, run: Run) -> None:
        """Compile the log-probabilities if they are needed, and draw the batches from now on."""
        self.step = run.step
        self.evaluator = Evaluator(self.cfg, self.trained, run.step) if self.loss.entries[1:] else None
        self.loader.draw_answers = self.rollout
        if run.rank == 0:
            self.lines.start(run.cfg, run.done)

    def on_step(self, run: Run, record: Record) -> None:
        """Write the answers to the first prompt of the rollout; raise UserError if a server has other weights."""
        if run.rank == 0:
            line: dict[str, Any] = {"step": int(record["step"]), "samples": self.shown}
            self.lines.log(line)
        if self.loss.server and isinstance(self.loss, GrpoConfig) and record.get("gap", 0.0) > MOST_GAP:
            problem = f"log-probabilities of {self.loss.server} and of the trainer differ by {record['gap']:.2f} nats"
            fix = "the server has other weights or another model; start it again with the model of model.path"
            raise UserError("loss.server", f"{problem} in the mean: {fix}")

    def on_stop(self, run: Run) -> None:
        """Write the rest of the file, which a full disk may have refused before."""
        if run.rank == 0:
            self.lines.close(False)

    def rollout(self, rows: Ids, before: int, steps: int) -> Iterator[Rollout]:
        """Yield the batches of some steps, with answers to the prompts `rows`, before which there were others."""
        answers = self.draw(rows, before)
        texts = [self.tokenizer.decode(answer.ids[: len(answer.ids) - answer.ended]) for answer in answers]
        repeated = np.repeat(rows, self.loss.group_size).tolist()
        scores = self.score([self.rows.records[row] for row in repeated], texts)
        prompts = [self.rows.prompts[row].ids for row in repeated]
        self.shown = samples(self.tokenizer.decode(prompts[0]), texts[: self.loss.group_size], scores)
        batch, logs = answer_rows(prompts, answers, self.rows.seq_len)
        if isinstance(self.loss, GrpoConfig):
            batch |= {"sampled": logs, "advantages": advantages(self.loss, total(scores)).astype(np.float32)}
        values = {name: torch.from_numpy(value) for name, value in batch.items()}
        size = len(answers) // steps
        parts = [slice(first, first + size) for first in range(0, len(answers), size)]
        batches = [{name: value[part] for name, value in values.items()} for part in parts]
        batches = self.evaluator(batches) if self.evaluator else batches
        for part, of_step in zip(parts, batches, strict=True):
            numbers = {
                **of_rewards({name: rewards[part] for name, rewards in scores.items()}, self.loss.group_size),
                **of_answers(answers[part]),
            }
            yield Rollout(of_step, int((of_step["documents"] != PADDING_DOCUMENT).sum()), numbers)

    def draw(self, rows: Ids, before: int) -> list[Drawn]:
        """Return the answers to prompts, group by group."""
        prompts = [self.rows.prompts[row] for row in rows]
        return self.sampler(self.step, [prompt._replace(ends=prompt.ends | self.ends) for prompt in prompts], before)

    def score(self, records: list[dict[str, Any]], texts: list[str]) -> Scores:
        """Return the rewards of answers by each function; raise UserError on all ranks if one is none."""
        return try_on_rank_0(
            lambda: {name: checked(name, reward(records, texts), texts) for name, reward in self.rewards.items()}
        )


def samples(prompt: str, texts: Sequence[str], scores: Scores) -> list[dict[str, Any]]:
    """Return the answers to the first prompt as a line of samples.jsonl has them."""
    shown: list[dict[str, Any]] = [{"prompt": prompt, "text": text} for text in texts]
    return [{**sample, "reward": float(reward)} for sample, reward in zip(shown, total(scores))] if scores else shown


def of_answers(answers: Sequence[Drawn]) -> dict[str, float]:
    """Return metrics of a step's answers.

    `answer_tokens` is the mean length, `cut` the share of answers without an end, and `entropy` the mean over tokens of
    the sampler's, in nats.
    """
    sizes = [len(answer.ids) for answer in answers]
    return {
        "answer_tokens": float(np.mean(sizes)),
        "cut": float(np.mean([not answer.ended for answer in answers])),
        "entropy": float(np.average([answer.entropy for answer in answers], weights=sizes)),
    }


# ---- rewards -------------------------------------------------------------------------------------------


def total(scores: Scores) -> NDArray[np.float64]:
    """Return the sum of the rewards by all functions, [answers]."""
    return np.sum([*scores.values()], axis=0)


def of_rewards(scores: Scores, group_size: int) -> dict[str, float]:
    """Return metrics of a step's rewards; none without reward functions.

    `reward` is the mean, and `reward_std` the mean standard deviation of groups. With several functions, `reward/NAME`
    is the mean of one.
    """
    if not scores:
        return {}
    several = {f"reward/{name}": float(values.mean()) for name, values in scores.items()} if len(scores) > 1 else {}
    groups = total(scores).reshape(-1, group_size)
    return {"reward": float(groups.mean()), "reward_std": float(groups.std(1, ddof=1).mean()), **several}


def reward_function(name: str) -> Callable[..., Any]:
    """Return the function of a dotted name; raise UserError if it cannot be imported."""
    try:
        return function({"_target_": name}, "rewards")
    except UserError as error:
        raise UserError(f"rewards={name}", error.message) from error


def advantages(cfg: GrpoConfig, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the advantages of answers, [answers]: section 4.1.2 of arXiv:2402.03300."""
    groups = rewards.reshape(-1, cfg.group_size)
    centred = groups - groups.mean(1, keepdims=True)
    scaled = centred / (groups.std(1, ddof=1, keepdims=True) + EPSILON) if cfg.scale_rewards else centred
    return scaled.ravel()


def checked(name: str, rewards: Any, answers: Sequence[str]) -> NDArray[np.float64]:
    """Return a function's rewards, [answers]; raise UserError unless it returns one finite number for each answer."""
    where = f"rewards={name}"
    try:
        values = np.array([float(reward) for reward in rewards])
    except (TypeError, ValueError) as error:
        raise UserError(where, f"returns {type(rewards).__name__}: {error}; it must be a list of numbers") from error
    if len(values) != len(answers):
        raise UserError(where, f"returns {len(values)} rewards for {len(answers)} answers; it must be one for each")
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        text = json.dumps(answers[first][:80], ensure_ascii=False)
        raise UserError(where, f"returns {values[first]} for the answer {text}; rewards must be finite")
    return values


# ---- log-probabilities of the trainer --------------------------------------------------------------------


class Evaluator:
    """A compiled program for log-probabilities of answers, under the weights of a step and those that it began with."""

    def __init__(self, cfg: Config, trained: Subject, step: Step):
        assert isinstance(cfg.loss, GrpoConfig)
        announce("compiling the log-probabilities of answers")
        self.step, self.names = step, cfg.loss.entries[1:]
        shape = cfg.train.global_batch_size, cfg.train.seq_len
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in INPUTS}
        loss = partial(answer_logs, trained.logits, "logs", cfg.loss.temperature)
        self.program = evaluating_step(cfg, trained, loss, batch)
        first_values = {name: state.local for name, state in self.program.state.items()}
        self.values = {"old": {name: step.state[name].local for name in first_values}, "reference": first_values}
        assert all(step.state[name].spec == state.spec for name, state in self.program.state.items())

    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return batches with the entries that the loss needs, fp32 [B, T] each."""
        added: list[Batch] = [{} for _ in batches]
        for name in self.names:
            for tensor, local in self.values[name].items():
                self.program.state[tensor].local = local
            for entries, batch in zip(added, batches, strict=True):
                inputs = {entry: batch[entry] for entry in INPUTS}
                entries[name] = self.program.rows(inputs)["logs"].float()
        return [{**batch, **entries} for batch, entries in zip(batches, added, strict=True)]
