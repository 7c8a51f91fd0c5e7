"""Where passes of one's own go among others: by the stage that they take, and by what they come after."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from passes.program.ir import Pass
from passes.program.stages import Stage

Passes = tuple[Pass, ...]


def placed(
    passes: Sequence[Pass], stage: Stage, extra: Sequence[Pass], later: Collection[str] = (), at_end: bool = True
) -> tuple[Passes, Passes]:
    """Passes that begin at a stage with those of `extra` that fit, each as early as it may come, and those that fit.

    One fits where the program is of a stage that it takes and no pass of its `after` comes behind, in `later` ones
    neither, and unless `at_end` only before another. Else they keep the order in which they are given.
    """
    found, fit = tuple(passes), list[Pass]()
    for step in ordered(extra):
        at = place(found, stage, step, fit, at_end)
        if at is not None and not set(step.after) & set(later):
            found = (*found[:at], step, *found[at:])
            fit.append(step)
    return found, tuple(fit)


def ordered(extra: Sequence[Pass]) -> list[Pass]:
    """Passes in the order given, but each behind those of them that its `after` names."""
    rest, found = list(extra), list[Pass]()
    while rest:
        names = {step.name for step in rest}
        ready = next((step for step in rest if not names & (set(step.after) - {step.name})), rest[0])
        rest.remove(ready)
        found.append(ready)
    return found


def place(passes: Passes, stage: Stage, step: Pass, before: Collection[Pass], at_end: bool) -> int | None:
    """The first index at which a pass may come, behind those of its kind that came `before` it, if there is one."""
    for at in range(len(passes) + at_end):
        rest = passes[at:]
        if stage in step.takes and not any(each.name in step.after or each in before for each in rest):
            return at
        stage = after(rest[0], stage) if rest else stage
    return None


def after(step: Pass, stage: Stage) -> Stage:
    """The stage of a program after a pass."""
    return stage if step.gives is None else step.gives


def end(passes: Sequence[Pass], stage: Stage) -> Stage:
    """The stage of a program after several passes."""
    for step in passes:
        stage = after(step, stage)
    return stage
