"""A compiler-first trainer for large language models: `compile_step` is the Python face."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compiler_trainer.errors import UserError

if TYPE_CHECKING:
    from compiler_trainer.compile import compile_step

__all__ = ["UserError", "compile_step"]


def __getattr__(name: str) -> Any:
    """`compile_step` on first use: an error in the options should not wait for torch to be imported."""
    if name == "compile_step":
        from compiler_trainer.compile import compile_step

        return compile_step
    raise AttributeError(f"module 'compiler_trainer' has no attribute {name!r}")
