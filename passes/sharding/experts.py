"""Find what sorts rows by expert and puts them back, and write it in operators whose rows may lie in any order.

    _, perm = sort(ids)
    rows = x[perm // k]                          rows = ct::dispatch(x, ids, k, way)
    ends = cumsum(histc(ids))              ->    groups = ct::groups(ids, way)
    y = act(grouped_mm(rows, w, ends))           y = act(ct::expert_mm(rows, w, groups))
    out = y[inverse of perm]                     out = ct::combine(y, ids, way)

Written so, each rank sorts the rows of its own tokens; as it stands, a sort needs them all. Experts that are spread
over D ranks (`mesh.ep`) have D owners, each of which sorts what goes to its own, of all tokens.

That is right only if nothing in between minds the order: by its rule every operator there treats each row by itself.
Where something does mind, the report says what, and the model's own operators stay.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from passes.program import ir, routed
from passes.program.editor import Editor
from passes.program.operators import SHAPED, argument, is_operator, name_of
from passes.program.routed import Way
from passes.program.spec import Spec
from passes.program.stages import Stage
from passes.rules import rule_of, tensor_operands
from passes.sharding.dispatch import Method, Part, choose, dropped, parts_of
from passes.sharding.infer import experts_of, products_of_all
from passes.sharding.normalize import drops

aten = torch.ops.aten
DROPPED = "dropped_rows"  # the count of rows which found no room
PRODUCTS = ("_grouped_mm", "ct::grouped_mm")
SAME = ("_to_copy", "alias", "detach", "clone")

# what a value is: the permutation, the tokens that it names, a sort of it, its inverse; ids (in any order), a column of
# them, which of the experts each is, how many each has, their running sum; rows
Kind = Literal["permutation", "tokens", "sorted", "inverse", "ids", "column", "hits", "counts", "ends", "rows"]
COUNTING = ("ids", "column", "hits", "counts", "ends")  # what comes of them is the same in any order


Written = Literal["there", "back", "product", "by expert"]  # what is written in place of a node
AT_SIZE = ("view", "reshape", "_unsafe_view", "expand")  # operators that are told the shape of their result


class NotRowwise(Exception):
    """A node between sort and inverse that does not treat each row by itself."""


@dataclass
class Region:
    """What follows a sort of ids: what each value is, and what is to be written in place of which node."""

    sort: fx.Node
    kinds: dict[fx.Node, Kind] = field(default_factory=dict)
    share: dict[fx.Node, int] = field(default_factory=dict)  # of tokens: how many rows each has
    unsorted: set[fx.Node] = field(default_factory=set)  # ids as they came, and what counts them
    groups: int = 0
    written: dict[fx.Node, Written] = field(default_factory=dict)

    @property
    def ids(self) -> fx.Node:
        """The expert of each slot."""
        return self.sort.args[0]  # type: ignore[return-value]

    @property
    def size(self) -> int:
        """How many slots there are."""
        return ir.example(self.ids).shape[0]

    def kind(self, arg: Any) -> Kind | None:
        """What an argument is, None if it is nothing of this region."""
        return self.kinds.get(arg) if isinstance(arg, fx.Node) else None


@dataclass(frozen=True)
class Experts(ir.Pass):
    """Write rows sorted by expert in operators that each rank runs on the rows of its own tokens.

    `dispatch` is how rows get to experts that are spread over ranks; a bounded buffer has room for `capacity_factor`
    even shares. Rows that travel do so in `chunks`.
    """

    dispatch: Method = "auto"
    capacity_factor: float = 1.25
    chunks: int = 1
    name = "experts"
    takes = (Stage.NORMALIZED,)

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        notes, found, met, lost = [], 0, set[fx.Node](), None
        owners = program.mesh[program.mesh.experts_over] if program.mesh.experts_over else 1
        for node in list(program.calls()):
            if node in met or not is_sort_of_ids(node):
                continue
            try:
                region = follow(node)
            except NotRowwise as error:
                notes.append(f"%{node.name} ({ir.source(node)}): rows sorted by expert are gathered: {error}")
                continue
            met.update(region.kinds)
            if region.groups:
                way = Way(region.groups, max(region.share.values(), default=1), owners)
                way, why = choose(self.dispatch, self.capacity_factor, region.ids, way, program)
                notes += [f"%{node.name} ({ir.source(node)}): {why}"] if why else []
                if self.chunks > 1 and not way.sources:
                    fix = "set mesh.ep, and passes.moe.dispatch to dropless or bounded"
                    raise ir.Refused("experts", node, f"passes.moe.chunks: {self.chunks}, but no rows travel; {fix}")
                edit = Editor.before(region.sort, ctx)
                parts = parts_of(region.ids, way, self.chunks, edit)
                if way.drops:
                    term = dropped(parts, edit)
                    lost = term if lost is None else edit.call(aten.add.Tensor, (lost, term))
                rewrite(region, parts, ctx)
                found += 1
        if owners > 1:
            for node in products_of_all(program):
                node.target = routed.each_mm
            refuse_unspread(program, found, notes)
        program = program if lost is None else with_count(program, DROPPED, lost)
        program.graph.eliminate_dead_code()
        program.module.recompile()
        return program, ir.Report({"sorted by expert": found}, tuple(notes))


def refuse_unspread(program: ir.Program, found: int, notes: list[str]) -> None:
    """Raises Refused where experts are to be spread and there are none, or some whose rows mind their order."""
    left = [n for n in program.calls() if name_of(n) in PRODUCTS]
    if left:
        why = "; ".join(notes) or "nothing sorts its rows by expert"
        raise ir.Refused("experts", left[0], f"mesh.ep: these experts cannot be spread: {why}")
    if not found and not experts_of(program):
        raise ir.Refused("experts", None, "mesh.ep: there are no experts to spread: nothing sorts rows by expert")


def with_count(program: ir.Program, name: str, value: fx.Node) -> ir.Program:
    """The program with a count among what it returns."""
    program.graph.output_node().args = ((*program.results(), value),)
    return replace(program, outputs=(*program.outputs, ir.Output(name, "count", Spec(()))))


def is_sort_of_ids(node: fx.Node) -> bool:
    """Whether a node sorts integers in a row, upwards, and the permutation is used."""
    if name_of(node) != "sort":
        return False
    ids, down = ir.example(node.args[0]), argument(node, "descending", False)  # type: ignore[arg-type]
    used = any(user.target is operator.getitem and user.args[1] == 1 and user.users for user in node.users)
    return ids.dim() == 1 and not ids.is_floating_point() and not down and used


# ---- what follows a sort -------------------------------------------------------------------------------------


def follow(sort: fx.Node) -> Region:
    """All that is made of a sort's results, up to where rows are back in place; raises Minds."""
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
    return region


