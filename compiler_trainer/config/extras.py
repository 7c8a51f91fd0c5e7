"""The command that installs optional packages. The project is on no package index: it is installed from a folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install(extra: str) -> str:
    """Return the command that installs an extra, from the folder that this package was installed from if it exists."""
    for folder in folders():
        if (folder / "pyproject.toml").is_file():
            return f"pip install {shlex.quote(f'{folder}[{extra}]')}"
    return f"pip install '.[{extra}]' in a clone of the repository"


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
