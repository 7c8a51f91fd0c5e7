"""Optional packages, and the command that installs them: the project is on no package index, but in a folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from compiler_trainer.config.errors import UserError


def install(extra: str) -> str:
    """Return the command that installs an extra, from the folder that this package was installed from if it exists."""
    for folder in folders():
        if (folder / "pyproject.toml").is_file():
            return f"pip install {shlex.quote(f'{folder}[{extra}]')}"
    return f"pip install '.[{extra}]' in a clone of the repository"


def library(name: str, place: str, purpose: str = "") -> Any:
    """Return a module of the extra `hf`; if it is missing, raise UserError at `place` with the command to install."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(place, f"{purpose}needs {name} ({error}); {install('hf')}") from error


def folders() -> Iterator[Path]:
    """Yield the folder of these sources, and the one that pip remembers (PEP 610)."""
    yield Path(__file__).parents[2]
    try:
        origin = json.loads(distribution("compiler-trainer").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return
    address = urlsplit(origin.get("url", ""))
    if address.scheme == "file":
        yield Path(unquote(address.path))
