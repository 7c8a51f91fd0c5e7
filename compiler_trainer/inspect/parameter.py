"""The life of a parameter, read from a run's dumps.

It shows where the parameter is stored, gathered, cast and used, gathered again in the backward, over which axes and in
which dtype its gradient is reduced, and which operator updates it. It is read from the program before `bucket` merges
collectives of several parameters: there a change of placement is one operator, and each gradient has its own path.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from rich.console import Console
from rich.table import Table

from compiler_trainer.config.errors import UserError
from compiler_trainer.inspect.dumps import CASTS, Node, Run, Stage
from passes.ir.printer import format_dtype

GATHERED = {"all_gather": "gathered", "all_gather_invariant": "gathered", "invariant_to_replicate": "copied",
            "replicate_to_invariant": "cut", "invariant_to_shard": "cut", "replicate_to_shard": "cut"}  # fmt: skip
REDUCTIONS = ("reduce_scatter", "psum", "shard_to_partial", "invariant_to_partial")
# operators that only rearrange or join values: a gathered weight is still that weight after these
REARRANGES = ("getitem", "t", "view", "reshape", "transpose.int", "permute", "slice.Tensor", "narrow", "alias", "cat",
              "flatten.using_ints", "unflatten.int", "split_with_sizes", "wait_tensor")  # fmt: skip
ADDS = ("add", "add_")  # gradients of several uses, or microbatches


@dataclass(frozen=True)
class Event:
    """An event in a parameter's life: its kind `what`, the node at which it happens, and details such as the axis."""

    what: str
    node: Node
    detail: str


def parameters(run: Run, pattern: str) -> list[str]:
    """Return the names of parameters that match a pattern; raise UserError naming the nearest."""
    names = list(dict.fromkeys(n.label for stage in run.trained for n in stage.nodes if n.op == "parameter"))
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if not matches:
        near = difflib.get_close_matches(pattern, names, 1, 0)
        raise UserError(pattern, f"no parameter has such a name; did you mean {near[0]!r}?" if near else "none")
    return matches


def life(stage: Stage, name: str) -> list[Event]:
    """Return the events of a parameter in one program, in order."""
    source = next((n for n in stage.nodes if n.op == "parameter" and n.label == name), None)
    if source is None:
        return []
    stored = f"{source.spec}, {source.bytes:,} bytes a rank"
    events = [Event("stored", source, stored)]
    weights = forms(stage, source)
    for node in uses(stage, weights):
        events.append(happening(node, weights))
    gradient = gradient_ends(stage, source)
    events += reductions(stage, gradient)
    events += [
        Event("updated" if n.phase == "optimizer" else "written", n, f"by {n.op}") for n in writers(stage, source)
    ]
    return sorted(dict.fromkeys(events), key=lambda e: e.node.line)


def forms(stage: Stage, source: Node) -> dict[str, Node]:
    """Return the parameter and its other placements, dtypes and shapes, by node name; not in the optimizer."""
    nodes, stack = {source.name: source}, [source]
    while stack:
        for user in stage.users[stack.pop().name]:
            if user.phase != "optimizer" and user.name not in nodes and base(user) in (*GATHERED, *CASTS, *REARRANGES):
                nodes[user.name] = user
                stack.append(user)
    return nodes


def uses(stage: Stage, weights: dict[str, Node]) -> Iterator[Node]:
    """Yield forms that communicate or cast, and the operators that compute with a form."""
    for name, weight in weights.items():
        if base(weight) in (*GATHERED, *CASTS):
            yield weight
        for user in stage.users[name]:
            if user.name not in weights and user.phase != "optimizer":
                yield user


def happening(node: Node, weights: dict[str, Node]) -> Event:
    """Return the event for a form of the parameter, or for a use of it."""
    again = "again " if node.recomputed or node.phase == "backward" else ""
    if base(node) in CASTS:
        return Event(f"cast {again}".strip(), node, f"to {node.dtype}")
    if node.name in weights:
        action = GATHERED.get(base(node), "cut")
        cast = f"cast to {node.dtype}, " if node.dtype != weights[node.operands[0]].dtype else ""
        return Event(
            f"{action} {again}".strip(), node, f"{cast}over {axis_of(node)} to {node.value} {node.spec}".rstrip()
        )
    return Event("used in the backward" if again else "used", node, f"by {node.op}")


