"""What a run left behind, read from its folder alone: options, report, metrics, and the graph after every pass.

    run = load("runs/2026-01-31_12-00-00")
    last = run.program("step")[-1]
    last.node("all_gather").source

Texts are parsed when first asked for: a stage of 100,000 nodes takes about a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from compiler_trainer.config import yamls
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import json_of, text_of
from compiler_trainer.config.options import Must, convert
from compiler_trainer.config.schema import Steps
from compiler_trainer.training import metrics
from passes.cost.accounting import Accounting
from passes.program import ir

TENSOR = re.compile(r"^(\w+)\[([\d, ]*)\]$")
PLACED = re.compile(r"^(\w+\[[^\]]*\]) (\[.*)$")
OPERAND = re.compile(r'"(?:[^"\\]|\\.)*"|%(\w+)')  # a string may hold anything, so it is passed over
SECTION = re.compile(r"^# (\w+): (.*)$")
OWN = ("mesh", "stage", "folded", "inputs", "outputs", "nodes")  # sections of the program itself
FOLDED = re.compile(r"^# folded: (.*\.(\d+) to .*\.(\d+))$", re.MULTILINE)
CALLS = ("segment", "unfold")  # passes that leave calls of bodies
BODY = re.compile(r"^# body: (\w+), called (\d+) times$")
AXIS = re.compile(r"\b(\w+)=(\d+)(?:( \(head and tail\))| \((\d+) blocks\))?")
COUNT = re.compile(r"[0-9]{1,9}")
BITS = re.compile(r"[0-9]+")  # of a dtype; a bool has none, and takes a byte
STAGE = re.compile(r"\d{1,6}_.+_.+\.txt")
FLATTENED = re.compile(r"\b(\w+)=([a-z]\w*(?:\*\w+)*)")
SLOT = Must("be a task, F0.2 or U1", lambda name: re.fullmatch(r"[A-Z]\d{1,6}(\.\d{1,6})?", name) is not None)
# what costs a node, and rows of which kinds have it
COSTS = {"collectives": (str, str, str, int), "flops": (str, int), "storages": (str, str, int, str)}


@dataclass(frozen=True)
class Event:
    """What a predicted timeline has of a node."""

    program: str
    node: str
    stream: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Drawn:
    """A table of pipeline stages: of each rank (task, from, to) in `unit`s, and the share of time that is idle."""

    schedule: str
    unit: Literal["ms", "forwards"]
    idle: float
    slots: tuple[tuple[tuple[Annotated[str, SLOT], float, float], ...], ...]


@dataclass(frozen=True)
class Border:
    """What one pipeline rank sends another for a microbatch."""

    source: int
    to: int
    bytes: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a pipeline rank at its peak."""

    device_bytes: int
    bytes: int
    fits: bool
    kinds: dict[str, int]


@dataclass(frozen=True)
class Stages:
    """What was predicted of pipeline stages; lists are by stage or by rank."""

    schedule: str
    idle: float
    ranks_of_stages: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]
    task_ms: dict[str, float]
    busy_ms: tuple[float, ...]
    forwards_kept: tuple[int, ...]
    memory: tuple[RankMemory, ...]
    sent_a_microbatch: tuple[Border, ...]


@dataclass(frozen=True)
class Dumped:
    """What is in the `.json` of a stage."""

    program: str
    name: str
    nodes_before: int
    nodes_after: int
    report: ir.Report
    accounting: Accounting
    errors: dict[str, float] = field(default_factory=dict)


# what tools compute with, in the two files that hold more
CONFIG = {"model": dict[str, Any], "train.global_batch_size": int, "train.seq_len": int, "train.steps": Steps}
REPORT = {
    "seconds": dict[str, float],
    "machine": dict[str, Any],
    "timeline": tuple[Event, ...],
    "pipeline": Drawn,
    "prediction.pipeline": Stages,
}


@dataclass(frozen=True, slots=True)
class Node:
    """One line of a stage's text.

    `op` is the operator or, of an input, its kind (`parameter`, `batch`, `moment`, ...), and `label` then the model's
    own name for it. `value` is what it yields as text; `dtype` and `shape` are empty unless that is one tensor.
    `spec` is its placement as text, empty where none is known; `source` is `file:line`; `recomputed` says that the
    backward computes here again what the forward did not keep. `graph` is the path of the
    graph that holds it, empty for the program itself. `line` counts from 1.
    """

    name: str
    op: str
    operands: tuple[str, ...]
    value: str
    dtype: str
    shape: tuple[int, ...]
    spec: str
    source: str
    module: str
    phase: str
    recomputed: bool
    label: str
    graph: str
    line: int
    text: str

    @property
    def is_input(self) -> bool:
        """Whether it is given to the program, not computed."""
        return bool(self.label)

    @property
    def bytes(self) -> int:
        """How many one tensor has, 0 where it is none."""
        bits = BITS.search(self.dtype)
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1) if self.dtype else 0


