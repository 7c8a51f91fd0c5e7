"""Find the nodes that sort rows by expert and restore their order; replace them by operators that allow any order.

    _, perm = sort(ids)
    rows = x[perm // k]                          rows = ct::dispatch(x, ids, k, way)
    ends = cumsum(histc(ids))              ->    groups = ct::groups(ids, way)
    y = act(grouped_mm(rows, w, ends))           y = act(ct::expert_mm(rows, w, groups))
    out = y[inverse of perm]                     out = ct::combine(y, ids, way)

With these operators each rank sorts the rows of its own tokens; the model's sort needs all tokens. Experts spread over
D ranks (`mesh.ep`) have D owners; each owner sorts the rows of its own experts, from all tokens.

This is correct only if no operator in between depends on the order: by its rule, each must treat every row alone.
If an operator does not, the report names it, and the model's own operators stay.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from passes.ir import ir
from passes.ir.operators import SHAPED, argument, is_operator, name_of
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.ops import routed
from passes.ops.routed import Way
from passes.rules import rule_of, tensor_operands
from passes.sharding.dispatch import Method, Part, choose, dropped, parts_of
from passes.sharding.infer import experts_of, products_of_all
from passes.sharding.normalize import counts_up, drops_entries
from passes.trace.editor import Editor

aten = torch.ops.aten
DROPPED = "dropped_rows"  # the count of rows for which the buffers have no room
GROUPED_MATMULS = ("_grouped_mm", "ct::grouped_mm")
SAME = ("_to_copy", "alias", "detach", "clone")

# kinds of values: the permutation; its tokens (permutation // k); a sort of it; its inverse; expert ids (in any order);
# ids as a column; ids compared with each expert; rows per expert; their running sum; rows
Kind = Literal["permutation", "tokens", "sorted", "inverse", "ids", "column", "hits", "counts", "ends", "rows"]
COUNTING = ("ids", "column", "hits", "counts", "ends")  # steps whose counts do not depend on the order

Replacement = Literal["dispatch", "combine", "matmul", "of expert"]  # the operator that replaces a node
SIZED = ("view", "reshape", "_unsafe_view", "expand")  # operators with the shape of their result among their arguments


class NotRowwise(Exception):
    """A node between sort and inverse depends on the order of rows."""


@dataclass
class Region:
    """The nodes after a sort of ids: the kind of each value, and the replacement of each node that has one."""

    sort: fx.Node
    kinds: dict[fx.Node, Kind] = field(default_factory=dict)
    share: dict[fx.Node, int] = field(default_factory=dict)  # rows per token, of tokens
    unsorted: set[fx.Node] = field(default_factory=set)  # ids in the model's order, and counts of them
    groups: int = 0
    replacements: dict[fx.Node, Replacement] = field(default_factory=dict)

    @property
    def ids(self) -> fx.Node:
        """The expert of each slot, int[slots]."""
        return self.sort.args[0]  # type: ignore[return-value]

    @property
    def size(self) -> int:
        """The number of slots."""
        return ir.example(self.ids).shape[0]

    def kind(self, arg: Any) -> Kind | None:
        """Return the kind of an argument; None if it is not in this region."""
        return self.kinds.get(arg) if isinstance(arg, fx.Node) else None


@dataclass(frozen=True)
class Experts(ir.Pass):
    """Replace the sort of rows by expert with operators that each rank runs on the rows of its own tokens.

    `dispatch` is the method that brings rows to experts on other ranks; a bounded buffer has room for `capacity_factor`
    even shares. Rows are exchanged in `chunks`.
    """

    dispatch: Method = "auto"
    capacity_factor: float = 1.25
    chunks: int = 1
    name = "experts"
    takes = (Stage.NORMALIZED,)

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        notes, sorts, visited, dropped_rows = [], dict[fx.Node, str](), set[fx.Node](), None
        in_chunks: list[fx.Node] = []
        owners = program.mesh[program.mesh.experts_over] if program.mesh.experts_over else 1
        for node in list(program.calls()):
            if node in visited or not is_sort_of_ids(node):
                continue
            try:
                region = follow(node)
            except NotRowwise as error:
                notes.append(f"%{node.name} ({ir.source(node)}): rows sorted by expert are gathered: {error}")
                continue
            visited.update(region.kinds)
            if region.groups:
                way = Way(region.groups, max(region.share.values(), default=1), owners)
                way, reason = choose(self.dispatch, self.capacity_factor, region.ids, way, program)
                notes += [f"%{node.name} ({ir.source(node)}): {reason}"] if reason else []
                in_chunks += [node] if self.chunks > 1 and way.sources else []
                edit = Editor.before(region.sort, ctx)
                parts = parts_of(region.ids, way, self.chunks, edit)
                if way.drops:
                    term = dropped(parts, edit)
                    dropped_rows = term if dropped_rows is None else edit.call(aten.add.Tensor, (dropped_rows, term))
                rewrite(region, parts, ctx)
                sorts[node] = reason.partition(":")[0]
        effects = tuple(self.effects(program, sorts, in_chunks, owners))
        if owners > 1:
            for node in products_of_all(program):
                node.target = routed.each_mm
            refuse_unspread(program, len(sorts), notes)
        program = program if dropped_rows is None else with_count(program, DROPPED, dropped_rows)
        program.graph.eliminate_dead_code()
        program.module.recompile()
        return program, ir.Report({"sorted by expert": len(sorts)}, tuple(notes), effects=effects)

    def effects(
        self, program: ir.Program, sorts: Mapping[fx.Node, str], in_chunks: Sequence[fx.Node], owners: int
    ) -> Iterator[ir.Effect]:
        """Yield the effects of the options, given the method of each layer of experts that is sorted by expert.

        The rows of the layers `in_chunks` travel in chunks.
        """
        things, methods = "layers of experts send rows to other ranks", ", ".join(dict.fromkeys(sorts.values()))
        for option, is_asked in (("dispatch", self.dispatch != "auto"), ("chunks", self.chunks > 1)):
            if not sorts and is_asked:
                unmet = "no operator of the model sorts rows by expert; leave it out"
                yield ir.Effect(f"passes.moe.{option}", 0, things, 0, unmet=unmet)
        if sorts:
            total = program.count(sorts)
            detail = methods if owners > 1 else "each rank has all experts"
            yield ir.Effect("passes.moe.dispatch", total if owners > 1 else 0, things, total, detail)
            if self.chunks > 1:
                unmet = "no rows travel; set mesh.ep, and passes.moe.dispatch to dropless or bounded"
                chunked = program.count(in_chunks)
                things = "layers of experts send rows in chunks"
                yield ir.Effect("passes.moe.chunks", chunked, things, total, unmet=unmet)


def refuse_unspread(program: ir.Program, count: int, notes: list[str]) -> None:
    """Raise Refused if there are no experts to spread, or some remain whose operators depend on the order of rows."""
    remaining = [n for n in program.calls() if name_of(n) in GROUPED_MATMULS]
    if remaining:
        reason = "; ".join(notes) or "nothing sorts its rows by expert"
        raise ir.Refused("experts", remaining[0], f"mesh.ep: these experts cannot be spread: {reason}")
    if not count and not experts_of(program):
        raise ir.Refused("experts", None, "mesh.ep: there are no experts to spread: nothing sorts rows by expert")


def with_count(program: ir.Program, name: str, value: fx.Node) -> ir.Program:
    """Return the program with a count added to its outputs."""
    program.graph.output_node().args = ((*program.results(), value),)
    return replace(program, outputs=(*program.outputs, ir.Output(name, "count", Spec(()))))


def is_sort_of_ids(node: fx.Node) -> bool:
    """Return True if a node sorts a vector of integers in ascending order, and its permutation is used."""
    if name_of(node) != "sort":
        return False
    ids, descending = ir.example(node.args[0]), argument(node, "descending", False)  # type: ignore[arg-type]
    is_used = any(user.target is operator.getitem and user.args[1] == 1 and user.users for user in node.users)
    return ids.dim() == 1 and not ids.is_floating_point() and not descending and is_used


# ---- the nodes after a sort -----------------------------------------------------------------------------------


def follow(sort: fx.Node) -> Region:
    """Return all nodes computed from a sort's results, up to those that restore the order; raise NotRowwise."""
    region = Region(sort)
    region.kinds[region.ids] = "ids"
    region.unsorted.add(region.ids)
    for user in sort.users:
        region.kinds[user] = "permutation" if user.args[1] else "ids"
    for node in sort.graph.nodes:
        if node.op == "output" and any(region.kind(n) for n in node.all_input_nodes):
            raise NotRowwise("the model returns them")
        if node.op == "call_function" and node not in region.kinds and any(map(region.kind, node.all_input_nodes)):
            classify(region, node)
    for node, new in region.replacements.items():
        size = ir.example(node.args[0]).shape[0]  # type: ignore[arg-type]
        if new == "of expert" and region.groups not in (0, size):
            problem = f"looks up one of {size} rows, not of {region.groups} experts"
            raise NotRowwise(f"%{node.name} ({ir.source(node)}) {problem}")
    return region


