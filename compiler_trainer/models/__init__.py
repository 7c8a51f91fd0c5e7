"""Plain single-device models, their losses and their initial weights."""

from compiler_trainer.models.init import initial_parameters
from compiler_trainer.models.llama import Llama, build
from compiler_trainer.models.loss import IGNORED_LABEL, INPUTS, loss_fn

__all__ = ["IGNORED_LABEL", "INPUTS", "Llama", "build", "initial_parameters", "loss_fn"]
