"""The packages that only some commands need, and the extra that installs each."""

from __future__ import annotations

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.extras import install

EXTRAS = {"compressed_tensors": "fp8", "gguf": "gguf", "plotly": "plots", "scipy": "budget", "submitit": "sweep"}


def not_installed(error: ModuleNotFoundError) -> UserError:
    """Return the error for a missing package; raise `error` again if no extra installs it."""
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS:
        raise error
    return UserError(name, f"is not installed, but needed here; {install(EXTRAS[name])}")
