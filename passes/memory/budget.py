"""Choose the values to keep for the backward within a memory budget: the least recomputation that fits.

An integer program (Jain et al., Checkmate, arXiv 1910.02653, with one evaluation of each value in each direction)
chooses the values to keep within a byte limit. The peak of the finished program determines that limit.

    minimise   sum cost[v] * again[v]
    such that  kept[v] + again[v] >= 1                for each v that the backward reads
               kept[u] + again[u] >= again[v]         for each operand u of v
               sum bytes[v] * kept[v] <= limit
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from passes.cost.accounting import count_flops
from passes.ir import ir
from passes.ir.machine import Balance
from passes.trace.abstract_eval import Avals, abstract_eval

CLOSE = 0.002  # stop if the peak is within this share of the budget
PROBES = 16
GIB = 2**30


@dataclass
class Problem:
    """Values that may be recomputed: cost in bytes moved (or FLOPs as bytes), and bytes of fresh memory."""

    cost: dict[fx.Node, float]
    size: dict[fx.Node, int]
    read: set[fx.Node]  # by the backward
    operands: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    @property
    def all_bytes(self) -> int:
        """The bytes of all values."""
        return sum(self.size.values())


def pose(program: ir.Program, avals: Avals, free: set[fx.Node], balance: Balance) -> Problem:
    """Return the problem of the forward nodes in `free`; a view of another value is never kept itself."""
    problem = Problem({}, {}, {n for n in free if any(ir.phase(u) == "backward" for u in n.users)})
    for node in (n for n in program.calls() if n in free):  # in order, so that the solver's choice is deterministic
        operands = [n for n in node.all_input_nodes if n in avals.values]
        operand_storages = set().union(*(avals.storages(n) for n in operands)) if operands else set()
        fresh = avals.storages(node) - operand_storages
        moved_bytes = sum(avals.storage_bytes[s] for s in fresh | operand_storages) if fresh else 0
        problem.cost[node] = max(moved_bytes, count_flops(node, avals) / balance.flops_per_moved_byte) if fresh else 0.0
        problem.size[node] = sum(avals.storage_bytes[s] for s in fresh)
        problem.operands[node] = [n for n in node.all_input_nodes if n in free]
    return problem


def solve(problem: Problem, limit_bytes: float) -> set[fx.Node]:
    """Return the values to recompute if at most `limit_bytes` are kept; raises CompileError if there is no solution."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes half a second, and only this policy needs it
    from scipy.sparse import coo_matrix

    nodes = list(problem.cost)
    number = {node: i for i, node in enumerate(nodes)}
    n = len(nodes)
    read = [v for v in nodes if v in problem.read]
    rows: list[tuple[list[int], list[float]]] = [([number[v], n + number[v]], [1, 1]) for v in read]
    lower = [1.0] * len(rows)
    for v, operands in problem.operands.items():
        for u in operands:
            rows.append(([number[u], n + number[u], n + number[v]], [1, 1, -1]))
            lower.append(0.0)
    entries = [(i, j, x) for i, (columns, values) in enumerate(rows) for j, x in zip(columns, values)]
    i, j, x = zip(*entries)
    covered = LinearConstraint(coo_matrix((x, (i, j)), shape=(len(rows), 2 * n)).tocsr(), lb=np.array(lower))
    unit = max(problem.all_bytes, 1)
    sizes = np.array([problem.size[v] / unit for v in nodes] + [0.0] * n)
    within = LinearConstraint(sizes, ub=limit_bytes / unit)
    heaviest = max(problem.cost.values()) or 1.0
    objective = np.array([1e-6 * problem.size[v] / unit for v in nodes] + [problem.cost[v] / heaviest for v in nodes])
    views = np.array([0.0 if problem.size[v] == 0 else 1.0 for v in nodes] + [1.0] * n)
    options = {"mip_rel_gap": 1e-3, "time_limit": 30.0}
    solution = milp(objective, constraints=[covered, within], bounds=Bounds(0, views), integrality=1, options=options)
    if solution.x is None:
        raise ir.CompileError("remat", None, f"the solver found no solution for {n} values: {solution.message}")
    keep, recompute = solution.x[:n] > 0.5, solution.x[n:] > 0.5
    return {v for v, k, a in zip(nodes, keep, recompute) if a and not k}


@dataclass(frozen=True)
class BudgetChoice:
    """The values to recompute, the predicted peak of the finished program, and a note for the report."""

    chosen: set[fx.Node]
    peak_bytes: int
    note: str


def fit(
    program: ir.Program,
    ctx: ir.Context,
    free: set[fx.Node],
    given_bytes: int,
    headroom: float,
    peak: Callable[[set[fx.Node]], int],
    balance: Balance,
) -> BudgetChoice:
    """Return the least of `free` to recompute so that the predicted peak leaves a share `headroom` of the given bytes.

    Raises Refused if the budget is too small even with everything recomputed.
    """
    budget_bytes = int(given_bytes * (1 - headroom))
    avals = abstract_eval(program, ctx)
    problem = pose(program, avals, free, balance)
    least = peak(free)
    if least > budget_bytes:
        raise ir.Refused(
            "remat",
            None,
            f"passes.remat.budget_gib: {given_bytes / GIB:.4g} GiB cannot be reached; the least possible for this "
            f"model, batch and mesh is {least / (1 - headroom) / GIB:.4g} GiB, with every layer recomputed",
        )
    everything = peak(set())
    best, best_peak = (free, least) if everything > budget_bytes else (set(), everything)
    low, high = (0.0, float(least)), (float(problem.all_bytes), float(everything))  # (bytes kept, peak)
    for _ in range(PROBES):
        if budget_bytes - best_peak <= CLOSE * budget_bytes or not best or high[0] - low[0] <= CLOSE * budget_bytes:
            break
        slope = (budget_bytes - low[1]) / max(high[1] - low[1], 1)
        limit = low[0] + (high[0] - low[0]) * min(max(slope, 0.05), 0.95)
        chosen = solve(problem, limit)
        chosen_peak = peak(chosen)
        if chosen_peak > budget_bytes:
            high = limit, chosen_peak
            continue
        low = limit, chosen_peak
        if chosen_peak >= best_peak:
            best, best_peak = chosen, chosen_peak
    flops = sum(count_flops(node, avals) for node in best)
    note = (
        f"budget of {given_bytes / GIB:.4g} GiB: predicted peak {best_peak / GIB:.4g} GiB (least {least / GIB:.4g}, "
        f"keeping all {everything / GIB:.4g}), {flops:,} FLOPs repeated"
    )
    return BudgetChoice(best, best_peak, note)