@dataclass(frozen=True)
class Output:
    """One result of a program: the loss, a gradient, a metric; `operand` is the node that computes it."""

    name: str
    kind: str
    operand: str
    value: str
    spec: str
    line: int


@dataclass(frozen=True)
class Stage:
    """The graph that one pass left: `number` in the order of all, `program` it is of (`step`), `name` of the pass."""

    number: int
    program: str
    name: str
    path: Path

    @property
    def title(self) -> str:
        """`06_step_joint`, the name of its files."""
        return self.path.stem

    @cached_property
    def report(self) -> dict[str, Any]:
        """What the pass did and what its graph will cost."""
        return json_of(self.path.with_suffix(".json"), Dumped)

    @cached_property
    def costs(self) -> dict[str, list[list[Any]]]:
        """What each node costs: rows of `collectives`, `flops` and `storages` (`passes/cost/costs.py`)."""
        path = self.path.with_suffix(".costs.json")
        found = json_of(path, dict[str, tuple[Any, ...]])
        for name, kinds in COSTS.items():
            for row in found.get(name, [None]):
                if not isinstance(row, list) or tuple(map(type, row)) != kinds or row[0] not in self.by_name:
                    raise UserError(str(path), f"is not what a run writes: {name}: {row!r}")
        return found

    @cached_property
    def text(self) -> str:
        """The whole text; raises UserError where it ends before the nodes that it says it has."""
        found = text_of(self.path)
        _, _, rest = f"\n{found}".partition("\n# nodes: ")
        said, lines = rest.partition("\n")[0], rest.count("\n") - 1
        if not COUNT.fullmatch(said) or lines < int(said):
            raise UserError(str(self.path), "is not whole: it lacks nodes, or how many there are; copy it again")
        return found

    @cached_property
    def _parsed(self) -> Parsed:
        text = self.text
        try:
            found = parse(text)
            check_order(found.nodes)
            return found
        except UserError as error:
            raise UserError(f"{self.path}, {error.where}", error.message) from error
        except ValueError as error:  # of numbers as long as lines
            raise UserError(str(self.path), f"cannot be read: {error}") from error

    @property
    def folded(self) -> str:
        """Which layer stands for which, or an empty string; costs are those of all layers."""
        found = self._rolled
        return found[1] if found else ""

    @property
    def left_out(self) -> int:
        """How many layers one stands for beside itself."""
        found = self._rolled
        return int(found[3]) - int(found[2]) if found else 0

    @property
    def _rolled(self) -> re.Match[str] | None:
        return FOLDED.search(self.text[:1000])

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the mesh axes larger than one, outermost first."""
        return self._parsed.mesh

    @property
    def zigzag(self) -> frozenset[str]:
        """Axes whose ranks hold two chunks, head and tail."""
        return self._parsed.zigzag

    @property
    def blocks(self) -> dict[str, int]:
        """How many blocks each rank holds, of axes whose order is a table."""
        return self._parsed.blocks

    @property
    def flattened(self) -> dict[str, list[str]]:
        """Names for several axes as one, outermost first."""
        return self._parsed.flattened

    @property
    def stage(self) -> str:
        """How far the program has come."""
        return self._parsed.stage

    @property
    def nodes(self) -> list[Node]:
        """Inputs, then operators in order, then those of the graphs that operators call."""
        return self._parsed.nodes

    @property
    def outputs(self) -> list[Output]:
        """What the program returns."""
        return self._parsed.outputs

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """The program's own nodes by name."""
        return {node.name: node for node in self.nodes if not node.graph}

    @cached_property
    def users(self) -> dict[str, list[Node]]:
        """The program's own nodes that read a node, by its name, in order."""
        found: dict[str, list[Node]] = {name: [] for name in self.by_name}
        for node in self.by_name.values():
            for operand in dict.fromkeys(node.operands):
                found[operand].append(node)
        return found


@dataclass(frozen=True)
class Body:
    """A piece of a program that is compiled once: how often it is `called`, its `nodes`, where the `first` is from."""

    name: str
    called: int
    nodes: int
    first: str