def classify(region: Region, node: fx.Node) -> None:
    """Say what a node is that reads something of the region, and what it becomes; raises Minds."""
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
            raise NotRowwise(f"%{node.name} ({ir.source(node)}) takes them for another number of choices a token")
    elif first in COUNTING and (counted := count(region, node, name, first)):
        region.kinds[node] = counted
        region.unsorted |= {node} if node.args[0] in region.unsorted else set()
    elif name in PRODUCTS and kinds[0] == "rows" and region.kind(node.args[2]) == "ends" and not kinds[1]:
        product(region, node)
    elif name in ("index", "index_select"):
        look_up(region, node)
    elif name == "index_put":
        put(region, node)
    elif set(kinds) <= {"rows", None} and by_row(region, node):
        region.kinds[node] = "rows"
    elif not set(kinds) <= {"counts", "ends", None} and not only_unsorted(region, node):
        raise NotRowwise(f"%{node.name} ({ir.source(node)}) is {name or node.target} of them")


def only_unsorted(region: Region, node: fx.Node) -> bool:
    """Whether a node reads what comes of the ids in the model's own order."""
    return all(n in region.unsorted for n in node.all_input_nodes if region.kind(n))


def count(region: Region, node: fx.Node, name: str, of: Kind) -> Kind | None:
    """What a step on the way from ids to ends makes of them, None if it is no such step."""
    if of == "ids" and name == "histc" and counts_all(node):
        return "counts"
    if of == "ids" and name in ("unsqueeze", "view", "reshape") and ir.example(node).shape == (region.size, 1):
        return "column"
    if of == "column" and name == "eq" and isinstance(node.args[1], fx.Node) and counts_up(node.args[1]):
        return "hits"
    if of == "hits" and name == "sum" and argument(node, "dim") == [0]:
        return "counts"
    return "ends" if of == "counts" and name == "cumsum" else None


