"""A compiler-first trainer for large language models: `compile_step` is the Python face."""

from compiler_trainer.config.errors import UserError
from compiler_trainer.step.compile import compile_step

__all__ = ["UserError", "compile_step"]