def classify(region: Region, node: fx.Node) -> None:
    """Add a node that reads the region: its kind, and its replacement if it has one; raise NotRowwise."""
    kinds = [region.kind(n) for n in node.all_input_nodes]
    name = name_of(node)
    first = region.kind(node.args[0])
    if name in SHAPED and first != "rows":
        return
    if name in SAME and first and first != "rows":
        region.kinds[node] = first
        region.unsorted |= {node} if node.args[0] in region.unsorted else set()
        region.share |= {node: region.share[node.args[0]]} if first == "tokens" else {}  # type: ignore[index]
    elif name == "sort" and first == "permutation" and not argument(node, "descending", False):
        region.kinds[node] = "sorted"
    elif node.target is operator.getitem and first == "sorted" and node.args[1] == 1:
        region.kinds[node] = "inverse"
    elif name in ("floor_divide", "div") and first == "permutation" and divides_down(node):
        region.kinds[node], region.share[node] = "tokens", node.args[1]  # type: ignore[assignment]
        if len(set(region.share.values())) > 1:
            raise NotRowwise(f"%{node.name} ({ir.source(node)}) divides them by another number of choices per token")
    elif first in COUNTING and (kind := count_kind(region, node, name, first)):
        region.kinds[node] = kind
        region.unsorted |= {node} if node.args[0] in region.unsorted else set()
    elif name in GROUPED_MATMULS and kinds[0] == "rows" and region.kind(node.args[2]) == "ends" and not kinds[1]:
        add_matmul(region, node)
    elif only_unsorted(region, node):
        return  # not among the rows: an operator on both is refused
    elif name in ("index", "index_select"):
        add_lookup(region, node)
    elif name == "index_put":
        add_put(region, node)
    elif set(kinds) <= {"rows", None} and by_row(region, node):
        region.kinds[node] = "rows"
    elif not set(kinds) <= {"counts", "ends", None}:
        raise NotRowwise(f"%{node.name} ({ir.source(node)}) is {name or node.target} of them")


