"""Plain single-device models, their loss and their initial weights."""

from __future__ import annotations

import torch

from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models.init import initial_parameters
from compiler_trainer.models.llama import Llama
from compiler_trainer.models.loss import IGNORED_LABEL, loss_fn

__all__ = ["IGNORED_LABEL", "INPUTS", "Llama", "build", "initial_parameters", "loss_fn"]

INPUTS = ("tokens", "labels", "positions", "documents")  # what a model and its loss take of a batch


def build(cfg: ModelConfig) -> Llama:
    """The model on the meta device, where its parameters take no memory."""
    with torch.device("meta"):
        return Llama(cfg)
