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
MIN_SAVING = 0.01  # of a step's time, for a change to be in the table
MAX_CHANGES = 8
GIB = 2**30
LAYER_NUMBER = re.compile(r"\.\d+$")


@dataclass(frozen=True)
class Profile:
    """A profile. The tables show the `busiest` rank, because its waits are the least likely to be for slower ranks."""

    cluster: str
    ranks: list[OfRank]
    busiest: OfRank
    predicted: Predicted
    causes: list[Cause]
    changes: list[Change]

    @property
    def worthwhile_changes(self) -> list[Change]:
        """The changes that fit and save enough, at most `MAX_CHANGES`; those that save most come first."""
        least_ms = MIN_SAVING * self.busiest.spent.step_ms
        return [c for c in self.changes if c.fits and c.saves_ms > least_ms][:MAX_CHANGES]


def profile(cfg: Config) -> Profile:
    """Return the profile of the run with these options.

    Raises UserError if the run was not measured, its measurements are damaged, or no cluster is known.
    """
    cfg = with_cluster(cfg)
    ranks = read_measurements(Path(cfg.run.dir))
    busiest = max(ranks, key=lambda rank: rank.busy_ms)
    stage = busiest.rank * cfg.mesh.pp // len(ranks)  # pp is the outermost axis: stages are equal blocks of ranks
    prediction = predicted(cfg, stage)
    return Profile(
        cluster=cfg.cluster.name,
        ranks=ranks,
        busiest=busiest,
        predicted=prediction,
        causes=causes(cfg, ranks, prediction.spent),
        changes=changes(cfg, busiest.spent, prediction, stage),
    )


def with_cluster(cfg: Config) -> Config:
    """Return the options with a cluster to predict for; raise UserError if none is set or matches the device."""
    cfg = for_running(cfg)
    if cfg.cluster.name == AUTO_CLUSTER.name:
        problem = f"is auto, but no cluster describes {device_name()}"
        raise UserError("cluster", f"{problem}; set one, for example cluster=h100")
    return cfg


def read_measurements(folder: Path) -> list[OfRank]:
    """Return the measurements of a run's ranks; raise UserError if they are missing or damaged."""
    path = folder / MEASURED
    fix = "train the run again with run.profile=true, or run compiler-trainer profile again"
    if not path.is_file():
        raise UserError(str(folder), f"has no {MEASURED}: {fix}")
    try:
        ranks = read(json.loads(path.read_text())["ranks"])
        if ranks and all(math.isfinite(rank.busy_ms) for rank in ranks):
            return ranks
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise UserError(str(path), f"is damaged: {fix}")


def as_json(profiled: Profile) -> dict[str, Any]:
    """Return the profile as a JSON object."""
    return {
        "ranks": [{"rank": r.rank, "host": r.host, **dataclasses.asdict(r.spent)} for r in profiled.ranks],
        "shown": profiled.busiest.rank,
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
    changes_if_any = [changes_table(profiled)] if profiled.worthwhile_changes else []
    return [kind_table(profiled), place_table(profiled), *changes_if_any]


def kind_table(profiled: Profile) -> Table:
    """Return a table of the milliseconds of a step: computed by kind, waited for by axis, and in total."""
    measured, expected = profiled.busiest.spent, profiled.predicted.spent
    title = f"a step of rank {profiled.busiest.rank}, the busiest of {len(profiled.ranks)}"
    table = Table("ms", "measured", "share", f"predicted for {profiled.cluster}", title=title)
    rows = [(kind, measured.kinds.get(kind, 0.0), expected.kinds.get(kind, 0.0)) for kind in COMPUTING]
    measured_waits, predicted_waits = measured.exposed_ms, expected.exposed_ms
    rows += [
        (f"waiting for {axis}", measured_waits.get(axis, 0.0), predicted_waits.get(axis, 0.0))
        for axis in {**measured_waits, **predicted_waits}
    ]
    rows += [("host, device idle", measured.host_ms, expected.host_ms), ("data", measured.data_ms, 0.0)]
    for name, ms, predicted_ms in (*rows, ("step", measured.step_ms, expected.step_ms)):
        if name == "step":
            table.add_section()
        table.add_row(name, f"{ms:,.1f}", f"{ms / measured.step_ms:.0%}", f"{predicted_ms:,.1f}")
    return table


def place_table(profiled: Profile) -> Table:
    """Return a table of the milliseconds computed by phase and stack of layers."""
    table = Table("computed in, ms", "measured", "predicted")
    measured, predicted = (sum_layers(spent.places) for spent in (profiled.busiest.spent, profiled.predicted.spent))
    for place in dict.fromkeys((*predicted, *measured)):
        table.add_row(place or "unnamed", f"{measured.get(place, 0.0):,.1f}", f"{predicted.get(place, 0.0):,.1f}")
    return table


def sum_layers(places: Mapping[str, float]) -> dict[str, float]:
    """Add up places that differ only in a last layer number: `forward layers.0`, ... become `forward layers.*`."""
    total = defaultdict[str, float](float)
    for place, ms in places.items():
        total[LAYER_NUMBER.sub(".*", place)] += ms
    return total


def changes_table(profiled: Profile) -> Table:
    """Return a table of changes predicted to save time, with the memory that they need."""
    table = Table("change", "predicted to save, ms", "of a step", "GiB needed", title="what to change")
    for change in profiled.worthwhile_changes:
        share = change.saves_ms / profiled.busiest.spent.step_ms
        table.add_row(change.options, f"{change.saves_ms:,.1f}", f"{share:.0%}", f"{change.device_bytes / GIB:,.3g}")
    return table


def lines(profiled: Profile) -> Sequence[str]:
    """Return lines on causes that no prediction covers, and on changes that do not fit into memory."""
    causes = [f"{c.what}{f' (up to {c.saves_ms:,.1f} ms)' if c.saves_ms else ''}; {c.fix}" for c in profiled.causes]
    no_change = f"no change of options that fits is predicted to save more than {MIN_SAVING:.0%} of a step"
    too_large = [
        f"does not fit: {c.options}" for c in profiled.changes if not c.fits and not c.refused and c.saves_ms > 0
    ]
    return [*causes, *([] if profiled.worthwhile_changes else [no_change]), *too_large]
