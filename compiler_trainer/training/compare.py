"""Refuse options of a resumed run that change the meaning of the numbers in its checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from compiler_trainer.config.earlier import MEANING, is_in, understood
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config

FREE = ("model.name", "optim.lr")
SHOWN = 3


def check_meaning(cfg: Config, saved: Mapping[str, Any], where: str) -> None:
    """Raise UserError if options differ from those in `saved`, unless `checkpoint.allow` lists them.

    Only options that change the meaning of the state count; `where` names the checkpoint.
    """
    ours = dict(leaves(dataclasses.asdict(cfg)))
    check_names(cfg, ours)
    try:
        theirs = dict(leaves(dataclasses.asdict(understood(Config, saved, where))))
    except UserError as error:
        raise UserError(where, f"was saved with options that do not exist here: {error}") from error
    free = (*FREE, *cfg.checkpoint.allow)
    names = [name for name in dict.fromkeys([*ours, *theirs]) if is_in(name, MEANING) and not is_in(name, free)]
    names_changed = [name for name in names if ours.get(name) != theirs.get(name)]
    if names_changed:
        changes = [
            f"{name} is {ours.get(name)} here and {theirs.get(name)} in {where}" for name in names_changed[:SHOWN]
        ]
        more = f"; and {len(names_changed) - SHOWN} more" if len(names_changed) > SHOWN else ""
        fix = f"restore the old value, or resume with checkpoint.allow=[{','.join(names_changed)}]"
        raise UserError(names_changed[0], f"{'; '.join(changes).removeprefix(names_changed[0] + ' ')}{more}; {fix}")


def check_names(cfg: Config, options: Mapping[str, Any]) -> None:
    """Raise UserError if `checkpoint.allow` lists something that is not an option."""
    for name in cfg.checkpoint.allow:
        if name != "data" and not any(is_in(option, (name,)) for option in options):
            raise UserError("checkpoint.allow", f"{name} is not an option of this run")


def leaves(options: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every option in nested groups."""
    for name, value in options.items():
        dotted = f"{where}.{name}" if where else str(name)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, dotted)
        else:
            yield dotted, value
