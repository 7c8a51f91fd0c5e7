"""Faults of `passes/memory`."""

from __future__ import annotations

from tools.faults.fault import Fault

FAULTS = (
    # recompute.py
    Fault(
        "clones_of_kept",
        "passes/memory/recompute.py",
        "new = node.graph.node_copy(node, lambda n: clones.get(n, n))",
        "new = node.graph.node_copy(node, lambda n: n)",
        "What is computed again is computed from values that should not be kept.",
    ),
    Fault(
        "random_twice",
        "passes/memory/recompute.py",
        'return "random" if is_random(node) else ""',
        'return ""',
        "Random operators are computed again and draw anew.",
    ),
    Fault(
        "writes_forgotten",
        "passes/memory/recompute.py",
        "return holders | {user for node in holders for user in node.users}",
        "return holders",
        "What reads memory that is written in place is computed again.",
    ),
    Fault(
        "sums_twice",
        "passes/memory/recompute.py",
        "WEIGHT_GATHERS | {boundary.reduce_scatter, boundary.psum, boundary.pmax, boundary.all_to_all}",
        "WEIGHT_GATHERS | {boundary.reduce_scatter, boundary.pmax, boundary.all_to_all}",
        "Sums over ranks travel again in the backward.",
    ),
    # remat.py
    Fault(
        "layers_run_together",
        "passes/memory/remat.py",
        'once or ("leaves its region" if leaves(node, region) else "") or reason',
        "once or reason",
        "What enters a layer is not kept either.",
    ),
)
