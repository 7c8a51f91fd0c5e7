"""A compiler-first trainer for large language models; its Python interface is `Trainer` and `compile_step`."""

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from compiler_trainer.config.errors import UserError

if TYPE_CHECKING:
    from compiler_trainer.api import Trainer
    from compiler_trainer.step.compile import compile_step
    from compiler_trainer.training.callbacks import Callback, Run
    from compiler_trainer.training.loggers import Logger, MLflow, WandB

BEGAN = time.perf_counter()  # when this process began to import the package
PLACES = {
    "Trainer": "api",
    "compile_step": "step.compile",
    "Callback": "training.callbacks",
    "Run": "training.callbacks",
    "Logger": "training.loggers",
    "MLflow": "training.loggers",
    "WandB": "training.loggers",
}
__all__ = ["Callback", "Logger", "MLflow", "Run", "Trainer", "UserError", "WandB", "compile_step"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that processes that only read text need no torch."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"compiler_trainer.{PLACES[name]}"), name)
