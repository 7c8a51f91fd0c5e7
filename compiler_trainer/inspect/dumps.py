"""A run, read from its folder alone: options, report, metrics, and the program after each pass.

    run = load("runs/2026-01-31_12-00-00")
    last = run.program("step")[-1]
    last.by_name["all_gather"].source

Programs are read on first use: a stage of 100,000 nodes takes about five seconds. Runs of earlier versions have only
text and reports, no programs that can be read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import Tensor, fx

from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.config.files import json_of, load_yaml, text_of
from compiler_trainer.config.options import Must, convert
from compiler_trainer.config.schema import Steps
from compiler_trainer.step.effects import effect_lines
from compiler_trainer.training import metrics
from passes.cost.accounting import Accounting
from passes.ir import ir
from passes.ir.bodies import calls_of
from passes.ir.printer import Line, format_dtype, format_value, lines_of, name_of_call, place_of
from passes.ir.saved import Unreadable, names_of_calls, read_dump, reading

CALLS = ("segment", "unfold")  # passes after which a program calls compiled regions
CASTS = ("to.dtype", "to.device", "to.other", "to.dtype_layout", "_to_copy", "prims.convert_element_type")
STAGE = re.compile(r"\d{1,6}_.+_.+\.txt")
EARLIER = "is missing: an earlier version wrote the run, or files are missing; read its .txt, or run it again"
SLOT = Must("be a task, F0.2 or U1", lambda name: re.fullmatch(r"[A-Z]\d{1,6}(\.\d{1,6})?", name) is not None)
# table of costs -> the types of its rows
COSTS = {"collectives": (str, str, str, int), "flops": (str, int), "storages": (str, str, int, str)}


@dataclass(frozen=True)
class Event:
    """A node's entry in a predicted timeline."""

    program: str
    node: str
    stream: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Drawn:
    """A schedule of pipeline stages: for each rank (task, from, to) in `unit`s, and the share of idle time."""

    schedule: str
    unit: Literal["ms", "forwards"]
    idle: float
    slots: tuple[tuple[tuple[Annotated[str, SLOT], float, float], ...], ...]


@dataclass(frozen=True)
class Border:
    """The values that one pipeline rank sends another for a microbatch."""

    source: int
    to: int
    bytes: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class RankMemory:
    """The bytes of a pipeline rank at its peak."""

    device_bytes: int
    bytes: int
    fits: bool
    kinds: dict[str, int]


@dataclass(frozen=True)
class Stages:
    """The prediction for pipeline stages; lists are by stage or by rank."""

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
    """The contents of a stage's `.json` file."""

    program: str
    name: str
    nodes_before: int
    nodes_after: int
    report: ir.Report
    accounting: Accounting
    errors: dict[str, float] = field(default_factory=dict)


