"""Prompts as rows, and batches of answers to them, which the model draws while it trains.

A record of `data.prompts` has a `prompt`, and further fields for the reward functions. The order of prompts, epochs and
resuming are those of any other data; a prompt's draw depends only on the seed and on the number of prompts before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, GrpoConfig, RolloutConfig, SourceConfig
from compiler_trainer.data.chat import ChatTemplate, Prompt, ids_of, to_prompt
from compiler_trainer.data.corpus import Ids, hash_arrays
from compiler_trainer.data.formats import field_messages, names_of, with_system
from compiler_trainer.data.loader import Batch, Loader, Mixture
from compiler_trainer.data.packing import Facts, Rows
from compiler_trainer.data.readers import READERS, ReadOptions
from compiler_trainer.data.records import BadRecord, Conversation, Fields, text_of
from compiler_trainer.data.sources import files_source
from compiler_trainer.data.tokenizers import Tokenizer
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.models.loss import PADDING_DOCUMENT
from compiler_trainer.models.sampling import Drawn
from compiler_trainer.places.cache import Cache

Entries = dict[str, NDArray[Any]]


# ---- from files ----------------------------------------------------------------------------------------


def read_prompts(cfg: Config, tokenizer: Tokenizer, cache: Cache) -> PromptRows:
    """Return the prompts of `data.prompts`; raise UserError naming the record that has none, or one too long."""
    assert isinstance(cfg.loss, RolloutConfig)
    template = ChatTemplate(tokenizer) if cfg.data.chat else None
    options = ReadOptions(Fields("record"), None, tokenizer, cache)
    source = files_source(SourceConfig("text", files=cfg.data.prompts), cfg.data.seed, cache)
    most, records, prompts = cfg.train.seq_len - cfg.loss.answer_tokens, list[dict[str, Any]](), list[Prompt]()
    for record in (record for span in source.spans for record in READERS[span.reader](span, options)):
        try:
            row = record.read().content
            if not isinstance(row, dict) or row.get("prompt") is None:
                raise BadRecord('has no field "prompt", a text or messages')
            prompt = to_prompt(ids_of(prompt_text(row, template), tokenizer), tokenizer)
        except BadRecord as error:
            raise UserError(record.where(), str(error)) from error
        if len(prompt.ids) > most:
            room = f"train.seq_len={cfg.train.seq_len} and loss.answer_tokens={cfg.loss.answer_tokens} leave {most}"
            raise UserError(record.where(), f"has a prompt of {len(prompt.ids)} tokens; {room}: change one of them")
        records.append(row)
        prompts.append(prompt)
    if not records:
        raise UserError("data.prompts", f"{', '.join(cfg.data.prompts)} has no record; give some prompts")
    return PromptRows(records, prompts, cfg.train.seq_len, cfg.loss)


def prompt_text(row: dict[str, Any], template: ChatTemplate | None) -> str:
    """Return the text of a record's prompt; with a template, that of its messages, or of its text as a user's message.

    A template also gets the record's `system` prompt, `tools` and other variables. Raises BadRecord.
    """
    if template is None:
        return text_of(row["prompt"], "prompt")
    messages = with_system(row, field_messages("user", row["prompt"], "prompt"))
    names = names_of(row, Fields("record", names=template.names))
    return template.text(Conversation(messages, names), prompt=True)


class PromptRows(Rows):
    """Rows of one prompt each, with their `records`.

    As a batch, to compile a step for, a row has its prompt as the answer, and if the loss needs them, an advantage of 1
    or -1, and log-probabilities of -1.
    """

    def __init__(
        self, records: Sequence[dict[str, Any]], prompts: Sequence[Prompt], seq_len: int, loss: RolloutConfig
    ):
        self.records, self.prompts, self.seq_len, self.loss = records, prompts, seq_len, loss
        tokens = sum(len(prompt.ids) for prompt in prompts)
        texts = [json.dumps(record, sort_keys=True, default=repr).encode() for record in records]
        arrays = [np.array(prompt.ids) for prompt in prompts] + [np.frombuffer(text, np.uint8) for text in texts]
        self.facts = Facts(len(records), tokens, 0, tokens, hash_arrays(np.array([seq_len]), *arrays))

    def __len__(self) -> int:
        return len(self.records)

    def token_counts(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents."""
        return np.array([len(self.prompts[row].ids) for row in rows])

    def batch(self, rows: Ids) -> Entries:
        """Return the entries of some rows."""
        ids = [self.prompts[row].ids for row in rows]
        texts = [prompt[1:] or prompt for prompt in ids]
        answers = [Drawn(text, np.full(len(text), -1, np.float32), 0.0, True) for text in texts]
        entries, logs = answer_rows([prompt[:1] for prompt in ids], answers, self.seq_len)
        if isinstance(self.loss, GrpoConfig):
            entries["advantages"] = np.where(np.arange(len(rows)) % 2, np.float32(-1), np.float32(1))
        return {**entries, **dict.fromkeys(self.loss.entries, logs)}


