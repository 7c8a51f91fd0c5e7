"""The folder with the choices of options: conf/ next to the package in a clone, inside it if installed."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CONF = next(path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if (path / "train.yaml").is_file())
