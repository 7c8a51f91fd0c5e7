"""A recipe in a file of one's own, `recipe=job.yaml` or `recipe=RUN/config.yaml`, as a choice that hydra finds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.config import yamls
from compiler_trainer.config.errors import UserError

GROUP, ENDINGS = "recipe", (".yaml", ".yml")
ROOT = "# @package _global_\n"  # tells hydra that the options of a recipe are those of the job
SEARCH = "hydra.searchpath"


def by_name(arguments: Sequence[str], scratch: Path) -> list[str]:
    """Return the arguments with a recipe that is a path named as a choice; the file is copied into a folder of choices.

    Raises UserError if there is no such file, or it holds no options.
    """
    found = list(arguments)
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
        name = f"of_{path.stem}"  # no choice that there is may be meant by its own name
        text = path.read_text(encoding="utf-8")
        (folder / f"{name}.yaml").write_text(text if "@package" in text else ROOT + text, encoding="utf-8")
        found[i] = f"{option}={name}"
        found.append(f"{SEARCH}=[file://{scratch.resolve()}]")
    return found
