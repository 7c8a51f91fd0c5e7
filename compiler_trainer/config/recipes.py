"""A recipe in a file of one's own, `recipe=runs/plan/plan.yaml`, as a choice that hydra finds."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.config import yamls
from compiler_trainer.config.errors import UserError

GROUP, ENDING = "recipe", ".yaml"
SEARCH = "hydra.searchpath"


def by_name(arguments: Sequence[str], scratch: Path) -> list[str]:
    """The arguments, with the recipe that is a path named as a choice; its file is copied into a folder of choices.

    Raises UserError where there is no such file, or it holds no options.
    """
    found = list(arguments)
    for i, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        if option.lstrip("+") != GROUP or not value.endswith(ENDING):
            continue
        path = Path(value)
        if not path.is_file():
            raise UserError(GROUP, f"{value} is not a file; name one, or a choice without {ENDING}")
        yamls.check(path)
        folder = scratch / GROUP
        folder.mkdir(parents=True, exist_ok=True)
        name = f"of_{path.stem}"  # no choice that there is may be meant by its own name
        shutil.copyfile(path, folder / f"{name}{ENDING}")
        found[i] = f"{option}={name}"
        found.append(f"{SEARCH}=[file://{scratch.resolve()}]")
    return found