@dataclass(frozen=True)
class Run:
    """A run folder: `config` and `report` as they were written, `metrics` a dict a step, the stages as `dumped`."""

    folder: Path
    config: dict[str, Any]
    report: dict[str, Any]
    metrics: list[dict[str, Any]]
    dumped: list[Stage]

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages in order, up to the calls of bodies."""
        return [stage for stage in self.dumped if stage.name not in CALLS]

    @cached_property
    def bodies(self) -> dict[str, list[Body]]:
        """Those of each program's calls, by the program's name."""
        return {stage.program: bodies_of(stage) for stage in self.dumped if stage.name in CALLS}

    def program(self, name: str) -> list[Stage]:
        """The stages of one program (`forward`, `step`, `evaluate`) in order."""
        return [stage for stage in self.stages if stage.program == name]

    @cached_property
    def trained(self) -> list[Stage]:
        """The last stage of every program that training runs: `step`, or `accumulate` and `apply`."""
        last = {s.program: s for s in self.stages if not s.program.startswith(("forward", "evaluate"))}
        return list(last.values())


def load(folder: str | Path) -> Run:
    """The run in a folder; raises UserError naming the file that is missing or cannot be read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(str(folder), "is not a folder; give a run folder (run.dir of a training run)")
    options = read(folder / "config.yaml", yamls.load)
    report = read(folder / "report.json", json_of)
    check_parts(options, folder / "config.yaml", CONFIG)
    check_parts(report, folder / "report.json", REPORT)
    path = folder / metrics.FILE  # a dry run has none
    steps = metrics.read(path) if path.exists() else []
    return Run(folder, options, report, steps, load_stages(folder / "graphs"))


def load_stages(graphs: str | Path) -> list[Stage]:
    """The stages dumped in a folder, in order; raises UserError if there are none."""
    graphs = Path(graphs)
    found = [stage_at(path) for path in graphs.glob("*.txt") if STAGE.fullmatch(path.name)]
    if not found:
        raise UserError(str(graphs), "holds no graphs; train with run.dump_graphs=true")
    stages = sorted(found, key=lambda stage: stage.number)
    for number, stage in enumerate(stages):
        if stage.number != number:
            fix = "copy all graphs of the run"
            raise UserError(str(stage.path), f"stands where graph {number} of the run belongs; {fix}")
    return stages


def bodies_of(stage: Stage) -> list[Body]:
    """The bodies that a program of calls has, in the order of their first calls."""
    found = []
    for called, section in groupby(stage.text.splitlines(), groups_by_body()):
        if called is not None:
            lines = [line for line in section if line.startswith("%") and " = placeholder(" not in line]
            origin = next((line.rpartition("   # ")[2] for line in lines if "   # " in line), "")
            found.append(Body(called[0], called[1], len(lines), origin))
    return found


def groups_by_body() -> Callable[[str], tuple[str, int] | None]:
    """Tells of one line after another which body it is of, and how often that is called."""
    now: tuple[str, int] | None = None

    def of(line: str) -> tuple[str, int] | None:
        nonlocal now
        if head := BODY.match(line):
            now = head[1], int(head[2])
        return now

    return of


def stage_at(path: Path) -> Stage:
    """The stage of one file, `06_step_joint.txt`: its report says where the program's name ends."""
    report = json_of(path.with_suffix(".json"), Dumped)
    return Stage(int(path.stem.split("_")[0]), report["program"], report["name"], path)


def read(path: Path, read_file: Callable[[Path], Any]) -> Any:
    """What a file of a run holds; raises UserError naming it where it is missing."""
    if not path.exists():
        raise UserError(str(path), "is missing; is this a run folder, and was it written to the end?")
    return read_file(path)


def check_parts(found: Any, path: Path, kinds: Mapping[str, Any]) -> None:
    """Raise UserError unless the parts of a mapping, by dotted names, are of their types where they are there."""
    try:
        for name, kind in kinds.items():
            group, _, key = name.rpartition(".")
            part = found.get(group, {}) if group else found
            if key in convert(dict[str, Any], part, group):
                convert(kind, part[key], name)
    except UserError as error:
        field = f"{error.where}: " if error.where else ""
        raise UserError(str(path), f"is not what a run writes: {field}{error.message}") from error


# ---- the text -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parsed:
    """A stage's text, taken apart."""

    mesh: dict[str, int]
    zigzag: frozenset[str]
    blocks: dict[str, int]
    flattened: dict[str, list[str]]
    stage: str
    nodes: list[Node]
    outputs: list[Output]


