"""Repositories of the Hugging Face hub to write into, named as hub:ORG/NAME."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.places.copies import hub_library
from compiler_trainer.places.store import Unreachable

PREFIX = "hub:"
NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
CARD = "README.md"
BESIDE_A_MODEL = {".gitattributes", CARD}  # files that a repository has before a model is in it
NO_RIGHTS = (401, 403)
TOKEN = "set HF_TOKEN to one with write access (huggingface.co/settings/tokens), or run hf auth login"


def is_of_hub(name: str) -> bool:
    """Return True for the name of a repository to write into, hub:ORG/NAME."""
    return name.startswith(PREFIX)


class Repository:
    """A model's repository on the hub; it is created, private, if there is none.

    `file` is the file that will be written, or empty for a whole model. Raises UserError if the name is not ORG/NAME,
    if there is no token or no right to write, or if the file or a model is there already, and Unreachable if the hub
    does not answer.
    """

    def __init__(self, url: str, file: str = ""):
        self.url, self.name = url, url.removeprefix(PREFIX)
        if not NAME.fullmatch(self.name):
            raise UserError(url, "is not a name of the hub; write hub:ORG/NAME, where ORG is an organization or a user")
        hub = hub_library()
        with hub_errors(url):
            if not hub.get_token():
                raise UserError(url, f"cannot be written without a token; {TOKEN}")
            self.api = hub.HfApi()
            self.api.create_repo(self.name, private=True, exist_ok=True)
            self.files = set(self.api.list_repo_files(self.name))
        if further := sorted(self.files & {file} if file else self.files - BESIDE_A_MODEL):
            raise UserError(url, f"has {further[0]} already; name a new {'file' if file else 'repository'}")

    def upload(self, folder: Path, card: str) -> str:
        """Upload a folder's files in one commit, with a model card unless there is one; return the commit's address."""
        if CARD not in self.files:
            (folder / CARD).write_text(card, encoding="utf-8")
        with hub_errors(self.url):
            message = "Upload of a trained model"
            commit = self.api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        return str(commit.commit_url)


@contextmanager
def hub_errors(url: str) -> Iterator[None]:
    """Turn errors of huggingface_hub into UserError: no right to write, a refused name, or no connection."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # from the network, the hub or the disk
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in NO_RIGHTS:
            raise UserError(url, f"the token has no right to write it: {one_line(error)}; {TOKEN}") from error
        if isinstance(error, ValueError):  # a name that the library refuses
            raise UserError(url, f"is refused: {one_line(error)}; choose another name") from error
        fix = "try again, or export into a folder and upload that with hf upload"
        raise Unreachable(url, f"cannot be written: {type(error).__name__}: {one_line(error)}; {fix}") from error


def card_of(metadata: dict[str, Any], text: str) -> str:
    """Return a model card: metadata for the hub's search, and a text."""
    data = hub_library().ModelCardData(**metadata)
    return f"---\n{data.to_yaml()}\n---\n\n{text}"