def only_unsorted(region: Region, node: fx.Node) -> bool:
    """Return True if a node reads only values in the model's own order of ids."""
    return all(n in region.unsorted for n in node.all_input_nodes if region.kind(n))


def count_kind(region: Region, node: fx.Node, name: str, of: Kind) -> Kind | None:
    """Return the kind of a step that counts ids, up to the ends of groups; None if it is no such step."""
    if of == "ids" and name == "histc" and counts_all(node):
        return "counts"
    if of == "ids" and name in ("unsqueeze", "view", "reshape") and ir.example(node).shape == (region.size, 1):
        return "column"
    if of == "column" and name == "eq" and isinstance(node.args[1], fx.Node) and counts_up(node.args[1]):
        numbers = ir.example(node.args[1])
        return "hits" if numbers.numel() == numbers.shape[-1:].numel() else None  # in one row
    if of == "hits" and name == "sum" and argument(node, "dim") == [0]:
        return "counts"
    return "ends" if of == "counts" and name == "cumsum" else None


def divides_down(node: fx.Node) -> bool:
    """Return True if a node divides by a positive integer and rounds down."""
    divisor, rounding = node.args[1], argument(node, "rounding_mode", "floor")
    return isinstance(divisor, int) and divisor > 0 and rounding in ("floor", "trunc")


