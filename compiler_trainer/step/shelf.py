"""Programs that earlier starts made: read where all that they were made of is as it was, made anew where it is not.

They lie in `programs` of the compiler's cache, a file for the programs of a job and one for its graph dumps, under the
digest of `made_of.py`. What a file holds is text, read as such. A folder that `compile` made ahead of a job is laid out
the same; what it holds of other jobs is refused, with what differs.
"""

from __future__ import annotations

import json
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from os.path import commonprefix
from pathlib import Path
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import LowerConfig
from compiler_trainer.step.agree import difference
from compiler_trainer.step.given import Captured, Reporter
from compiler_trainer.step.made_of import MadeOf, digest
from compiler_trainer.step.ranks import gather, is_first_of_machine
from compiler_trainer.step.sources import Unkeyed
from passes.lower.store import Store
from passes.program import ir
from passes.program.abstract_eval import LASTING
from passes.program.printer import print_program
from passes.program.saved import Unreadable, Unwritable, operators_in, read, written
from passes.program.torch_private import compiler_folder

GRAPHS = ".graphs"  # the entry with the dumps of a job's programs
KEY = re.compile(r"[0-9a-f]{64}")
SHARED = re.compile(r"#\d+")  # what a text refers to, by a number that another part may shift
SHOWN = 30  # characters before and behind where texts part
OF_TORCH = LASTING - {"ct"} | {"prim", "quantized", "inductor", "higher_order", "rngprims"}
Made = tuple[dict[str, Captured], Reporter]


@dataclass(frozen=True)
class Shelf:
    """Where programs are kept; `graphs` is the folder into which passes dump theirs, None where they dump none.

    The ranks of a job all read, or none does. With `is_ahead` the job has to be one that the store holds.
    """

    graphs: Path | None = None
    store: Store = field(default_factory=lambda: Store(compiler_folder() / "programs"))
    is_ahead: bool = False

    @classmethod
    def of(cls, lower: LowerConfig, graphs: Path | None = None) -> Shelf:
        """What `lower.programs` names, else the compiler's cache; raises UserError."""
        if lower.programs is None:
            return cls(graphs)
        folder = Path(lower.programs).expanduser()
        if not folder.is_dir():
            fix = "make it: compiler-trainer compile --out FOLDER with the options of the job"
            raise UserError("lower.programs", f"there is no folder {folder}; {fix}")
        return cls(graphs, Store(folder), is_ahead=True)

    def find(self, key: str | None) -> Made | None:
        """The programs under a key, None where a rank has none or others."""
        packed = self.store.get(key) if key else None
        dumps = self.store.get(f"{key}{GRAPHS}") if packed and self.graphs else b""
        found = None if packed is None or dumps is None else unpacked(packed)
        if len(set(gather(digest(packed.decode("latin1")) if found and packed else ""))) > 1:
            return None
        if found and self.graphs and dumps:
            for name, text in json.loads(zlib.decompress(dumps)).items():
                (self.graphs / name).write_text(text)
        return found

    def others(self) -> Iterator[dict[str, str]]:
        """What the programs that are kept here are made of."""
        for path in sorted(self.store.folder.iterdir()):
            if KEY.fullmatch(path.name) and (packed := self.store.get(path.name)):
                yield json.loads(zlib.decompress(packed))["made_of"]

    def put(self, made_of: MadeOf, made: Made) -> None:
        """Keep programs, one rank of a machine for all; raises Unwritable."""
        key, (programs, report) = made_of.key, made
        text = written({name: captured.program for name, captured in programs.items()})
        report.key = key
        if not is_first_of_machine():
            return
        spaces = sorted({op.namespace for op in operators_in(each.program for each in programs.values())})
        kept: dict[str, Any] = {"key": key, "made_of": dict(made_of.parts), "spaces": spaces, "programs": text}
        kept |= {"passes": report.passes, "notes": report.notes}
        if self.graphs and self.graphs.is_dir():
            dumps = {path.name: path.read_text() for path in sorted(self.graphs.iterdir())}
            self.store.put(key + GRAPHS, zlib.compress(json.dumps(dumps).encode()))
        self.store.put(key, zlib.compress(json.dumps(kept).encode()))


