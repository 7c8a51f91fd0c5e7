"""Stages of run folders, modified as if passes had produced other programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from compiler_trainer.inspect.dumps import Stage
from passes.ir import ir
from passes.ir.printer import print_program
from passes.ir.saved import to_dump_text


def change(stage: Stage, edit: Callable[[fx.Graph], None] = lambda graph: None, **fields) -> ir.Program:
    """Edit the graph of a stage and fields of its program, and write both of its files again."""
    program = replace(stage.graph, **fields)
    edit(program.graph)
    stage.dump.write_text(to_dump_text({stage.program: program}))
    stage.path.write_text(print_program(program))
    return program
