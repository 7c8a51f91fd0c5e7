"""YAML config files, checked before use: with aliases, a small file may stand for endlessly many values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import text_of

MOST = 100_000  # values in a file, aliases written out
FLAGS = ("--config-dir", "-cd")
INT, DIGITS = "tag:yaml.org,2002:int", 400  # most digits of a number; a float has at most 309
LEVELS = 3  # of nested groups


def check_folders(arguments: Sequence[str]) -> None:
    """Check the configs in the folders that a command line adds; raise UserError naming the file."""
    values = [after for flag, after in zip(arguments, arguments[1:]) if flag in FLAGS]
    values += [a.partition("=")[2] for a in arguments if a.startswith(f"{FLAGS[0]}=")]
    for folder in map(Path, values):
        for level in range(LEVELS):
            for path in sorted(folder.glob("*/" * level + "*.yaml")):
                check(path)


def check(path: Path) -> None:
    """Raise UserError unless a file holds options, and not too many."""
    try:
        root = yaml.compose(text_of(path), yaml.SafeLoader)
        count = size(root, {}) if root is not None else 0
    except yaml.YAMLError as error:
        raise UserError(str(path), f"is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(str(path), "is nested too deep, or contains itself") from error
    except OverflowError as error:
        raise UserError(str(path), f"{error}, more than a number may have") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UserError(str(path), "holds no options; write name: value")
    if count > MOST:
        raise UserError(str(path), f"has {count:,} values with aliases expanded; at most {MOST:,} are read")


def load(path: Path) -> dict[str, Any]:
    """Return the options in a file; raise UserError naming it."""
    check(path)
    try:
        options: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise UserError(str(path), f"cannot be read as a config: {' '.join(str(error).split())}") from error
    return options


def size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values that a node stands for.

    Raises RecursionError if the node contains itself, OverflowError if a number is too large.
    """
    if isinstance(node, yaml.ScalarNode) and node.tag == INT and len(node.value) > DIGITS:
        raise OverflowError(f"line {node.start_mark.line + 1}: {node.value[:20]}... has {len(node.value):,} digits")
    if id(node) not in sizes:
        sizes[id(node)] = 0
        values = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = [size(n, sizes) for value in values for n in (value if isinstance(value, tuple) else (value,))]
        if 0 in parts:
            raise RecursionError
        sizes[id(node)] = 1 + sum(parts)
    return sizes[id(node)]