def divides_down(node: fx.Node) -> bool:
    """Whether a node divides by a positive whole number and rounds down."""
    by, rounding = node.args[1], argument(node, "rounding_mode", "floor")
    return isinstance(by, int) and by > 0 and rounding in ("floor", "trunc")


def counts_all(node: fx.Node) -> bool:
    """Whether a histogram has a bin for each whole number from 0."""
    low, high = argument(node, "min", 0), argument(node, "max", 0)
    return low == 0 and high == argument(node, "bins", 100) - 1


def product(region: Region, node: fx.Node) -> None:
    """A product of rows with the matrices of their experts."""
    given, weight, ends = node.args[:3]
    rest = (*node.args[3:], *node.kwargs.values())
    groups = ir.example(weight).shape[0]  # type: ignore[arg-type]
    if ir.example(weight).dim() != 3 or any(a is not None for a in rest):  # type: ignore[arg-type]
        raise NotRowwise(f"%{node.name} ({ir.source(node)}) is a product with a bias, or of another form")
    if groups != ir.example(ends).shape[0] or region.groups not in (0, groups):  # type: ignore[arg-type]
        raise NotRowwise(f"%{node.name} ({ir.source(node)}) has {groups} experts, others {region.groups}")
    region.groups = groups
    region.kinds[node] = "rows"
    region.written[node] = "product"


def look_up(region: Region, node: fx.Node) -> None:
    """Rows by a permutation, or by expert; or rows back in place."""
    table, index = looked_up(node)
    kind, size = region.kind(index), ir.example(table).shape[0]
    if kind in ("permutation", "tokens") and not region.kind(table):
        share = region.share.get(index, 1)
        if share * size != region.size:
            raise NotRowwise(f"%{node.name} ({ir.source(node)}) looks {region.size} rows up in {size}, {share} each")
        region.kinds[node], region.written[node] = "rows", "there"
    elif kind == "ids" and not region.kind(table):
        region.kinds[node], region.written[node] = "rows", "by expert"
    elif kind == "inverse" and region.kind(table) == "rows":
        region.written[node] = "back"
    else:
        raise NotRowwise(f"%{node.name} ({ir.source(node)}) looks them up otherwise")


