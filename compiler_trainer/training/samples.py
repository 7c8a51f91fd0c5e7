"""Generate from the prompts at each evaluation: on the console, in samples.jsonl, and for TensorBoard.

The full model is gathered on rank 0, in host memory, and copied to its GPU if there is room; other ranks wait.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compiler_trainer.checkpoint.load import MODEL
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.data.prompts import Prompt, prompt_of
from compiler_trainer.data.tokenizers import tokenizer_of
from compiler_trainer.models.sampling import Sampling, check_prompt, continued, in_use
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.step import Step
from compiler_trainer.training.callbacks import Callback, Run
from compiler_trainer.training.loggers import Logger
from compiler_trainer.training.metrics import JsonLines, Record, TensorBoard

FILE = "samples.jsonl"
ROOM = 1.5  # free GPU memory needed to generate, in sizes of the weights


class SampleLines(JsonLines):
    """The file `samples.jsonl`: one JSON object per evaluation."""

    name, kind = FILE, dict[str, Any]


class Samples(Callback):
    """A callback that continues each of `eval.prompts`, with the same random draws each time.

    Raises UserError if the model cannot take a prompt.
    """

    def __init__(self, cfg: Config, trained: Subject, loggers: Sequence[Logger]):
        self.cfg, self.trained, self.tokenizer, self.lines = cfg, trained, tokenizer_of(cfg.data), SampleLines()
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
        weights = on_rank_0(run.step, run.rank)
        if run.rank != 0:
            return
        module = fill(copy.deepcopy(self.trained.module), weights.items())
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


def on_rank_0(step: Step, rank: int) -> dict[str, Tensor]:
    """Return full parameters and buffers in host memory on rank 0, an empty dict elsewhere; all ranks must call it."""
    weights = {}
    for name in (name for name in step.state if name.startswith(MODEL)):
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