# the parts that tools use of config.yaml and report.json, and their types
CONFIG = {"model": dict[str, Any], "train.global_batch_size": int, "train.seq_len": int, "train.steps": Steps}
REPORT = {
    "seconds": dict[str, float],
    "machine": dict[str, Any],
    "timeline": tuple[Event, ...],
    "effects": tuple[ir.Effect, ...],
    "pipeline": Drawn,
    "prediction.pipeline": Stages,
}


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a stage.

    `op` is the operator or, for an input, its kind (`parameter`, `batch`, `moment`, ...); `label` is then the model's
    own name for it. `value` is the result as text; `dtype` and `shape` are empty and `bytes` 0 unless the result is one
    tensor. `spec` is its placement as text, empty if unknown; `source` is `file:line`; `recomputed` is True if the
    backward computes the node again. `graph` is the path of the graph that holds the node, empty for the program
    itself. `line` counts from 1, `text` is that line of the stage's text, and `node` is the fx node.
    """

    name: str
    op: str
    operands: tuple[str, ...]
    value: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    spec: str
    source: str
    module: str
    phase: str
    recomputed: bool
    label: str
    graph: str
    line: int
    text: str
    node: fx.Node

    @property
    def is_input(self) -> bool:
        """Return True for an input of the program."""
        return bool(self.label)


@dataclass(frozen=True)
class Stage:
    """The graph after one pass: its `number` among all stages, its `program` (`step`), and the `name` of the pass."""

    number: int
    program: str
    name: str
    path: Path

    @property
    def title(self) -> str:
        """The name of the stage's files, as `06_step_joint`."""
        return self.path.stem

    @cached_property
    def report(self) -> dict[str, Any]:
        """The pass's report, in which parts that are missing are empty, and the costs of its graph."""
        content = json_of(self.path.with_suffix(".json"), Dumped)
        return content | {"report": {"counts": {}, "notes": [], "reshards": [], "remarks": []} | content["report"]}

    @property
    def notes(self) -> list[str]:
        """The effects of options, and the notes, of the pass."""
        report = self.report["report"]
        return [*effect_lines(report), *report["notes"], *report["remarks"]]

    @cached_property
    def costs(self) -> dict[str, list[list[Any]]]:
        """The costs of each node: rows of `collectives`, `flops` and `storages` (`passes/cost/costs.py`)."""
        path = self.path.with_suffix(".costs.json")
        costs = json_of(path, dict[str, tuple[Any, ...]])
        for name, kinds in COSTS.items():
            for row in costs.get(name, [None]):
                if not isinstance(row, list) or tuple(map(type, row)) != kinds or row[0] not in self.by_name:
                    raise UserError(str(path), f"is not in the format that a run writes: {name}: {row!r}")
        return costs

    @cached_property
    def text(self) -> str:
        """The text of the stage; raises UserError if it has fewer nodes than its head says."""
        text = text_of(self.path)
        _, _, nodes = f"\n{text}".partition("\n# nodes: ")
        count, lines = nodes.partition("\n")[0], nodes.count("\n") - 1
        if not (count.isdecimal() and len(count) < 10) or lines < int(count):
            raise UserError(str(self.path), "is incomplete: nodes or their number are missing; copy it again")
        return text

    @property
    def dump(self) -> Path:
        """The file that holds the program."""
        return self.path.with_suffix(".graph.json")

    @cached_property
    def content(self) -> Any:
        """The JSON of the program; raises UserError if there is none."""
        if not self.dump.exists():
            raise UserError(str(self.dump), EARLIER)
        try:
            return json.loads(text_of(self.dump))
        except (ValueError, RecursionError) as error:
            raise UserError(str(self.dump), f"cannot be read: {error}") from error

    @cached_property
    def casts(self) -> int | None:
        """The number of operators that cast; None in a run of an earlier version."""
        if not self.dump.exists():
            return None
        try:
            return sum(name in CASTS for name in names_of_calls(self.content))
        except Unreadable as error:
            raise self.damaged(error) from error

    @cached_property
    def _read(self) -> tuple[ir.Program, list[Node]]:
        try:
            programs = read_dump(self.content)
            with reading():
                return programs[self.program], list(nodes_of(programs[self.program]))
        except Unreadable as error:
            raise self.damaged(error) from error

    def damaged(self, error: Unreadable) -> UserError:
        """Return the error for a program that cannot be read."""
        return UserError(
            str(self.dump), f"is not in the format that a run writes: {one_line(error)[:200]}"
        )

    @property
    def graph(self) -> ir.Program:
        """The program, with operators by name and values by layout."""
        return self._read[0]

    @property
    def left_out(self) -> list[int]:
        """The numbers of layers that folded layers stand for, these not counted."""
        return [fold.left_out for fold in self.graph.folds]

    @property
    def nodes(self) -> list[Node]:
        """Inputs, then operators in order, then nodes of the graphs that operators call."""
        return self._read[1]

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """The program's own nodes by name."""
        return {node.name: node for node in self.nodes if not node.graph}

    @cached_property
    def users(self) -> dict[str, list[Node]]:
        """The program's own nodes that read a node, by its name, in order."""
        users: dict[str, list[Node]] = {name: [] for name in self.by_name}
        for node in self.by_name.values():
            for operand in dict.fromkeys(node.operands):
                users[operand].append(node)
        return users


@dataclass(frozen=True)
class Body:
    """A compiled region: how often it is `called`, its number of `nodes`, and the source of its `first` node."""

    name: str
    called: int
    nodes: int
    first: str


@dataclass(frozen=True)
class Run:
    """A run folder, read from disk.

    Attributes:
        folder: its path.
        config: the options, as `config.yaml` has them.
        report: the contents of `report.json`.
        metrics: the records of `metrics.jsonl`, one a step.
        dumped: the program after each pass.
    """

    folder: Path
    config: dict[str, Any]
    report: dict[str, Any]
    metrics: list[dict[str, Any]]
    dumped: list[Stage]

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages in order, without those that consist of calls of compiled regions."""
        return [stage for stage in self.dumped if stage.name not in CALLS]

    @cached_property
    def bodies(self) -> dict[str, list[Body]]:
        """The compiled regions of each program, by the program's name."""
        return {stage.program: bodies_of(stage) for stage in self.dumped if stage.name in CALLS}

    def program(self, name: str) -> list[Stage]:
        """Return the stages of the program called `name` (`forward`, `step`, `evaluate`) in order."""
        return [stage for stage in self.stages if stage.program == name]

    @cached_property
    def trained(self) -> list[Stage]:
        """The last stage of every program that training runs: `step`, or `accumulate` and `apply`."""
        last = {s.program: s for s in self.stages if not s.program.startswith(("forward", "evaluate"))}
        return list(last.values())


