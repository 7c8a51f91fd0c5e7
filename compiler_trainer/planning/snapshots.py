"""The cost of the snapshots of elastic jobs: memory of a machine, and bytes to the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from rich.filesize import decimal
from rich.table import Table

from compiler_trainer.config.schema import Config
from compiler_trainer.step.captured import Captured, mesh_of
from compiler_trainer.step.step import state_name
from passes.ir import ir

STORED = (*ir.MODEL_STATE, "moment")
VERSIONS = 2  # in memory while one is being written


def snapshot_costs(cfg: Config, programs: Mapping[str, Captured], left_out: Set[str]) -> dict[str, float]:
    """Return bytes and milliseconds of a snapshot, of an average rank and of its machine.

    Of copies, one is written. `left_out` is the state that checkpoints leave out.
    """
    mesh, cluster = mesh_of(cfg.mesh), cfg.cluster
    bytes_by_name: dict[str, float] = {}
    for program, _ in programs.values():
        for entry, node in zip(program.inputs, program.placeholders(), strict=True):
            if entry.kind in STORED and (name := state_name(entry)) not in left_out:
                shards = math.prod(mesh[axis] for axis in mesh.axes if entry.spec.state(axis) == "shard")
                bytes_by_name[name] = ir.example(node).nbytes * shards / mesh.world_size
    written = sum(bytes_by_name.values())
    here, machines = min(mesh.world_size, cluster.gpus_per_node), -(-mesh.world_size // cluster.gpus_per_node)
    copies = 2 if machines > 1 else 1
    return {
        "interval": cfg.run.snapshot_interval,
        "rank_bytes": written,
        "machine_bytes": here * written * (1 + VERSIONS * copies),  # the first one is in the memory of the ranks
        "sent_bytes": here * written * (copies - 1),
        "sent_ms": 1e3 * written * (copies - 1) / (1e9 * cluster.inter_gb_s),
    }


def snapshot_table(costs: Mapping[str, float]) -> Table:
    """Return a table of the costs."""
    table = Table("", "", title=f"snapshots, every {costs['interval']:,} steps")
    table.add_row("written by a rank", decimal(round(costs["rank_bytes"])))
    table.add_row("memory of a machine, at most", decimal(round(costs["machine_bytes"])))
    if costs["sent_bytes"]:
        table.add_row("sent to the next machine", decimal(round(costs["sent_bytes"])))
        table.add_row("  beside steps, ms", f"{costs['sent_ms']:,.1f}")
    return table