# ---- batches of answers --------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """The batch of a step, the number of its tokens without padding, and metrics of its answers."""

    batch: Batch
    tokens: int
    numbers: dict[str, float]


# From prompts' rows, the number of prompts before them, and the number of steps to the steps' rollouts.
Draw = Callable[[Ids, int, int], Iterable[Rollout]]


class Rollouts(Loader):
    """Batches of `group_size` answers to each prompt, drawn by `draw_answers` with the weights of the moment.

    A rollout covers the steps up to the next multiple of `steps_per_rollout`. Before `draw_answers` is set, batches
    have prompts without answers, for which a step is compiled.
    """

    draw_answers: Draw | None = None

    def __init__(self, cfg: Config, rows: Mixture, cache: Cache):
        assert isinstance(cfg.loss, RolloutConfig)
        self.group_size, self.steps = cfg.loss.group_size, cfg.loss.steps_per_rollout
        self.pending: list[Rollout] = []
        super().__init__(rows, cfg.train.global_batch_size // self.group_size, cfg.data.seed, cache)

    def next(self) -> Batch:
        """Return the global batch of the next step, [global_batch_size, seq_len] or [global_batch_size] an entry."""
        taken = sum(self.rows_taken)
        if self.draw_answers is None:
            return self.batch(np.repeat(self.draw(self.rows_taken, self.batch_size)[0], self.group_size))
        if not self.pending:
            steps = self.steps - taken // self.batch_size % self.steps
            rows, _ = self.draw(self.rows_taken, steps * self.batch_size)
            self.pending = list(self.draw_answers(rows, taken, steps))
        batch, self.token_count, self.numbers = self.pending.pop(0)
        self.rows_taken = (taken + self.batch_size,)
        return batch

    def batch(self, rows: Ids) -> Batch:
        """Return all rows of a batch."""
        return {name: torch.from_numpy(array) for name, array in self.rows.batch(rows).items()}

    def load_state_dict(self, state: Any) -> None:
        """Continue from `state`, with new answers."""
        super().load_state_dict(state)
        self.pending = []


def answer_rows(
    prompts: Sequence[list[int]], answers: Sequence[Drawn], seq_len: int
) -> tuple[Entries, NDArray[np.float32]]:
    """Return the entries of a batch of answers to prompts, int64 [B, seq_len] each; other tokens have no labels.

    Also return the sampler's log-probabilities of labels, fp32 [B, seq_len].
    """
    shape = len(prompts), seq_len
    tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
    documents, sampled = np.full(shape, PADDING_DOCUMENT, np.int64), np.zeros(shape, np.float32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        size, first = len(prompt) + len(answer.ids) - 1, len(prompt) - 1
        tokens[row, :size] = [*prompt, *answer.ids[:-1]]
        labels[row, first:size], sampled[row, first:size] = answer.ids, answer.logs
        documents[row, :size] = 0
    positions = np.where(documents == 0, np.arange(seq_len), 0)
    return {"tokens": tokens, "labels": labels, "positions": positions, "documents": documents}, sampled
