"""Insert a user's passes among others: by the stage that they take, and by the passes they must follow."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from passes.ir.ir import Pass
from passes.ir.stages import Stage

Passes = tuple[Pass, ...]


def placed(
    passes: Sequence[Pass], stage: Stage, extra: Sequence[Pass], later: Collection[str] = (), at_end: bool = True
) -> tuple[Passes, Passes]:
    """Return the passes with those of `extra` that fit inserted, each at its first position, and those that fit.

    The passes begin at `stage`. A pass fits if the program is at a stage that it takes and no pass in its `after` comes
    later, here or among the `later` names; unless `at_end`, it must precede another pass. Otherwise passes keep the
    given order.
    """
    combined, inserted = tuple(passes), list[Pass]()
    for step in ordered(extra):
        index = place(combined, stage, step, inserted, at_end)
        if index is not None and not set(step.after) & set(later):
            combined = (*combined[:index], step, *combined[index:])
            inserted.append(step)
    return combined, tuple(inserted)


def ordered(extra: Sequence[Pass]) -> list[Pass]:
    """Return the passes in the given order, but each after those of them that its `after` names."""
    remaining, result = list(extra), list[Pass]()
    while remaining:
        names = {step.name for step in remaining}
        ready = next((step for step in remaining if not names & (set(step.after) - {step.name})), remaining[0])
        remaining.remove(ready)
        result.append(ready)
    return result


def place(passes: Passes, stage: Stage, step: Pass, before: Collection[Pass], at_end: bool) -> int | None:
    """Return the first index at which a pass may be inserted, after the `before` passes; None if there is none."""
    for index in range(len(passes) + at_end):
        following = passes[index:]
        if stage in step.takes and not any(other.name in step.after or other in before for other in following):
            return index
        stage = after(following[0], stage) if following else stage
    return None


def after(step: Pass, stage: Stage) -> Stage:
    """Return the stage of a program after a pass."""
    return stage if step.gives is None else step.gives


def end(passes: Sequence[Pass], stage: Stage) -> Stage:
    """Return the stage of a program after several passes."""
    for step in passes:
        stage = after(step, stage)
    return stage
