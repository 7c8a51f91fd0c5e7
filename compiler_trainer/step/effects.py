"""The effects of the options on a step, added up over its programs, and the refusal of options without one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import OptimConfig, PassesConfig
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.meeting import ROUND
from passes.ir.ir import Effect

DEFAULTS = SimpleNamespace(passes=PassesConfig(), optim=OptimConfig())


NEEDS = (  # an option, and the values of another with which alone it has an effect
    ("passes.cast.float8_skip", "passes.cast.float8", ("tensorwise", "rowwise")),
    ("passes.cast.float8_min_size", "passes.cast.float8", ("tensorwise", "rowwise")),
    ("passes.cast.float8_head", "passes.cast.float8", ("tensorwise", "rowwise")),
    ("passes.moe.capacity_factor", "passes.moe.dispatch", ("bounded",)),
    ("passes.context.block", "passes.context.load_balance", ("auto", "blocks")),
    ("passes.chunk_loss.logits_mib", "passes.chunk_loss.chunks", (None,)),
    ("passes.remat.every_n", "passes.remat.policy", ("every_n",)),
    ("passes.remat.headroom", "passes.remat.policy", ("budget",)),
    ("passes.pipeline.chunks", "passes.pipeline.schedule", ("interleaved",)),
)


def refuse_unread(request: CompileRequest) -> None:
    """Raise UserError for an option that has no effect because of the value of another."""
    for option, other, values in NEEDS:
        value, of_other = attrgetter(option), attrgetter(other)(request)
        if value(request) != value(DEFAULTS) and of_other not in values:
            fix = f"set {other} to {' or '.join(map(str, values))}, or leave it out"
            raise UserError(option, f"{value(request)} has no effect with {other}={of_other}; {fix}")


def effects_of(records: Iterable[Mapping[str, Any]]) -> list[Effect]:
    """Return the effects in the records of passes, each option and thing once; every program counts once."""
    effects: dict[tuple[str, str], Effect] = {}
    for effect in (Effect(**each) for record in records for each in record["report"].get("effects", ())):
        key = effect.option, effect.things
        effects[key] = effects[key].plus(effect) if key in effects else effect
    return list(effects.values())


def effect_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the lines on effects of a step's report, or of a pass's."""
    return [str(Effect(**effect)) for effect in report.get("effects", ())]


def refuse_without_effect(request: CompileRequest, effects: Iterable[Effect]) -> None:
    """Raise UserError for an option that asks for more than its default and did nothing.

    The mesh that is left after a rank was lost is nobody's choice: there, the line on the effect has to do.
    """
    if os.environ.get(ROUND, "0") != "0":
        return
    for effect in effects:
        value = attrgetter(effect.option)
        if effect.unmet and not effect.done and value(request) != value(DEFAULTS):
            raise UserError(effect.option, f"{value(request)} has no effect: {effect.unmet}")