def load(folder: str | Path) -> Run:
    """Return the run in a `folder`; raise UserError naming the file that is missing or cannot be read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(str(folder), "is not a folder; give a run folder (run.dir of a training run)")
    options = read(folder / "config.yaml", load_yaml)
    report = read(folder / "report.json", json_of)
    check_parts(options, folder / "config.yaml", CONFIG)
    check_parts(report, folder / "report.json", REPORT)
    path = folder / metrics.FILE  # a dry run has none
    steps = metrics.read(path) if path.exists() else []
    return Run(folder, options, report, steps, load_stages(folder / "graphs"))


def load_stages(graphs: str | Path) -> list[Stage]:
    """Return the stages dumped in a folder, in order; raise UserError if there are none."""
    graphs = Path(graphs)
    unsorted = [stage_at(path) for path in graphs.glob("*.txt") if STAGE.fullmatch(path.name)]
    if not unsorted:
        raise UserError(str(graphs), "holds no graphs; train with run.dump_graphs=true")
    stages = sorted(unsorted, key=lambda stage: stage.number)
    for number, stage in enumerate(stages):
        if stage.number != number:
            fix = "copy all graphs of the run"
            raise UserError(str(stage.path), f"is in the place of graph {number} of the run; {fix}")
    return stages


def bodies_of(stage: Stage) -> list[Body]:
    """Return the compiled regions that a program calls, in the order of their first calls."""
    bodies = []
    for body, calls in calls_of(stage.graph).items():
        nodes = [node for node in body.graph.nodes if node.op not in ("placeholder", "output")]
        first = " ".join(filter(None, place_of(nodes[0])[:3])) if nodes else ""
        bodies.append(Body(body.name, len(calls), len(nodes), first))
    return bodies


def stage_at(path: Path) -> Stage:
    """Return the stage of a file, as `06_step_joint.txt`; its report says where the program's name ends."""
    report = json_of(path.with_suffix(".json"), Dumped)
    return Stage(int(path.stem.split("_")[0]), report["program"], report["name"], path)


def read(path: Path, read_file: Callable[[Path], Any]) -> Any:
    """Return the contents of a run's file; raise UserError if it is missing."""
    if not path.exists():
        raise UserError(str(path), "is missing; check that this is the folder of a completed run")
    return read_file(path)


def check_parts(contents: Any, path: Path, kinds: Mapping[str, Any]) -> None:
    """Raise UserError unless the parts of a mapping, by dotted names, are of their types or missing."""
    try:
        for name, kind in kinds.items():
            group, _, key = name.rpartition(".")
            part = contents.get(group, {}) if group else contents
            if key in convert(dict[str, Any], part, group):
                convert(kind, part[key], name)
    except UserError as error:
        field = f"{error.place}: " if error.place else ""
        raise UserError(str(path), f"is not in the format that a run writes: {field}{error.message}") from error


# ---- nodes --------------------------------------------------------------------------------------------


def nodes_of(program: ir.Program) -> Iterator[Node]:
    """Yield the nodes of a program's text."""
    inputs = dict(zip(program.placeholders(), program.inputs, strict=True))
    for number, line in enumerate(lines_of(program), 1):
        if line.node is not None and line.node.op != "output":
            yield node_of(line.node, number, line, inputs.get(line.node))


def node_of(node: fx.Node, number: int, line: Line, input_: ir.Input | None) -> Node:
    """Return a node as tools show it."""
    value, spec, operands = ir.value(node), input_.spec if input_ else ir.spec(node), list[str]()
    fx.map_arg((node.args, dict(sorted(node.kwargs.items()))), lambda operand: operands.append(operand.name))
    is_tensor = isinstance(value, Tensor)
    return Node(
        node.name,
        input_.kind if input_ else name_of_call(node),
        tuple(operands),
        format_value(value),
        format_dtype(value.dtype) if is_tensor else "",
        tuple(value.shape) if is_tensor else (),
        value.dtype.itemsize * math.prod(value.shape) if is_tensor else 0,
        "" if spec is None else str(spec),
        *(("", "", "", False) if input_ else place_of(node)),
        input_.name if input_ else "",
        line.graph,
        number,
        line.text,
        node,
    )


def matching(nodes: list[Node], key: Callable[[Node], str], pattern: str) -> Iterator[Node]:
    """Return the nodes whose key matches a shell-like pattern, or contains it if it has no wildcards."""
    wildcard = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return (node for node in nodes if fnmatchcase(key(node), wildcard))
