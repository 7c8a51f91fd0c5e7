"""The schedule of pipeline stages: built by name, or read from a file."""

from __future__ import annotations

from pathlib import Path

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import text_of
from compiler_trainer.config.options import not_one_of
from compiler_trainer.config.schema import PipelineConfig
from passes.pipeline.schedules import (
    SCHEDULES,
    Schedule,
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


def build_schedule(pipeline: PipelineConfig, pp: int, microbatches: int, costs: TaskCosts = unit) -> Schedule:
    """Return the schedule that the options name; `auto` depends on the cost of each task."""
    builders = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble, "zbv": zbv}
    if pipeline.schedule == "auto":
        return auto(pp, microbatches, costs)
    if pipeline.schedule == "interleaved":
        return interleaved(pp, microbatches, pipeline.chunks)
    if pipeline.schedule in builders:
        return builders[pipeline.schedule](pp, microbatches)
    return read_schedule(Path(pipeline.schedule), pp, microbatches)


def read_schedule(path: Path, pp: int, microbatches: int) -> Schedule:
    """Return the schedule in a file; raise UserError naming the problem."""
    if not path.exists():
        raise UserError("passes.pipeline.schedule", f"no file, and {not_one_of(SCHEDULES, str(path))}")
    try:
        schedule = from_text(text_of(path))
    except ValueError as error:
        raise UserError(str(path), f"{error}") from error
    sizes = {"mesh.pp": (pp, schedule.ranks), "train.microbatches": (microbatches, schedule.microbatches)}
    for option, (configured, in_file) in sizes.items():
        if configured != in_file:
            setting = f"{option}={in_file}"
            raise UserError(str(path), f"is a schedule for {setting}, not {configured}; set {setting}")
    return schedule
