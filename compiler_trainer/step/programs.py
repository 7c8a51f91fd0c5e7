"""Compile a request into the programs that every rank runs, not yet lowered; training and dry runs share this.

    export            the model and its loss on one device
    build_pipeline    a table: each program's source and passes
    run_rows          the programs, row by row

A cache may hold the programs of the same graphs, options and versions; then no pass runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.pipeline import (
    CAPTURED,
    CAPTURED_IN_EVAL,
    Passes,
    Pipeline,
    build_pipeline,
    in_eval_mode,
)
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.captured import Captured, Reporter, StepPrograms
from compiler_trainer.step.effects import effects_of, refuse_unread, refuse_without_effect
from compiler_trainer.step.exported import Exported, export
from compiler_trainer.step.program_cache import ProgramCache
from passes.check.numeric import Results, telling
from passes.check.runner import Observer, PassRecord, Verify, run_passes
from passes.ir import ir
from passes.ir.stages import Stage
from passes.pipeline.assign import Assign
from passes.sharding.place import Place

Tell = Callable[[str], None]


def compile_programs(
    request: CompileRequest,
    *,
    observe: Observer | None = None,
    tell: Tell = lambda what: None,
    cache: ProgramCache | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> StepPrograms:
    """Return the programs of a request, from the cache if it has them.

    `observe` is called after each pass, `tell` with each task that begins, `prepare` before passes run. If the result
    for a folded layer cannot be repeated, passes run again with every layer. Raises UserError naming the option or node
    at fault.
    """
    refuse_unread(request)
    report, pipeline = Reporter(), build_pipeline(request)
    exported = report.time("capture", lambda: export(request, pipeline.folding, tell))
    if cache is None or request.values is not None:
        return compile_exported(request, pipeline, exported, report, observe, tell)
    start = time.perf_counter()
    entry = cache.look_up(request, exported)
    if entry.programs is not None:
        entry.programs.report.seconds |= report.seconds | {"program": time.perf_counter() - start}
        return entry.programs
    prepare()
    result = compile_exported(request, pipeline, exported, report, observe, tell)
    if reason := report.time("store", lambda: cache.keep(entry, result)):
        report.notes.append(f"the program is not stored: {reason}")
    return result


def compile_exported(
    request: CompileRequest,
    pipeline: Pipeline,
    exported: Exported,
    report: Reporter,
    observe: Observer | None,
    tell: Tell,
    brief: bool = False,
) -> StepPrograms:
    """Compile exported graphs into programs, and add the passes to the report, or if `brief` the last ones."""
    observer = Withholding(observe)
    try:
        result = StepPrograms(run_rows(request, pipeline, exported, report, observer, tell, brief), report)
    except ir.LayersDiffer as error:
        observer.withheld.clear()
        capture_s, pipeline = report.seconds["capture"], replace(pipeline, folding=None)
        report.restart(f"layers are not folded: {error}")
        exported = report.time("capture", lambda: export(request, None, tell))
        report.seconds["capture"] += capture_s
        result = StepPrograms(run_rows(request, pipeline, exported, report, observer, tell, brief), report)
    finally:
        observer.release()
    if request.train:  # an evaluation of a trained run takes its options as they are
        refuse_without_effect(request, effects_of(report.passes))
    return result


class Withholding:
    """An observer that passes observations on, but withholds them from the first folded program on.

    It releases them once the folding is known to be right.
    """

    def __init__(self, observe: Observer | None):
        self.observe = observe
        self.withheld: list[tuple[ir.Program, PassRecord]] = []

    def __call__(self, program: ir.Program, record: PassRecord) -> None:
        if program.folds or self.withheld:
            self.withheld.append((program, record))
        elif self.observe is not None:
            self.observe(program, record)

    def release(self) -> None:
        """Pass on the withheld observations."""
        for observation in self.withheld:
            if self.observe is not None:
                self.observe(*observation)


def run_rows(
    request: CompileRequest,
    pipeline: Pipeline,
    exported: Exported,
    report: Reporter,
    observe: Withholding,
    tell: Tell,
    brief: bool = False,
) -> dict[str, Captured]:
    """Return the finished programs by name: each row's passes run on the program of its source."""
    observer = None if brief else observe
    runner = Runner(request.passes.verify, pipeline.unfold, inputs_of(request), report, observer, tell, brief)
    sources = {CAPTURED: exported.training}
    if exported.evaluation is not None:
        pipeline, sources[CAPTURED_IN_EVAL] = in_eval_mode(pipeline), exported.evaluation
    finished: dict[str, Captured] = {}
    for row in pipeline.rows:
        source, passes = sources[row.source], row.passes if row.cut else row.whole
        if row.state_of:
            passes = store_state_like(passes, sources[row.state_of].program)
        known_results = runner.results.get(row.source) if row.purpose != "evaluation" else None
        if row.purpose == "evaluation":
            source = Captured(replace(source.program, evaluates=True), source.ctx)
        result = sources[row.name] = runner.run(row.name, passes, source, known_results)
        if row.cut:
            parts = row.cut(result.program).items()
            finished |= {name: runner.run(name, row.finish, Captured(part, result.ctx)) for name, part in parts}
        elif not row.shared:
            finished[row.name] = result
    return finished


@dataclass
class Runner:
    """A runner of passes that keeps the numerical results of each program, if numbers are verified."""

    verify: Verify
    unfold: ir.Pass
    inputs: Mapping[str, Tensor] | None
    report: Reporter
    observe: Observer | None
    tell: Tell
    brief: bool = False
    results: dict[str, Results] = field(default_factory=dict)

    def run(self, name: str, passes: Passes, captured: Captured, known_results: Results | None = None) -> Captured:
        """Return a program after some passes; raise UserError if one refuses it.

        `known_results` are numerical results of the program.
        """
        if captured.program.folds and any(step.gives is Stage.SEGMENTED for step in passes):
            passes = (*passes, self.unfold)
        if not passes:
            return captured
        start = time.perf_counter()
        try:
            program, records = run_passes(
                name,
                passes,
                captured.program,
                captured.ctx,
                verify=self.verify,
                observe=self.observe,
                inputs=self.inputs,
                known=known_results,
                tell=lambda what: self.tell(f"{name}: {what}"),
                brief=self.brief,
            )
        except ir.Refused as error:
            raise UserError(error.pass_name, error.located) from error
        self.report.add(name, records, time.perf_counter() - start)
        self.results[name] = records[-1].results
        return Captured(program, captured.ctx)


def inputs_of(request: CompileRequest) -> dict[str, Tensor] | None:
    """Return the inputs on which `passes.verify=numeric` runs programs, or None if it is off."""
    if request.values is None:
        return None
    scalars = {"lr": torch.tensor(request.optim.lr), "seed": torch.tensor(request.seed)}
    return {name: telling(value) for name, value in request.values.items()} | dict(request.batch) | scalars


def store_state_like(passes: Passes, program: ir.Program) -> Passes:
    """Return passes that store a program's state like another program's: on the same ranks and stages."""
    places = {i.name: replace(i.spec, replicate=()) for i in program.inputs if i.kind in ir.MODEL_STATE}
    stages = {i.original: i.stages for i in program.inputs if i.kind in ir.WEIGHTS}
    for node, output in zip(program.results(), program.outputs, strict=True):
        stage = ir.pipeline_stage(node) if output.kind == "buffer" else None
        stages |= {} if stage is None else {output.name: (stage,)}
    fields = {Place: places, Assign: stages}
    return tuple(replace(s, stored=fields[type(s)]) if type(s) in fields else s for s in passes)  # type: ignore