# ---- the gradient --------------------------------------------------------------------------------


def gradient_ends(stage: Stage, source: Node) -> list[Node]:
    """Return the nodes that leave as the parameter's gradient, and those that write into parameter or gradient."""
    results = zip(stage.graph.results(), stage.graph.outputs, strict=True)
    out = [stage.by_name[r.name] for r, o in results if o.kind == "gradient" and o.name == source.label]
    accumulators = [n for n in stage.nodes if n.op == "gradient" and n.label == source.label]
    return out + [w for target in (source, *accumulators) for w in writers(stage, target)]


def writers(stage: Stage, target: Node) -> list[Node]:
    """Return operators that write into an input: their name ends in an underscore and it is their first operand."""
    return [
        n
        for n in stage.users[target.name]
        if n.op.split(".")[0].endswith("_") and n.operands and n.operands[0] == target.name
    ]


def reductions(stage: Stage, ends: list[Node]) -> list[Event]:
    """Return the reductions between the operators that compute the parameter's gradient and its update.

    The search goes back from the update, through all operators of the optimizer, and through operators of the backward
    that move, join or add a gradient. It stops at operators that compute one, because their operands are gradients of
    activations. Paths through a scalar (the norm for clipping) lead to every gradient and do not count.
    """
    events, visited, stack = [], set(), list(ends)
    while stack:
        node = stack.pop()
        if node.name in visited or node.is_input:
            continue
        visited.add(node.name)
        if base(node) in REDUCTIONS and math.prod(node.shape or (1,)) > 1:
            what = "gradient reduced" if base(node) in ("reduce_scatter", "psum") else "gradient moved"
            events.append(Event(what, node, f"by {node.op} over {axis_of(node)} in {dtype_of(node, stage)}"))
        if node.phase == "optimizer" or base(node) in (*REDUCTIONS, *REARRANGES, *CASTS, *ADDS):
            stack += [stage.by_name[o] for o in node.operands if o in stage.by_name]
        elif node.phase == "backward":
            events.append(Event("gradient computed", node, f"by {node.op}"))
    end_names = {n.name for n in ends}
    return [e for e in events if e.node.phase != "forward" and leads_to_one(stage, e.node, end_names)]


def leads_to_one(stage: Stage, node: Node, ends: set[str]) -> bool:
    """Return True if the value reaches the parameter's ends without passing through a scalar, such as a norm."""
    stack, visited = [node], set()
    while stack:
        current = stack.pop()
        if current.name in ends:
            return True
        if current.name not in visited and (current.shape or current is node or not current.dtype):
            visited.add(current.name)
            stack += stage.users[current.name]
    return False


# ---- words ---------------------------------------------------------------------------------------


def base(node: Node) -> str:
    """Return the operator's name, without its overload unless the overload matters here."""
    return node.op if node.op in (*CASTS, *REARRANGES) else node.op.split(".")[0]


def axis_of(node: Node) -> str:
    """Return the axis that a reshard operator names."""
    return next((arg.partition(":")[0] for arg in node.node.args if isinstance(arg, str)), "?")


def dtype_of(node: Node, stage: Stage) -> str:
    """Return the dtype in which terms travel: the operator's last argument, otherwise its operand's dtype."""
    last = node.node.args[-1]
    return format_dtype(last) if isinstance(last, torch.dtype) else stage.by_name[node.operands[0]].dtype


def chosen(run: Run) -> list[Stage]:
    """Return, for each program that trains, the stage before collectives are merged and written out."""
    programs = dict.fromkeys(stage.program for stage in run.trained)
    after = ("bucket", "collectives", "communicators", "overlap")
    return [[s for s in run.program(p) if s.name not in after][-1] for p in programs]


def show(run: Run, name: str, out: Console) -> None:
    """Print one parameter as a table."""
    table = Table("what", "how", "node", "line", "module", title=name, title_justify="left")
    for stage in chosen(run):
        for event in life(stage, name):
            place = f"{stage.title}.txt:{event.node.line}"
            table.add_row(event.what, event.detail, f"%{event.node.name} {place}", event.node.source, event.node.module)
    out.print(table)


def show_parameters(run: Run, pattern: str, out: Console) -> None:
    """Print every matching parameter as a table; raise UserError if none matches."""
    for name in parameters(run, pattern):
        show(run, name, out)
