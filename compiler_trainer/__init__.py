"""A compiler-first trainer for large language models: `compile_step` is the Python face."""

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from compiler_trainer.config.errors import UserError

if TYPE_CHECKING:
    from compiler_trainer.step.compile import compile_step

BEGAN = time.perf_counter()  # when this process began to import the package
__all__ = ["UserError", "compile_step"]


def __getattr__(name: str) -> Any:
    """`compile_step`, once it is asked for: processes that only read text do without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("compiler_trainer.step.compile").compile_step
