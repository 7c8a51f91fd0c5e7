"""Where the choices of options are: conf/ beside the package in a clone, inside it where it is installed."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CONF = next(path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if (path / "train.yaml").is_file())
