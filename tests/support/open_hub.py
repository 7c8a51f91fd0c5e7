"""A stand-in for the Hugging Face hub that accepts every upload."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub

Files = dict[str, bytes]


class Hub:
    """A stand-in for HfApi that keeps repositories: name -> file -> bytes."""

    repositories: dict[str, Files] = {}

    def create_repo(self, name, private, exist_ok):
        assert private and exist_ok
        self.repositories.setdefault(name, {".gitattributes": b""})

    def list_repo_files(self, name):
        return [*self.repositories[name]]

    def upload_folder(self, repo_id, folder_path, commit_message):
        files = {f.relative_to(folder_path).as_posix(): f.read_bytes() for f in Path(folder_path).rglob("*") if f.is_file()}
        self.repositories[repo_id] |= files
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")


def accepting(patch: Any) -> dict[str, Files]:
    """Put the stand-in and a token in place; return its repositories, which are empty."""
    patch.setenv("HF_TOKEN", "hf_of_tests")
    patch.setattr(Hub, "repositories", {})
    patch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub.repositories
