"""The schedule of pipeline stages: built by name, or read from a file."""

from __future__ import annotations

from pathlib import Path

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import text_of
from compiler_trainer.config.options import not_one_of
from compiler_trainer.config.schema import PipelineConfig
from passes.pipeline.tables import (
    SCHEDULES,
    Table,
    TaskCosts,
    auto,
    from_text,
    gpipe,
    interleaved,
    one_f_one_b,
    unit,
    zbv,
    zero_bubble,
)


def build_table(pipeline: PipelineConfig, pp: int, microbatches: int, costs: TaskCosts = unit) -> Table:
    """Return the schedule that the options name; `auto` depends on the cost of each task."""
    builders = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble, "zbv": zbv}
    if pipeline.schedule == "auto":
        return auto(pp, microbatches, costs)
    if pipeline.schedule == "interleaved":
        return interleaved(pp, microbatches, pipeline.chunks)
    if pipeline.schedule in builders:
        return builders[pipeline.schedule](pp, microbatches)
    return read_table(Path(pipeline.schedule), pp, microbatches)


def read_table(path: Path, pp: int, microbatches: int) -> Table:
    """Return the schedule in a file; raise UserError naming the problem."""
    if not path.exists():
        raise UserError("passes.pipeline.schedule", f"{not_one_of(SCHEDULES, str(path))}, nor a file")
    try:
        table = from_text(text_of(path))
    except ValueError as error:
        raise UserError(str(path), f"{error}") from error
    sizes = {"mesh.pp": (pp, table.ranks), "train.microbatches": (microbatches, table.microbatches)}
    for option, (configured, in_table) in sizes.items():
        if configured != in_table:
            raise UserError(str(path), f"is a table for {option}={in_table}, not {configured}")
    return table
