"""Plain single-device models, their loss and their initial weights."""

from __future__ import annotations

import torch

from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models.init import initial_parameters
from compiler_trainer.models.llama import Llama
from compiler_trainer.models.loss import IGNORED_LABEL, loss_fn

__all__ = ["IGNORED_LABEL", "INPUTS", "Llama", "build", "initial_parameters", "loss_fn"]

INPUTS = ("tokens", "labels", "positions", "documents")  # what a model and its loss take of a batch


def build(cfg: ModelConfig, dtype: torch.dtype = torch.float32) -> Llama:
    """The model with parameters of `dtype`, and buffers of their own, on the meta device, where they take no memory."""
    with torch.device("meta"):
        model = Llama(cfg)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
