"""Run passes in order: time each, verify its result, predict the result's cost, and show it to an observer."""

from __future__ import annotations

import json
import operator
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, fx

from passes.check.composed import verify_composed
from passes.check.numeric import Results, coarsest, compare, run
from passes.check.values import Numbers
from passes.check.verify import verify_kept, verify_spec
from passes.cost.accounting import Accounting, Ledger, summed
from passes.cost.costs import Costs, costs
from passes.ir import ir
from passes.ir.bodies import flatten
from passes.ir.printer import print_program
from passes.ir.saved import to_dump_text
from passes.ir.stages import Stage
from passes.torch_private import trace_artifact
from passes.trace.abstract_eval import Avals, abstract_eval
from passes.trace.functions import as_meant, meaning_of

Verify = Literal["none", "spec", "numeric"]


@dataclass(frozen=True)
class PassRecord:
    """A pass over a program: its time, its report, and the predicted cost of the program it left.

    With numeric verification, `errors` are the relative errors of the results by name, and `results` the program's
    known results. `costs` exist for an observer only.
    """

    program: str
    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    report: ir.Report
    accounting: Accounting
    errors: dict[str, float] = field(default_factory=dict)
    results: Results = field(default_factory=dict, compare=False)
    costs: Costs | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, without programs, `results` and `costs`."""
        plain = asdict(replace(self, report=replace(self.report, bodies=()), results={}, costs=None))
        del plain["report"]["bodies"]
        return {key: value for key, value in plain.items() if key not in ("results", "costs")}


Observer = Callable[[ir.Program, PassRecord], None]


def check_order(passes: Sequence[ir.Pass], stage: Stage) -> None:
    """Raise ValueError naming the first pass that is out of order.

    Each pass takes the stage that those before it leave, and no pass that must precede it comes later.
    """
    for number, step in enumerate(passes):
        if stage not in step.takes:
            expected = " or ".join(map(str, step.takes))
            problem = "too late" if stage > max(step.takes) else "too early"
            raise ValueError(f"pass {step.name!r} takes a {expected} program, not a {stage} one: it comes {problem}")
        if later_names := [later.name for later in passes[number + 1 :] if later.name in step.after]:
            raise ValueError(f"pass {step.name!r} comes before {', '.join(later_names)}, which it must follow")
        stage = stage if step.gives is None else step.gives


def run_passes(
    name: str,
    passes: Sequence[ir.Pass],
    program: ir.Program,
    ctx: ir.Context,
    *,
    verify: Verify = "spec",
    observe: Observer | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    known: Results | None = None,
    tell: Callable[[str], None] = lambda what: None,
    brief: bool = False,
) -> tuple[ir.Program, list[PassRecord]]:
    """Return the program after all passes, and a record of each; a captured program's first record is "capture".

    `inputs` are full inputs by name; `verify="numeric"` runs the program on them before and after each pass. `known`
    are its results after earlier passes, including gradients that this program does not return. `tell` is called with
    the name of each pass before it starts. If `brief`, only the last pass is checked, measured and recorded. Raises
    ValueError if the passes are out of order, CompileError if a pass fails or leaves a wrong program.
    """
    check_order(passes, program.stage)
    check = _Checker(verify, ctx, inputs, known)
    records: list[PassRecord] = []
    ledger: Ledger | None = None

    def finish(
        step: str, seconds: float, before: ir.Program, after: ir.Program, report: ir.Report, keeps: bool = False
    ) -> None:
        nonlocal ledger
        with failing_as(step):
            inlined, avals, errors = check(step, before, after, report, keeps)
            ledger = ledger if ledger and ledger.avals is avals else Ledger(inlined, avals)
            accounting = summed(ledger)
        counts = len(before.graph.nodes), len(after.graph.nodes)
        report = replace(report, bodies=())  # verified by now, and too large to keep
        report = replace(report, effects=()) if after.evaluates else report
        record = PassRecord(name, step, seconds, *counts, report, accounting, errors, check.results or {})
        records.append(record)
        if observe is not None:
            observe(after, replace(record, costs=costs(ledger)))

    if program.stage is Stage.CAPTURED and not brief:
        check.remember(program)
        finish("capture", 0.0, program, program, ir.Report())
    for number, step in enumerate(passes, 1):
        tell(step.name)
        before = program
        check.remember(before)
        started = time.perf_counter()
        program, report = apply_pass(step, before, ctx)
        if not brief or number == len(passes):
            finish(step.name, time.perf_counter() - started, before, program, report, step.keeps)
    return program, records


def apply_pass(step: ir.Pass, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
    """Return the program after one pass; raise CompileError for any failure."""
    with failing_as(step.name):
        return step(program, ctx)


@contextmanager
def failing_as(name: str) -> Iterator[None]:
    """Turn any exception into a CompileError of the pass that names a node of the model."""
    try:
        yield
    except ir.CompileError:
        raise
    except Exception as error:
        message = str(error).partition("\n\nWhile executing")[0]  # without the lines that fx.Interpreter adds
        raise ir.CompileError(name, node_at(error), f"{type(error).__name__}: {message}") from error


def node_at(error: BaseException) -> fx.Node | None:
    """Return the node that a failed pass was working on: that of its innermost frame with one."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        values = [frame.f_locals.get("node"), *frame.f_locals.values()]
        if node := next((value for value in values if isinstance(value, fx.Node) and ir.source(value)), None):
            return node
    return None