def unpacked(packed: bytes) -> Made | None:
    """The programs of an entry, None, and a word of it, where they cannot be read in this process."""
    kept = json.loads(zlib.decompress(packed))
    if not OF_TORCH.issuperset(kept["spaces"]):
        import_module("compiler_trainer.pipeline")  # whose files hold our operators and their kernels
    try:
        programs = read(kept["programs"])
    except Unreadable as error:
        warnings.warn(f"a stored program cannot be read ({error}); it is made anew", stacklevel=2)
        return None
    report = Reporter(passes=kept["passes"], notes=kept["notes"], key=kept["key"], is_read=True)
    return {name: Captured(program, ir.Context(None)) for name, program in programs.items()}, report


def stored_or_made(shelf: Shelf | None, what: Callable[[], MadeOf], make: Callable[[], Made], check: bool) -> Made:
    """The programs from the shelf, or made and put there; with `check` they are made, and compared with those there.

    Raises RuntimeError where they differ, UserError where those that were to be made ahead are not there.
    """
    if shelf is None:
        return make()
    began = time.perf_counter()
    made_of, why = keyed(what)
    found = shelf.find(made_of.key if made_of else None)
    if shelf.is_ahead and not found:
        raise UserError("lower.programs", no_program(shelf, made_of, why))
    if found and not check:
        found[1].seconds["program"] = time.perf_counter() - began
        found[1].read_from = str(shelf.store.folder)
        return found
    programs, report = make()
    if made_of and found:
        check_same(made_of.key, found[0], programs)
    elif made_of:
        why = report.time("store", partial(keep, shelf, made_of, programs, report))
    if why:
        report.notes.append(f"the program is not stored: {why}")
    return programs, report


def no_program(shelf: Shelf, made_of: MadeOf | None, why: str) -> str:
    """Why a folder of programs that were made ahead has none for a job: what differs from the nearest that it has."""
    if made_of is None:
        return f"the program cannot be made ahead ({why}); leave lower.programs out"
    apart = [list(differing(parts, made_of.parts)) for parts in shelf.others()]
    if not apart:
        return f"{shelf.store.folder} holds no program; make it anew: compiler-trainer compile --out FOLDER"
    if not (nearest := min(apart, key=len)):
        return f"{shelf.store.folder} does not hold all of it; copy it anew, to the nodes of all ranks"
    fix = "run what was compiled, or compile what is run"
    return f"{shelf.store.folder} holds the program of another job: {'; '.join(nearest)}; {fix}"


def differing(there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    """The parts in which programs differ, by name, with the first place."""
    for name in sorted({*there, *here}):
        a, b = (SHARED.sub("#", parts.get(name, "")) for parts in (there, here))
        if a != b:
            at = len(commonprefix([a, b]))
            yield f"{name} is {around(a, at)} there, {around(b, at)} here"


def around(text: str, at: int) -> str:
    """A text around a place."""
    return f"{'...' * (at > SHOWN)}{text[max(0, at - SHOWN) : at + SHOWN]}{'...' * (len(text) > at + SHOWN)}"


def keyed(what: Callable[[], MadeOf]) -> tuple[MadeOf | None, str]:
    """What a program is made of, or why that cannot be told."""
    try:
        return what(), ""
    except Unkeyed as error:
        return None, str(error)


def keep(shelf: Shelf, made_of: MadeOf, programs: dict[str, Captured], report: Reporter) -> str:
    """Put programs on the shelf; why not, if they cannot be."""
    spaces = {op.namespace for op in operators_in(captured.program for captured in programs.values())}
    if strange := sorted(space for space in spaces - OF_TORCH - {"ct"} if not made_of.sources.defines(space)):
        return f"operators of {', '.join(strange)} are not defined in the files of the model"
    try:
        shelf.put(made_of, (programs, report))
    except Unwritable as error:
        return str(error)
    return ""


def check_same(key: str, stored: Mapping[str, Captured], fresh: Mapping[str, Captured]) -> None:
    """Raises RuntimeError with the first lines in which a stored program differs from one that was made now."""
    for name, (program, _) in fresh.items():
        texts = [print_program(each) for each in (program, stored[name].program)]
        if texts[0] != texts[1]:
            shown = difference(texts[0], texts[1], "made now", "stored")
            raise RuntimeError(f"{name}: the program stored as {key} is not what is made now\n{shown}")
