"""Compare the captured graph with the model before a job starts, unless the tests cover this kind of model.

A small model is compared by value on two samples of the first batch, a large one by the parameters that get gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from compiler_trainer.capture.compare import captured_difference
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, FolderConfig, ModelConfig
from compiler_trainer.models.folder import config_of
from compiler_trainer.models.place import folder_of
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.ranks import from_rank_0

TESTED = frozenset(
    "deepseek_v3 gemma gemma3_text gpt2 llama llama4_text mixtral qwen3 qwen3_moe".split()
)  # model types of transformers that tests compare by value
MOST_WORK = 1e10  # parameters times tokens; eager PyTorch takes a few seconds for it
ROWS = 2


def is_tested(cfg: Config) -> bool:
    """Return True if tests compare models and losses of this kind with eager PyTorch."""
    if cfg.has_own_loss:
        return False
    if isinstance(cfg.model, FolderConfig):
        return config_of(folder_of(cfg)).model_type in TESTED
    return isinstance(cfg.model, ModelConfig)


def check_capture(cfg: Config, trained: Subject, batch: Callable[[], Mapping[str, Tensor]]) -> str:
    """Return a note if model and graph cannot be compared, otherwise an empty string.

    Raises UserError on all ranks if they differ.
    """
    if is_tested(cfg) or cfg.passes.verify == "none":
        return ""
    difference, note = from_rank_0(lambda: find_difference(trained, batch()))
    if difference:
        fix = "report this model to us, or set passes.verify=none to train with the graph as it is"
        raise UserError("model", f"{difference}: the captured graph differs from eager PyTorch; {fix}")
    return note


def find_difference(trained: Subject, batch: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return (the first difference between model and graph, a note if they cannot be compared), empty if there is none.

    A model that cannot be captured is refused later, with the reason.
    """
    rows = {name: value[:ROWS].cpu() for name, value in batch.items()}
    work = sum(p.numel() for p in trained.module.parameters()) * max(value.numel() for value in rows.values())
    model = copy.deepcopy(trained.module).train()
    try:
        if work <= MOST_WORK:
            fill(model, ((name, torch.as_tensor(value[()])) for name, value in trained.initial()))
        return captured_difference(model, trained.loss, rows, values=work <= MOST_WORK), ""
    except UserError:
        return "", ""
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        return "", f"note: the captured graph is not compared with the model, which does not run on the CPU ({reason})"
