"""The profile of a run: measured and predicted times, causes, and possible changes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from compiler_trainer.config.cluster import AUTO_CLUSTER
from compiler_trainer.config.device import device_name, for_running
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import write_atomically
from compiler_trainer.config.schema import Config
from compiler_trainer.profile.causes import Cause, OfRank, causes, read
from compiler_trainer.profile.changes import Change, changes
from compiler_trainer.profile.predicted import Predicted, predicted
from compiler_trainer.training.trace import COMPUTING, MEASURED

FILE = "profile.json"
WORTH = 0.01  # share of a step that a proposal has to save
SHOWN = 8
GIB = 2**30
NUMBER = re.compile(r"\.\d+$")


@dataclass(frozen=True)
class Profile:
    """A profile; `shown` is the rank that works longest, so its waits are for communication, not for other ranks."""

    cluster: str
    ranks: list[OfRank]
    shown: OfRank
    predicted: Predicted
    causes: list[Cause]
    changes: list[Change]

    @property
    def worth(self) -> list[Change]:
        """The changes that fit and save enough."""
        return [c for c in self.changes if c.fits and c.saves_ms > WORTH * self.shown.spent.step_ms][:SHOWN]


def profile(cfg: Config) -> Profile:
    """Return the profile of a run from its options; raise UserError if it has no measurements."""
    cfg = resolve_job(cfg)
    ranks = measured(Path(cfg.run.dir))
    shown = max(ranks, key=lambda each: each.busy_ms)
    stage = shown.rank * cfg.mesh.pp // len(ranks)
    now = predicted(cfg, stage)
    causes_and_changes = causes(cfg, ranks, now.spent), changes(cfg, shown.spent, now, stage)
    return Profile(cfg.cluster.name, ranks, shown, now, *causes_and_changes)


def resolve_job(cfg: Config) -> Config:
    """Return the job with a cluster to predict for; raise UserError if neither options nor the device name one."""
    cfg = for_running(cfg)
    if cfg.cluster.name == AUTO_CLUSTER.name:
        raise UserError("cluster", f"auto, but no cluster describes {device_name()}; name one, cluster=h100, say")
    return cfg


def measured(folder: Path) -> list[OfRank]:
    """Return the measurements of a run's ranks; raise UserError if they are missing or damaged."""
    path = folder / MEASURED
    fix = "train it with run.profile=true, or profile its options again"
    if not path.is_file():
        raise UserError(str(folder), f"has no {MEASURED}: {fix}")
    try:
        ranks = read(json.loads(path.read_text())["ranks"])
        if ranks and all(math.isfinite(each.busy_ms) for each in ranks):
            return ranks
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise UserError(str(path), f"is damaged: {fix}")


def as_json(profiled: Profile) -> dict[str, Any]:
    """Return the profile as a JSON object."""
    return {
        "ranks": [{"rank": r.rank, "host": r.host, **dataclasses.asdict(r.spent)} for r in profiled.ranks],
        "shown": profiled.shown.rank,
        "cluster": profiled.cluster,
        "predicted": {**dataclasses.asdict(profiled.predicted.spent), "memory": dict(profiled.predicted.memory)},
        "causes": [dataclasses.asdict(cause) for cause in profiled.causes],
        "changes": [dataclasses.asdict(change) for change in profiled.changes],
    }


def write(profiled: Profile, folder: Path) -> None:
    """Write `profile.json` into a run folder."""
    write_atomically(folder / FILE, json.dumps(as_json(profiled), indent=1) + "\n")


# ---- on the console -----------------------------------------------------------------------------------


def tables(profiled: Profile) -> list[Table]:
    """Return tables of the time by kind and axis, by place in the model, and of changes."""
    shown = [by_kind(profiled), by_place(profiled)]
    return shown + ([to_change(profiled)] if profiled.worth else [])


def by_kind(profiled: Profile) -> Table:
    """Return a table of the milliseconds of a step by kind."""
    measured, expected = profiled.shown.spent, profiled.predicted.spent
    title = f"a step of rank {profiled.shown.rank}, the busiest of {len(profiled.ranks)}"
    table = Table("ms", "measured", "share", f"predicted for {profiled.cluster}", title=title)
    rows = [(kind, measured.kinds.get(kind, 0.0), expected.kinds.get(kind, 0.0)) for kind in COMPUTING]
    measured_waits, predicted_waits = measured.exposed_ms, expected.exposed_ms
    rows += [
        (f"waiting for {axis}", measured_waits.get(axis, 0.0), predicted_waits.get(axis, 0.0))
        for axis in {**measured_waits, **predicted_waits}
    ]
    rows += [("host, nothing computed", measured.host_ms, expected.host_ms), ("data", measured.data_ms, 0.0)]
    for name, ms, should_ms in (*rows, ("step", measured.step_ms, expected.step_ms)):
        if name == "step":
            table.add_section()
        table.add_row(name, f"{ms:,.1f}", f"{ms / measured.step_ms:.0%}", f"{should_ms:,.1f}")
    return table


def by_place(profiled: Profile) -> Table:
    """Return a table of the milliseconds computed by phase and stack of layers."""
    table = Table("ms computed in", "measured", "predicted")
    measured, predicted = (by_stack(each.places) for each in (profiled.shown.spent, profiled.predicted.spent))
    for place in dict.fromkeys((*predicted, *measured)):
        table.add_row(place or "unnamed", f"{measured.get(place, 0.0):,.1f}", f"{predicted.get(place, 0.0):,.1f}")
    return table


def by_stack(places: Mapping[str, float]) -> dict[str, float]:
    """Return the milliseconds with layers added up: `forward layers.*`."""
    total = defaultdict[str, float](float)
    for place, ms in places.items():
        total[NUMBER.sub(".*", place)] += ms
    return total


def to_change(profiled: Profile) -> Table:
    """Return a table of changes predicted to save time, with the memory that they need."""
    table = Table("change", "predicted to save, ms", "of a step", "GiB", title="what to change")
    for change in profiled.worth:
        share = change.saves_ms / profiled.shown.spent.step_ms
        table.add_row(change.options, f"{change.saves_ms:,.1f}", f"{share:.0%}", f"{change.device_bytes / GIB:,.3g}")
    return table


def lines(profiled: Profile) -> Sequence[str]:
    """Return lines on causes outside of the program, and on changes that are not in the table."""
    causes = [f"{c.what}{f' (up to {c.saves_ms:,.1f} ms)' if c.saves_ms else ''}; {c.fix}" for c in profiled.causes]
    no_change = [] if profiled.worth else ["no change of options is predicted to save more than 1 % of a step"]
    too_large = [
        f"does not fit: {c.options}" for c in profiled.changes if not c.fits and not c.refused and c.saves_ms > 0
    ]
    return [*causes, *no_change, *too_large]
