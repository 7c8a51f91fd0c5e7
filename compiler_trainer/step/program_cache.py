"""Programs of earlier starts, stored under the key of everything they are made from.

They are in `programs` of the compiler's cache folder: one file for a job's programs, one for its graph dumps. A file
contains text, and is parsed as text. A folder that `compile` filled ahead of a job has the same layout; if it has only
programs of other jobs, the job is refused with the differences.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import LowerConfig
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.captured import Captured, Reporter, StepPrograms
from compiler_trainer.step.exported import Exported
from compiler_trainer.step.program_key import ProgramKey, Unkeyed, differences, key_of
from compiler_trainer.step.ranks import gather, is_first_of_machine
from passes.ir import ir
from passes.ir.saved import Unreadable, Unwritable, read, to_text
from passes.lower.store import Store
from passes.torch_private import compiler_folder

GRAPHS = ".graphs"  # the entry with the dumps of a job's programs
KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """A job's place in the cache: its key, or the reason why it has none, and its programs if they are stored."""

    key: ProgramKey | None
    reason: str = ""
    programs: StepPrograms | None = None


@dataclass(frozen=True)
class ProgramCache:
    """A store of programs; passes dump their graphs into the folder `graphs` unless it is None.

    Either all ranks of a job read its programs, or none does. With `is_ahead`, the job must be in the store.
    """

    graphs: Path | None = None
    store: Store = field(default_factory=lambda: Store(compiler_folder() / "programs"))
    is_ahead: bool = False

    @classmethod
    def of(cls, lower: LowerConfig, graphs: Path | None = None) -> ProgramCache:
        """Return the cache of `lower.programs`, or the compiler's own; raise UserError if the folder is missing."""
        if lower.programs is None:
            return cls(graphs)
        folder = Path(lower.programs).expanduser()
        if not folder.is_dir():
            fix = "create it: compiler-trainer compile --out FOLDER with the options of the job"
            raise UserError("lower.programs", f"there is no folder {folder}; {fix}")
        return cls(graphs, Store(folder), is_ahead=True)

    def look_up(self, request: CompileRequest, exported: Exported) -> Entry:
        """Return a job's entry; every rank must call this. Raises UserError if the job must be stored and is not."""
        try:
            key, reason = key_of(request, exported), ""
        except Unkeyed as error:
            key, reason = None, str(error)
        programs = self.find(key.digest if key else None)
        if self.is_ahead and programs is None:
            raise UserError("lower.programs", self.why_missing(key, reason))
        return Entry(key, reason, programs)

    def find(self, digest: str | None) -> StepPrograms | None:
        """Return the programs of a key; None if any rank lacks them or has others."""
        packed = self.store.get(digest) if digest else None
        dumps = self.store.get(f"{digest}{GRAPHS}") if packed and self.graphs else b""
        programs = None if packed is None or dumps is None else self.unpack(packed)
        if len(set(gather(hashlib.sha256(packed).hexdigest() if programs and packed else ""))) > 1:
            return None
        if programs and self.graphs and dumps:
            for name, text in json.loads(zlib.decompress(dumps)).items():
                (self.graphs / name).write_text(text)
        return programs

    def unpack(self, packed: bytes) -> StepPrograms | None:
        """Return the programs in a file; None, with a warning, if this process cannot read them."""
        content = json.loads(zlib.decompress(packed))
        try:
            programs = read(content["programs"])
        except Unreadable as error:
            warnings.warn(f"a stored program cannot be read ({error}); it is compiled again", stacklevel=2)
            return None
        report = Reporter(passes=content["passes"], notes=content["notes"], key=content["key"], is_read=True)
        report.read_from = str(self.store.folder)
        return StepPrograms({name: Captured(program, ir.Context(None)) for name, program in programs.items()}, report)

    def keep(self, entry: Entry, result: StepPrograms) -> str:
        """Store programs, on one rank of each machine; return why they cannot be stored, or an empty string."""
        if entry.key is None:
            return entry.reason
        programs = {name: captured.program for name, captured in result.programs.items()}
        try:
            text = to_text(programs)
        except Unwritable as error:
            return str(error)
        result.report.key = digest = entry.key.digest
        if not is_first_of_machine():
            return ""
        content: dict[str, Any] = {"key": digest, "parts": dict(entry.key.parts), "programs": text}
        content |= {"passes": result.report.passes, "notes": result.report.notes}
        if self.graphs and self.graphs.is_dir():
            dumps = {path.name: path.read_text() for path in sorted(self.graphs.iterdir())}
            self.store.put(digest + GRAPHS, zlib.compress(json.dumps(dumps).encode()))
        self.store.put(digest, zlib.compress(json.dumps(content).encode()))
        return ""

    def why_missing(self, key: ProgramKey | None, reason: str) -> str:
        """Return why a folder that was filled ahead lacks a job: the differences from its most similar job."""
        folder = self.store.folder
        if key is None:
            return f"the program cannot be compiled ahead ({reason}); remove lower.programs"
        differing = [list(differences(parts, key.parts)) for parts in self.stored_parts()]
        if not differing:
            return f"{folder} contains no program; fill it again: compiler-trainer compile --out FOLDER"
        if not (nearest := min(differing, key=len)):
            return f"{folder} is incomplete; copy it again to the nodes of all ranks"
        fix = "run the compiled job, or compile the job that is run"
        return f"{folder} contains the program of another job: {'; '.join(nearest)}; {fix}"

    def stored_parts(self) -> Iterator[dict[str, str]]:
        """Yield the parts of each stored key."""
        for path in sorted(self.store.folder.iterdir()):
            if KEY.fullmatch(path.name) and (packed := self.store.get(path.name)):
                yield json.loads(zlib.decompress(packed))["parts"]