def counts_all(node: fx.Node) -> bool:
    """Return True if a histogram has a bin for each integer from 0."""
    low, high = argument(node, "min", 0), argument(node, "max", 0)
    return low == 0 and high == argument(node, "bins", 100) - 1


def add_matmul(region: Region, node: fx.Node) -> None:
    """Add a grouped matmul of rows with their experts' matrices; raise NotRowwise for a form that is not replaced."""
    _, weight, ends = node.args[:3]
    options = (*node.args[3:], *node.kwargs.values())
    groups = ir.example(weight).shape[0]  # type: ignore[arg-type]
    if ir.example(weight).dim() != 3 or any(a is not None for a in options):  # type: ignore[arg-type]
        raise NotRowwise(f"%{node.name} ({ir.source(node)}) is a grouped matmul with a bias, or of another form")
    if groups != ir.example(ends).shape[0] or region.groups not in (0, groups):  # type: ignore[arg-type]
        raise NotRowwise(f"%{node.name} ({ir.source(node)}) has {groups} experts, others {region.groups}")
    region.groups = groups
    region.kinds[node] = "rows"
    region.replacements[node] = "matmul"


def add_lookup(region: Region, node: fx.Node) -> None:
    """Add a lookup: of rows by the permutation, of a table by expert, or of rows by the inverse permutation."""
    table, index = table_and_index(node)
    kind, size = region.kind(index), ir.example(table).shape[0]
    if kind in ("permutation", "tokens") and not region.kind(table):
        share = region.share.get(index, 1)
        if share * size != region.size:
            raise NotRowwise(f"%{node.name} ({ir.source(node)}) looks up {region.size} rows in {size}, {share} each")
        region.kinds[node], region.replacements[node] = "rows", "dispatch"
    elif kind == "ids" and not region.kind(table):
        region.kinds[node], region.replacements[node] = "rows", "of expert"
    elif kind == "inverse" and region.kind(table) == "rows":
        region.replacements[node] = "combine"
    else:
        raise NotRowwise(f"%{node.name} ({ir.source(node)}) looks them up in another way")