def parse(text: str) -> Parsed:
    """The parts of a text that `passes.printer` wrote; raises UserError naming a line that it did not."""
    heads: dict[str, str] = {}
    nodes: list[Node] = []
    outputs: list[Output] = []
    section, graph = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if head := SECTION.match(line):
            section, heads[head[1]] = head[1], head[2]
            graph = head[2].partition(",")[0] if section in ("graph", "body") else "" if section in OWN else section
        elif section == "outputs":
            outputs.append(_output(line, number))
        elif not line.startswith("return "):
            nodes.append(_input(line, number) if section == "inputs" else _operator(line, number, graph))
    axes = AXIS.findall(heads.get("mesh", ""))
    sizes = {axis: int(size) for axis, size, *_ in axes}
    zigzag = frozenset(axis for axis, _, head_and_tail, _ in axes if head_and_tail)
    blocks = {axis: int(count) for axis, *_, count in axes if count}
    flattened = {name: over.split("*") for name, over in FLATTENED.findall(heads.get("mesh", ""))}
    return Parsed(sizes, zigzag, blocks, flattened, heads.get("stage", ""), nodes, outputs)


def check_order(nodes: Iterable[Node]) -> None:
    """Raise UserError unless the program's own nodes are defined once each, before what reads them."""
    known: set[str] = set()
    for node in nodes:
        if not node.graph:
            if unknown := [name for name in node.operands if name not in known]:
                raise UserError(f"line {node.line}", f"reads %{unknown[0]}, which no line before it defines")
            if node.name in known:
                raise UserError(f"line {node.line}", f"defines %{node.name} again")
            known.add(node.name)


def _operator(line: str, number: int, graph: str) -> Node:
    """`%name = op(operands) : value spec   # file.py:line module.path phase [recomputed]`."""
    body, _, origin = line.rpartition("   # ")
    call, _, placed = body.rpartition(") : ")
    name, _, call = call.partition(" = ")
    op, found, operands = call.partition("(")
    if not found or not name.startswith("%"):
        raise UserError(f"line {number}", f"is not a node: {line[:80]!r}")
    names = tuple(filter(None, OPERAND.findall(operands)))
    return Node(name[1:], op, names, *_value(placed), *_origin(origin), "", graph, number, line)


def _input(line: str, number: int) -> Node:
    """`%name = kind "name" : value spec`."""
    name, _, rest = line.partition(" = ")
    kind, _, rest = rest.partition(' "')
    label, found, placed = rest.rpartition('" : ')
    if not found or not name.startswith("%"):
        raise UserError(f"line {number}", f"is not an input: {line[:80]!r}")
    return Node(name[1:], kind, (), *_value(placed), "", "", "", False, label, "", number, line)


def _output(line: str, number: int) -> Output:
    """`kind "name" = %node : value spec`."""
    kind, _, rest = line.partition(' "')
    name, _, rest = rest.partition('" = ')
    operand, found, placed = rest.partition(" : ")
    if not found:
        raise UserError(f"line {number}", f"is not an output: {line[:80]!r}")
    value, _, _, spec = _value(placed)
    return Output(name, kind, operand.removeprefix("%"), value, spec, number)


def _value(placed: str) -> tuple[str, str, tuple[int, ...], str]:
    """Value, dtype, shape and placement of `f32[4, 8] [8@tp, 8] replicate(cp)`."""
    parts = PLACED.match(placed)
    value, spec = (parts[1], parts[2]) if parts else (placed, "")
    tensor = TENSOR.match(value)
    if tensor is None:
        return value, "", (), spec
    return value, tensor[1], tuple(int(n) for n in tensor[2].split(", ") if n), spec


def _origin(origin: str) -> tuple[str, str, str, bool]:
    """Source, module, phase and whether recomputed of `file.py:31 layers.0 forward`; the first two may be missing."""
    bare = origin.removesuffix(" recomputed")
    *words, phase = bare.split(" ")
    source = words.pop(0) if words and re.search(r":\d+$", words[0]) else ""
    return source, " ".join(words), phase, bare != origin


def matching(nodes: list[Node], key: Callable[[Node], str], pattern: str) -> Iterator[Node]:
    """The nodes whose key matches a shell-like pattern; one without wildcards also matches inside of it."""
    whole = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return (node for node in nodes if fnmatchcase(key(node), whole))
