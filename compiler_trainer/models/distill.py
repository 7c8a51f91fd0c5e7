"""Distillation: a student learns the next-token distributions of a frozen teacher, computed in the same program.

    student                    model.layers.0...           trained
    student.teacher.model      teacher.model.layers.0...   frozen, in evaluation mode

The teacher is a child of the student, so that meshes and casts apply to it as to any frozen weights. The student's
names do not change. Shapes: B sequences, T tokens, V = vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DistillationConfig
from compiler_trainer.models.loss import IGNORED_LABEL, cross_entropy, widened
from passes.ir.spec import Value

Logits = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
TEACHER = "teacher"  # the student's child
PREFIX = f"{TEACHER}.model."  # of the names of the teacher's parameters and buffers
TOKENIZER = "tokenizer.json"
MEANING = ("model", "added_tokens")  # entries of a tokenizer.json that give ids their meaning


class Teacher(nn.Module):
    """A frozen model that stays in evaluation mode, whatever the mode of its parent."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> Teacher:
        """Set evaluation mode."""
        return super().train(False)


def with_teacher(student: nn.Module, model: nn.Module) -> nn.Module:
    """Return a module like the student, with the same parameters, and with a model as its frozen teacher."""
    whole = copy.copy(student)
    whole._modules = {**student._modules, TEACHER: Teacher(model)}
    return whole


def state_names(whole: nn.Module) -> frozenset[str]:
    """Return the names of the teacher's parameters and buffers."""
    teacher = whole.get_submodule(TEACHER)
    tensors = (*teacher.named_parameters(TEACHER), *teacher.named_buffers(TEACHER))
    return frozenset(name for name, _ in tensors)


def named(values: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    """Yield (name, value) of the teacher's parameters and buffers, with the names that `state_names` has."""
    return ((f"{PREFIX}{name}", value) for name, value in values)


# ---- the loss ------------------------------------------------------------------------------------------


def distillation_loss(
    student: Logits, teacher: Logits, cfg: DistillationConfig, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss in nats, a mean over labelled tokens, and its two terms if cross-entropy is one of them.

    It is (1 - ce_weight) * temperature^2 * divergence + ce_weight * cross-entropy (section 2 of arXiv:1503.02531), both
    functions of (model, batch) to logits [B, T, V].
    """
    logits, labels = student(model, batch), batch["labels"]
    divergences = divergence(cfg, logits, teacher(model.get_submodule(f"{TEACHER}.model"), batch))
    has_label = labels != IGNORED_LABEL
    loss = cfg.temperature**2 * (torch.where(has_label, divergences, 0.0).sum() / has_label.sum())
    if not cfg.ce_weight:
        return loss, {}
    terms = {"divergence": loss, "cross_entropy": cross_entropy(logits, labels)}
    mixed = (1 - cfg.ce_weight) * terms["divergence"] + cfg.ce_weight * terms["cross_entropy"]
    return mixed, {name: term.detach() for name, term in terms.items()}


def divergence(cfg: DistillationConfig, student: Tensor, teacher: Tensor) -> Tensor:
    """Return the KL divergence of each token in nats, fp32 or fp64 [B, T], from logits [B, T, V].

    Forward is KL(teacher || student), reverse KL(student || teacher), of distributions at the temperature.
    """
    ours, theirs = ((widened(logits) / cfg.temperature).log_softmax(-1) for logits in (student, teacher))
    first, second = (theirs, ours) if cfg.divergence == "forward" else (ours, theirs)
    return (first.exp() * (first - second)).sum(-1)


# ---- the vocabulary ------------------------------------------------------------------------------------


def check_vocabulary(student: Path, teacher: Path, sizes: tuple[int, int], name: str) -> None:
    """Raise UserError unless two folders have vocabularies of one size and tokenizers with the same ids."""
    fix = "use a teacher of the same family, whose token ids mean the same"
    if sizes[0] != sizes[1]:
        problem = f"{name} has a vocabulary of {sizes[1]:,} tokens, the student one of {sizes[0]:,}"
        raise UserError("loss.teacher", f"{problem}; {fix}")
    files = [folder / TOKENIZER for folder in (student, teacher)]
    if absent := [str(file) for file in files if not file.is_file()]:
        problem = f"{absent[0]} is missing, so the token ids of teacher and student cannot be compared"
        raise UserError("loss.teacher", f"{problem}; save the tokenizer there")
    if ids_of(files[0]) != ids_of(files[1]):
        raise UserError("loss.teacher", f"{name} has another tokenizer.json than the student; {fix}")


def ids_of(file: Path) -> Any:
    """Return the entries of a tokenizer.json that map text to ids."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return {name: content.get(name) for name in MEANING}
