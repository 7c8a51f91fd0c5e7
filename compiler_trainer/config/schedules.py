"""Schedules of pipeline stages that options ask for: by their name, or as a file with a table."""

from __future__ import annotations

from pathlib import Path

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import text_of
from compiler_trainer.config.options import not_one_of
from compiler_trainer.config.schema import PipelineConfig
from passes.pipeline.tables import SCHEDULES, Table, from_text, table_of


def asked_table(pipeline: PipelineConfig, pp: int, microbatches: int) -> Table:
    """The schedule that a configuration asks for; `auto` before it is known what each task takes."""
    if pipeline.schedule in SCHEDULES:
        return table_of(pipeline.schedule, pp, microbatches, pipeline.chunks)
    return read_table(Path(pipeline.schedule), pp, microbatches)


def read_table(path: Path, pp: int, microbatches: int) -> Table:
    """The schedule in a file; raises UserError naming what is wrong with it."""
    if not path.exists():
        raise UserError("passes.pipeline.schedule", f"{not_one_of(SCHEDULES, str(path))}, nor a file")
    try:
        table = from_text(text_of(path))
    except ValueError as error:
        raise UserError(str(path), f"{error}") from error
    sizes = {"mesh.pp": (pp, table.ranks), "train.microbatches": (microbatches, table.microbatches)}
    for option, (wanted, found) in sizes.items():
        if wanted != found:
            raise UserError(str(path), f"is a table for {option}={found}, not {wanted}")
    return table
