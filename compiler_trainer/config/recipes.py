"""A recipe in a user's file, as `recipe=job.yaml` or `recipe=RUN/config.yaml`, turned into a choice for hydra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.config import yamls
from compiler_trainer.config.errors import UserError

GROUP, ENDINGS = "recipe", (".yaml", ".yml")
ROOT = "# @package _global_\n"  # tells hydra that the options of a recipe are those of the job
SEARCH = "hydra.searchpath"


def by_name(arguments: Sequence[str], scratch: Path) -> list[str]:
    """Return the arguments, with a recipe's path replaced by the name of a choice.

    The file is copied into the folder `scratch`, which is added to hydra's search path. Raises UserError if there is no
    such file, or if it holds no options.
    """
    replaced = list(arguments)
    for i, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        if option.lstrip("+") != GROUP or not value.endswith(ENDINGS):
            continue
        path = Path(value)
        if not path.is_file():
            raise UserError(GROUP, f"{value} is not a file; name one, or a choice without {path.suffix}")
        yamls.check(path)
        folder = scratch / GROUP
        folder.mkdir(parents=True, exist_ok=True)
        name = f"of_{path.stem}"  # the prefix keeps it apart from existing choices
        text = path.read_text(encoding="utf-8")
        (folder / f"{name}.yaml").write_text(text if "@package" in text else ROOT + text, encoding="utf-8")
        replaced[i] = f"{option}={name}"
        replaced.append(f"{SEARCH}=[file://{scratch.resolve()}]")
    return replaced