def looked_up(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(a table, the index of its first dim); raises NotRowwise if the index is another."""
    if name_of(node) == "index_select" and node.args[1] == 0:
        return node.args[0], node.args[2]  # type: ignore[return-value]
    indices = node.args[1] if name_of(node) == "index" else None
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or ir.example(indices[0]).dim() != 1:  # type: ignore[arg-type]
        raise NotRowwise(f"%{node.name} ({ir.source(node)}) looks them up by more than one index")
    return node.args[0], indices[0]  # type: ignore[return-value]


def put(region: Region, node: fx.Node) -> None:
    """Numbers put where a permutation says, which is its inverse; or rows, which puts them back."""
    over, indices, value = node.args[:3]
    written_whole = [region.kind(i) for i in indices] == ["permutation"] and not argument(node, "accumulate", False)  # type: ignore[union-attr]
    if written_whole and ir.example(over).shape[0] == region.size:  # type: ignore[arg-type]
        if region.kind(value) == "rows":
            region.written[node] = "back"
            return
        if isinstance(value, fx.Node) and counts_up(value) and ir.example(value).shape == (region.size,):
            region.kinds[node] = "inverse"
            return
    raise NotRowwise(f"%{node.name} ({ir.source(node)}) puts them elsewhere")


def counts_up(node: fx.Node) -> bool:
    """Whether a node is 0, 1, 2, ... in one row."""
    while name_of(node) in ("unsqueeze", "view", "reshape", *SAME):
        if ir.example(node).numel() != max(ir.example(node).shape[-1:], default=0):
            return False
        node = node.args[0]  # type: ignore[assignment]
    if name_of(node) != "arange":
        return False
    return (argument(node, "start", 0), argument(node, "step", 1)) == (0, 1)


def by_row(region: Region, node: fx.Node) -> bool:
    """Whether, by its rule, an operator computes each row from the same row of its operands."""
    if node.target is operator.getitem:
        return True  # of an operator that does
    if not is_operator(node) or drops(node):
        return False
    rule, operands = rule_of(node), tensor_operands(node)
    names = {dims[0] for n, dims in zip(operands, rule.operands) if region.kind(n)}
    if len(names) != 1 or len(row := names.pop()) != 1 or row[0] in rule.whole or row[0] in rule.reduced:
        return False
    elsewhere = any(row[0] in n for i, dims in zip(operands, rule.operands) for n in dims[bool(region.kind(i)) :])
    return not elsewhere and not rule.pad_safe and all(dims and dims[0] == row for dims in rule.results)


# ---- what is written instead ---------------------------------------------------------------------------------


def rewrite(region: Region, parts: Sequence[Part], ctx: ir.Context) -> None:
    """Put the operators of `routed` in the place of the model's, once a part; what parts bring back is added up.

    One part is computed after the other, and all come back at the end: what travels may then move beside the products
    of others, as `passes.communication.overlap` lets it.
    """
    nodes = [n for n in region.sort.graph.nodes if n in region.written or region.kinds.get(n) == "rows"]
    copies: list[dict[fx.Node, fx.Node]] = [{} for _ in parts]
    waiting: list[fx.Node] = []  # nodes whose copies in other parts come when the first part is through
    for node in nodes:
        if region.written.get(node) != "back":
            copies[0][node] = written(region, node, copies[0], parts[0], Editor.before(node, ctx))
            waiting.append(node)
            continue
        edit = Editor.before(node, ctx)
        for copied, part in zip(copies, parts):
            for inner in waiting if copied is not copies[0] else ():
                copied[inner] = written(region, inner, copied, part, edit.moved_to(node, inner))
        waiting.clear()
        back = [(copied[brought_back(node)], part) for part, copied in zip(parts, copies)]
        terms = [edit.call(routed.combine, (rows, part.ids, list(part.way))) for rows, part in back]
        node.replace_all_uses_with(functools.reduce(lambda a, b: edit.call(aten.add.Tensor, (a, b)), terms))
    for node in reversed(nodes):
        node.graph.erase_node(node)
    for given, kind in region.kinds.items():
        if kind == "ids" and given.target is operator.getitem:
            given.replace_all_uses_with(region.ids)  # counts are the same of ids in any order


def brought_back(node: fx.Node) -> fx.Node:
    """The rows that a node puts back in place."""
    return node.args[2] if name_of(node) == "index_put" else node.args[0]  # type: ignore[return-value]


def written(
    region: Region, node: fx.Node, copied: Mapping[fx.Node, fx.Node], part: Part, edit: Editor
) -> fx.Node:
    """What stands in place of a node for a part, `copied` in place of those before it."""
    match region.written.get(node):
        case "there":
            table, index = looked_up(node)
            share = ir.example(index).shape[0] // ir.example(table).shape[0]
            return edit.call(routed.dispatch, (table, part.ids, share, list(part.way)))
        case "product":
            return edit.call(routed.expert_mm, (copied[node.args[0]], node.args[1], part.groups, part.among))  # type: ignore[index]
        case "by expert":
            return edit.call(routed.of_expert, (looked_up(node)[0], part.groups))
    with edit.inserting():
        copy = ir.copy_node(edit.graph, node, {n: copied.get(n, n) for n in node.all_input_nodes})
    if name_of(node) in AT_SIZE:
        rows = ir.example(copy.args[0]).shape[0]  # type: ignore[arg-type]
        copy.args = (copy.args[0], [rows, *ir.example(node).shape[1:]], *copy.args[2:])
    return edit.computed(copy)
