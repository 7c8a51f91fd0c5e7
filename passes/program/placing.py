"""Where passes of one's own go among others: by the stage that they take, and by what they come after."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from passes.program.ir import Pass
from passes.program.stages import Stage

Passes = tuple[Pass, ...]


def placed(
    passes: Sequence[Pass], stage: Stage, extra: Sequence[Pass], later: Collection[str] = ()
) -> tuple[Passes, Passes]:
    """Passes that begin at a stage with those of `extra` that fit, each as early as it may come, and those that fit.

    One fits where the program is of a stage that it takes and no pass of its `after` comes behind, in `later` ones
    neither. They keep the order in which they are given.
    """
    found, fit = tuple(passes), list[Pass]()
    for step in extra:
        if (at := place(found, stage, step, later, fit)) is not None:
            found = (*found[:at], step, *found[at:])
            fit.append(step)
    return found, tuple(fit)


def place(
    passes: Passes, stage: Stage, step: Pass, later: Collection[str], before: Collection[Pass]
) -> int | None:
    """The first index at which a pass may come, behind those of its kind that came `before` it; None if there is none."""
    for at in range(len(passes) + 1):
        rest = passes[at:]
        is_ready = not any(each.name in step.after or each in before for each in rest)
        if stage in step.takes and is_ready and not any(name in step.after for name in later):
            return at
        stage = after(passes[at], stage) if rest else stage
    return None


def after(step: Pass, stage: Stage) -> Stage:
    """The stage of a program after a pass."""
    return stage if step.gives is None else step.gives


def end(passes: Sequence[Pass], stage: Stage) -> Stage:
    """The stage of a program after several passes."""
    for step in passes:
        stage = after(step, stage)
    return stage