def table_and_index(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return (the table, the index into its first dim) of a lookup; raise NotRowwise for any other index."""
    if name_of(node) == "index_select" and node.args[1] == 0:
        return node.args[0], node.args[2]  # type: ignore[return-value]
    indices = node.args[1] if name_of(node) == "index" else None
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or ir.example(indices[0]).dim() != 1:  # type: ignore[arg-type]
        raise NotRowwise(f"%{node.name} ({ir.source(node)}) looks them up by more than one index")
    return node.args[0], indices[0]  # type: ignore[return-value]


def add_put(region: Region, node: fx.Node) -> None:
    """Add an `index_put` by the permutation: of 0, 1, 2, ... it is the inverse; of rows it restores their order."""
    target, indices, value = node.args[:3]
    by_permutation = [region.kind(i) for i in indices] == ["permutation"] and not argument(node, "accumulate", False)  # type: ignore[union-attr]
    if by_permutation and ir.example(target).shape[0] == region.size:  # type: ignore[arg-type]
        if region.kind(value) == "rows":
            region.replacements[node] = "combine"
            return
        if isinstance(value, fx.Node) and counts_up(value) and ir.example(value).shape == (region.size,):
            region.kinds[node] = "inverse"
            return
    raise NotRowwise(f"%{node.name} ({ir.source(node)}) puts them elsewhere")


def by_row(region: Region, node: fx.Node) -> bool:
    """Return True if by its rule an operator computes each row from the same row of its operands."""
    if node.target is operator.getitem:
        return True  # the operator that it reads was checked
    if not is_operator(node) or drops_entries(node):
        return False
    rule, operands = rule_of(node), tensor_operands(node)
    names = {dims[0] for n, dims in zip(operands, rule.operands) if region.kind(n)}
    if len(names) != 1 or len(row := names.pop()) != 1 or row[0] in rule.whole or row[0] in rule.reduced:
        return False
    in_other_dims = any(row[0] in n for i, dims in zip(operands, rule.operands) for n in dims[bool(region.kind(i)) :])
    return not in_other_dims and not rule.pad_safe and all(dims and dims[0] == row for dims in rule.results)


# ---- the replacements ---------------------------------------------------------------------------------


def rewrite(region: Region, parts: Sequence[Part], ctx: ir.Context) -> None:
    """Replace the model's operators by those of `routed`, once for each part; the combined parts are added up.

    Parts are computed one after another, and all are combined at the end, so that one part can be exchanged during the
    matmuls of another (`passes.communication.overlap`).
    """
    nodes = [n for n in region.sort.graph.nodes if n in region.replacements or region.kinds.get(n) == "rows"]
    copies: list[dict[fx.Node, fx.Node]] = [{} for _ in parts]
    waiting: list[fx.Node] = []  # nodes whose copies in other parts follow when the first part is complete
    for node in nodes:
        if region.replacements.get(node) != "combine":
            copies[0][node] = replacement(region, node, copies[0], parts[0], Editor.before(node, ctx))
            waiting.append(node)
            continue
        edit = Editor.before(node, ctx)
        for part_copies, part in zip(copies, parts):
            for inner in waiting if part_copies is not copies[0] else ():
                part_copies[inner] = replacement(region, inner, part_copies, part, edit.moved_to(node, inner))
        waiting.clear()
        results = [(part_copies[combined_rows(node)], part) for part, part_copies in zip(parts, copies)]
        terms = [edit.call(routed.combine, (rows, part.ids, list(part.way))) for rows, part in results]
        node.replace_all_uses_with(functools.reduce(lambda a, b: edit.call(aten.add.Tensor, (a, b)), terms))
    for node in reversed(nodes):
        node.graph.erase_node(node)
    for node, kind in region.kinds.items():
        if kind == "ids" and node.target is operator.getitem:
            node.replace_all_uses_with(region.ids)  # counts do not depend on the order of ids


def combined_rows(node: fx.Node) -> fx.Node:
    """Return the rows whose order a node restores."""
    return node.args[2] if name_of(node) == "index_put" else node.args[0]  # type: ignore[return-value]


def replacement(
    region: Region, node: fx.Node, copies: Mapping[fx.Node, fx.Node], part: Part, edit: Editor
) -> fx.Node:
    """Insert and return the replacement of a node in a part; `copies` replace the nodes before it."""
    match region.replacements.get(node):
        case "dispatch":
            table, index = table_and_index(node)
            share = ir.example(index).shape[0] // ir.example(table).shape[0]
            return edit.call(routed.dispatch, (table, part.ids, share, list(part.way)))
        case "matmul":
            return edit.call(routed.expert_mm, (copies[node.args[0]], node.args[1], part.groups, part.among))  # type: ignore[index]
        case "of expert":
            return edit.call(routed.of_expert, (table_and_index(node)[0], part.groups))
    with edit.inserting():
        copy = ir.copy_node(edit.graph, node, {n: copies.get(n, n) for n in node.all_input_nodes})
    if name_of(node) in SIZED:
        rows = ir.example(copy.args[0]).shape[0]  # type: ignore[arg-type]
        copy.args = (copy.args[0], [rows, *ir.example(node).shape[1:]], *copy.args[2:])
    return edit.computed(copy)
