"""Tokens made before a run: a folder with the volumes that the run would make, and their manifest.

<DIR>/  tokens.json  <volume>/ ...
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import is_remote, json_of, write_atomically
from compiler_trainer.config.jobs import as_override
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data.sources import source_of
from compiler_trainer.data.stored import Share, Tokens, folders_of, make_share, summary
from compiler_trainer.data.tokenizers import Tokenizer, tokenizer_of
from compiler_trainer.data.worker import make_recipe
from compiler_trainer.places.cache import Cache, cache_of, folder_name
from compiler_trainer.places.copies import copy_files
from compiler_trainer.places.folders import StoredFolder, load_folder
from compiler_trainer.places.store import Place

FILE = "tokens.json"


@dataclass(frozen=True)
class Volume:
    """A volume: its folder's name and the counts of its content."""

    folder: str
    tokens: int
    documents: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The facts about tokens that training needs; `digest` depends on all tokens.

    `opening` are the ids before each text, `end_of_document` the id after each document, `templates` a digest of chat
    templates; all are None in manifests of earlier versions, and the last one without `chat`.
    """

    tokens: int
    documents: int
    digest: str
    tokenizer: str
    tokenizer_digest: str
    chat: bool
    volumes: tuple[Volume, ...]
    pairs: bool = False
    opening: tuple[int, ...] | None = None
    end_of_document: int | None = None
    train_on: str = "all"
    records: str = "documents"
    labels: tuple[str, ...] = ()
    margins: bool = False
    templates: str | None = None


def write(cfg: DataConfig, out: Path, share: Share) -> Tokens | None:
    """Tokenize a share of the only source of `cfg` into `out`; return its tokens, or None while shares are missing.

    Raises UserError.
    """
    if cfg.sources:
        fix = "tokenize each into its own folder, and list these: {name: tokens, tokens: DIR, weight: 0.7}"
        raise UserError("data.sources", f"are several; {fix}")
    if cfg.images_per_row:
        raise UserError("data.images_per_row", "is for runs, which store images with their tokens; set it to 0")
    if cfg.stream:
        raise UserError("data.stream", "reads files without storing their tokens; set it to false to store them")
    if cfg.tokens is not None:
        raise UserError("data.tokens", "are already tokens; give the text to tokenize")
    tokenizer = tokenizer_of(cfg)
    recipe = make_recipe(cfg, cfg, tokenizer)
    source = source_of(cfg, cfg.seed, cache_of(cfg))
    check_free(out, folders_of(source, recipe, tokenizer.digest, out))
    tokens = make_share(source, recipe, tokenizer.digest, out, share)
    if tokens is not None:
        write_atomically(out / FILE, json.dumps(dataclasses.asdict(manifest_of(cfg, tokens, tokenizer)), indent=1))
    return tokens


def check_free(out: Path, volumes: list[Path]) -> None:
    """Raise UserError if a folder has a manifest of other volumes."""
    if (out / FILE).exists() and [volume.folder for volume in read(out).volumes] != [v.name for v in volumes]:
        fix = "name another folder, or delete it"
        raise UserError(
            "--out", f"{out} holds tokens of other data, other options, or earlier versions of files; {fix}"
        )


def manifest_of(cfg: DataConfig, tokens: Tokens, tokenizer: Tokenizer) -> Manifest:
    """Return the manifest of complete tokens."""
    summaries = [(volume.folder.name, summary(volume)) for volume in tokens.volumes]
    volumes = tuple(Volume(name, facts.tokens, facts.documents, facts.digest) for name, facts in summaries)
    total = tokens.holds
    opening, end = tuple(tokenizer.settings.opening), tokenizer.end_of_document
    kind = cfg.train_on, cfg.records, cfg.labels, cfg.margins, digest_of_templates(tokenizer) if cfg.chat else None
    settings = cfg.tokenizer, tokenizer.digest, cfg.chat, volumes, cfg.pairs, opening, end, *kind
    return Manifest(total.tokens, total.documents, total.digest, *settings)


def digest_of_templates(tokenizer: Tokenizer) -> str:
    """Return a digest of a tokenizer's chat templates."""
    return folder_name([tokenizer.settings.templates])[:16]


def folder_of(name: str, cache: Cache) -> Path:
    """Return the folder of tokens on this machine; tokens in a store are copied first."""
    return copy_files(Place(name), Place(name).files(), cache) if is_remote(name) else Path(name).expanduser()


def open_folder(folder: Path, tokenizer: Tokenizer, cfg: DataConfig) -> Tokens:
    """Return the tokens of a folder, which may have been moved.

    Raises UserError if they are incomplete or were made with other options.
    """
    manifest = read(folder)
    if manifest.end_of_document is None and manifest.tokenizer != "bytes":
        fix = "run compiler-trainer tokenize again"
        raise UserError(
            "data.tokens", f"{folder} is of an earlier version, which did not record how texts begin; {fix}"
        )
    if manifest.tokenizer_digest != tokenizer.digest:
        problem = f"is {cfg.tokenizer}, but {folder} was made with {manifest.tokenizer}"
        raise UserError("data.tokenizer", f"{problem}, which differs from it; set it to that one")
    for name in ("chat", "pairs", "train_on", "records", "labels", "margins"):
        theirs, ours = (getattr(options, name) for options in (manifest, cfg))
        if theirs != ours:
            there, here = as_override(theirs), as_override(ours)
            raise UserError(f"data.{name}", f"is {here}, but {folder} was made with {there}; set it to {there}")
    if manifest.templates not in (None, digest_of_templates(tokenizer)):
        fix = "set it to that one's, or run compiler-trainer tokenize again"
        raise UserError("data.tokenizer", f"has another chat template than the one that made {folder}; {fix}")
    check_borders(manifest, folder, tokenizer)
    return Tokens(folder, [volume_of(folder, volume) for volume in manifest.volumes])


def check_borders(manifest: Manifest, folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if the documents in a folder begin or end with other tokens than the options ask for."""
    if manifest.end_of_document is None:
        return
    names = tokenizer.name_of
    if manifest.end_of_document != tokenizer.end_of_document:
        problem = f"is {names(tokenizer.end_of_document)}, but documents in {folder} end with"
        raise UserError("data.eos_token", f"{problem} {names(manifest.end_of_document)}; set it to that")
    if not manifest.chat and tuple(manifest.opening or ()) != tuple(tokenizer.settings.opening):
        file_text, option_text = (
            "".join(map(names, ids)) or "nothing" for ids in (manifest.opening or (), tokenizer.settings.opening)
        )
        fix = f"set it to {'true' if manifest.opening else 'false'}"
        problem = f"puts {option_text} before a text, but {folder} was made with {file_text}"
        raise UserError("data.add_bos_token", f"{problem}; {fix}")


def volume_of(folder: Path, volume: Volume) -> StoredFolder:
    """Return a volume that a manifest names; raise UserError if it is missing or was changed."""
    stored = load_folder(folder / volume.folder, is_moved=True)
    if stored is None or summary(stored).digest != volume.digest:
        fix = "copy it again, or run compiler-trainer tokenize again"
        raise UserError(str(folder / volume.folder), f"is missing, truncated or changed; {fix}")
    return stored


def read(folder: Path) -> Manifest:
    """Return the manifest of a folder; raise UserError if there is none."""
    if not (folder / FILE).exists():
        hint = "compiler-trainer tokenize --out writes it when everything is tokenized"
        raise UserError("data.tokens", f"{folder} has no {FILE}; {hint}")
    return build(Manifest, json_of(folder / FILE, Manifest))