def contents(program: ir.Program) -> list[Any]:
    """Return the objects that a program consists of: a rewrite in place changes them or their order."""
    objects: list[Any] = []
    for module in program.module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            objects += (node, node.name, node.target, node.args, node.kwargs, ir.record(node))
    return objects


class _Checker:
    """Verifies programs one after another; the findings for each serve as "before" of the next."""

    def __init__(
        self, verify: Verify, ctx: ir.Context, inputs: Mapping[str, Tensor] | None, known: Results | None = None
    ):
        if verify == "numeric" and inputs is None:
            raise ValueError("verify='numeric' runs the program: give run_passes(inputs=...)")
        self.verify, self.ctx, self.inputs = verify, ctx, inputs or {}
        self.contents: list[Any] = []
        self.results: Results | None = known or None
        self.numbers: Numbers | None = None  # of the last program
        self.avals: tuple[ir.Program, Avals] | None = None  # the last program, inlined, and its nodes' values

    def remember(self, before: ir.Program) -> None:
        """Record the program's contents before a pass sees it."""
        if self.verify != "none":
            self.contents = contents(before)
        if self.verify == "numeric" and self.results is None:
            self.results = run(before, self.ctx, self.inputs)

    def __call__(
        self, step: str, before: ir.Program, after: ir.Program, report: ir.Report, keeps: bool
    ) -> tuple[ir.Program, Avals, dict[str, float]]:
        """Return the program with calls inlined, the values of its nodes, and the errors of its results.

        A pass with `keeps` has to keep every value. Raises CompileError naming the pass.
        """
        old, self.contents = self.contents, []  # otherwise it would keep the program before alive
        new = contents(before) if self.verify != "none" else []
        if len(new) != len(old) or not all(map(operator.is_, new, old)):
            raise ir.CompileError(step, None, "changed the program it was given; a pass rewrites a copy")
        if before.stage < after.stage is Stage.SEGMENTED:
            verify_composed(step, before, after)
            return before, self.cached_avals(before) or abstract_eval(before, self.ctx), {}
        after = flatten(after)
        if self.verify == "none":
            avals = self.cached_avals(after) or abstract_eval(after, self.ctx)
        else:
            cached, numbers = self.cached_avals(after), self.numbers_of(before) if keeps else None
            avals = verify_spec(after, self.ctx, pass_name=step, before=before, bodies=report.bodies, avals=cached)
            if numbers is not None and cached is None:
                self.numbers = Numbers(after, avals)
                verify_kept(numbers, self.resolve_meanings(before, self.numbers), pass_name=step)
        self.avals = after, avals
        return after, avals, self.compare(step, before, after) if self.verify == "numeric" else {}

    def numbers_of(self, before: ir.Program) -> Numbers:
        """Return a program's numbers, computed only if they are not those of the last program."""
        if self.numbers is not None and self.numbers.program.graph is before.graph:
            return self.numbers
        return Numbers(before, self.cached_avals(before) or abstract_eval(before, self.ctx))

    def resolve_meanings(self, before: ir.Program, numbers: Numbers) -> Numbers:
        """Return the numbers of the program after a pass, with operators that it added replaced by their meaning."""
        program = numbers.program if any(map(meaning_of, before.calls())) else as_meant(numbers.program, self.ctx)
        return numbers if program is numbers.program else Numbers(program, abstract_eval(program, self.ctx))

    def cached_avals(self, program: ir.Program) -> Avals | None:
        """Return the nodes' values if the program is the last one except for its stage (the pass changed nothing)."""
        if self.avals is None or replace(program, stage=self.avals[0].stage) != self.avals[0]:
            return None
        return self.avals[1]

    def compare(self, step: str, before: ir.Program, after: ir.Program) -> dict[str, float]:
        """Return the errors of results that both programs have; earlier gradients stay until programs return them."""
        old, new = self.results or {}, run(after, self.ctx, self.inputs)
        self.results = new if after.has_backward else {**old, **new}
        return compare(step, old, new, max(coarsest(before), coarsest(after)) ** 0.5)


class Dumper:
    """Writes every stage into a folder, and as artifacts to TORCH_TRACE: `NN_<program>_<pass>` with four endings.

    `.txt` is the graph for people, `.graph.json` for tools, `.json` the report, `.costs.json` the cost of each node. No
    file holds a time or a path: equal options give equal bytes. The time of each pass is in the run's `report.json`.
    """

    def __init__(self, folder: Path):
        self.folder, self.count = Path(folder), 0

    def __call__(self, program: ir.Program, record: PassRecord) -> None:
        stage = f"{self.count:02d}_{record.program}_{record.name}"
        self.count += 1
        untimed = {key: value for key, value in record.as_dict().items() if key != "seconds"}
        text, report = print_program(program), json.dumps(untimed, indent=1)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{stage}.txt").write_text(text)
        (self.folder / f"{stage}.json").write_text(report)
        (self.folder / f"{stage}.graph.json").write_text(to_dump_text({record.program: program}))
        if record.costs is not None:
            (self.folder / f"{stage}.costs.json").write_text(record.costs.as_json())
        trace_artifact(stage, "string", lambda: text)
        trace_artifact(stage, "json", lambda: report)
