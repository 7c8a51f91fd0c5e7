"""Repeat the passes' result for a layer that stands for others: call the same bodies on the next layers' values.

    block(%x2, %layers.2.w)          block(%x2, %layers.2.w)
    block(%x3, %layers.3.w)          block(%x3, %layers.3.w)        the layer that stands for three
                                     block(%x4, %layers.4.w)
                                     block(%x5, %layers.5.w)
    block(%x6, %layers.6.w)          block(%x6, %layers.6.w)

Operands are tracked by layer distance: one from layer n-1 becomes the copy from layer n-1. The layers before and after
the layer that stands for others must call the same bodies on operands at the same distances. This makes repeating it
correct: passes treat these layers as they would treat any others in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import fx

from passes.ir import ir
from passes.ir.bodies import body_of_call, describe_layout
from passes.ir.folds import Fold, renumbered
from passes.ir.layer import Layer
from passes.ir.record import BodyNode, NodeRecord
from passes.ir.stages import Stage
from passes.lower.calls import is_result

Visit = tuple[fx.Node, ...]  # consecutive nodes of one layer


@dataclass(frozen=True)
class Unfold(ir.Pass):
    """Write out the layers for which one stands."""

    name = "unfold"
    takes = (Stage.SEGMENTED,)

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if not program.folds:
            raise ValueError("the program has no folded layers")
        left_out = sum(fold.left_out for fold in program.folds)
        detail = ", ".join(map(str, program.folds))
        while program.folds:
            program = Writer(program, program.folds[0]).write()
        effect = ir.Effect("passes.fold_layers", left_out, "layers copied from another", detail=detail)
        return program, ir.Report({"layers": left_out}, effects=(effect,))


def layers_of(program: ir.Program, fold: Fold) -> dict[fx.Node, int | None]:
    """Return each node's layer, not counting those left out, None outside of the stack; views go with the next node."""
    layers = {node: item.layer for node, item in zip(program.placeholders(), program.inputs, strict=True)}
    layers |= {node: ir.layer(node) for node in program.calls() if body_of_call(node)}
    by_node: dict[fx.Node, int | None] = {}
    following = None
    for node in reversed(program.graph.nodes):
        if node in layers:
            number = fold.number_of(layers[node])
            following = None if number is None else fold.counted(number)
        by_node[node] = following
    for node in program.calls():
        if is_result(node):
            by_node[node] = by_node[node.args[0]]  # type: ignore[index]
    return by_node


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return a node's operands, in the order of its arguments."""
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    return operands


@dataclass
class Writer:
    """The unfolded program; `copies` holds the nodes of layer `fold.number` for each layer repeated, its own at 0."""

    program: ir.Program
    fold: Fold
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[ir.Input] = field(default_factory=list)

    def __post_init__(self) -> None:
        at, n = self.fold.number, self.fold.left_out
        self.layer = layers_of(self.program, self.fold)
        nodes = [node for node in self.program.graph.nodes if node.op != "output"]
        self.visits = [Visit(group) for _, group in groupby(nodes, self.layer.__getitem__)]
        self.inputs_by_node = dict(zip(self.program.placeholders(), self.program.inputs, strict=True))
        depth = max(layer for layer in self.layer.values() if layer is not None) + 1
        by_layer = [[v for v in self.visits if self.layer[v[0]] == number] for number in range(depth)]
        folded = by_layer[at]
        self.template = dict[fx.Node, fx.Node]()  # a node of another layer -> its counterpart in the folded layer
        for layer in by_layer:
            if len(layer) == len(folded):
                self.template.update(pair for v, w in zip(layer, folded) if len(v) == len(w) for pair in zip(v, w))
        self.counterparts = {(folded, self.layer[node]): node for node, folded in self.template.items()}
        before, after = by_layer[at - 1], by_layer[at + 1]
        for neighbour in (before, after):
            if not all(node in self.template for visit in neighbour for node in visit):
                raise self.failure(folded[0][0] if folded else None, "is not called like the layers around it")
        self.shared = self.check(before, folded, after)
        self.strides = self.check_order(before, folded, after)
        self.env: dict[fx.Node, fx.Node] = {}  # the nodes of the folded program
        self.copies: list[dict[fx.Node, fx.Node]] = [self.env, *({} for _ in range(n))]

    # -- checks -------------------------------------------------------------------------------------

    def check(self, *layers: Sequence[Visit]) -> set[fx.Node]:
        """Return the values that three consecutive layers all read.

        Raise LayersDiffer if the layers differ otherwise.
        """
        shared = set[fx.Node]()
        for visits in zip(*layers, strict=True):
            for nodes in zip(*visits, strict=True):
                if len({self.describe(node) for node in nodes}) > 1:
                    raise self.failure(nodes[1], "differs from that of the layers around it")
                for operands in zip(*map(operands_of, nodes), strict=True):
                    if operands[0] is operands[1] is operands[2]:
                        shared.add(operands[0])
                    elif not self.follow(operands):
                        raise self.failure(nodes[1], f"reads %{operands[1]}, the layers around it not its counterpart")
        return shared

    def check_order(self, *layers: Sequence[Visit]) -> list[int]:
        """Return the distance from each visit to the next layer's, in visits; raise LayersDiffer if it is irregular."""
        place = {visit: i for i, visit in enumerate(self.visits)}
        strides = []
        for visits in zip(*layers, strict=True):
            before, folded, after = (place[visit] for visit in visits)
            if folded - before != after - folded:
                raise self.failure(visits[1][0], "does not stand between the layers around it")
            strides.append(after - folded)
        return strides

    def describe(self, node: fx.Node) -> Any:
        """Return a description of a node without its operands, the same in all layers."""
        description: Any = (node.op, node.target if node.op == "call_function" else "", describe_layout(ir.value(node)))
        if item := self.inputs_by_node.get(node):
            return *description, item.kind, item.spec, renumbered(item.name, self.fold.stack, 0)
        return *description, repr(fx.map_arg((node.args, node.kwargs), lambda n: None))

    def follow(self, operands: tuple[fx.Node, ...]) -> bool:
        """Return True if values are counterparts in consecutive layers, each at most one layer from its reader."""
        first, middle, last = (self.layer[n] for n in operands)
        if first is None or middle is None or last is None or not middle - first == last - middle == 1:
            return False
        counterparts = {self.template.get(n) for n in operands}
        return (
            len(counterparts) == 1 and len({self.describe(n) for n in (*counterparts, *operands) if n is not None}) == 1
        )

    def failure(self, node: fx.Node | None, message: str) -> ir.LayersDiffer:
        text = f"{self.fold.stack}.{self.fold.number}: its part {message}"
        return ir.LayersDiffer("unfold", node, text)

    # -- writing --------------------------------------------------------------------------------------

    def write(self) -> ir.Program:
        """Return the unfolded program."""
        for visit, copy in self.order():
            for node in visit:
                self.put(node, copy, self.copies[copy])
        old = self.program.graph.output_node()
        self.graph.output(fx.map_arg(old.args[0], lambda n: self.operand(n, None, 0)))
        return self.program.with_graph(self.graph, inputs=tuple(self.inputs), folds=self.program.folds[1:])

    def order(self) -> list[tuple[Visit, int]]:
        """Return all visits, and copies of the folded layer's, in order: layers that interleave still interleave.

        6a 7b 5a 6b 4a 5b   ->   7a 8b 6a 7b 5a 6b 4a 5b        layer 5 written twice
        """
        at, n = self.fold.number, self.fold.left_out
        of_layer: dict[int | None, list[int]] = {}
        for i, visit in enumerate(self.visits):
            of_layer.setdefault(self.layer[visit[0]], []).append(i)
        folded = of_layer[at]
        turn = {i: v for number, places in of_layer.items() if len(places) == len(folded) for v, i in enumerate(places)}
        place = list(range(len(self.visits)))
        for group in self.groups():  # visits after those left out make room for them
            for i, visit in enumerate(self.visits):
                number = self.layer[visit[0]]
                if number is not None and turn.get(i) in group:
                    is_later = number <= at if self.strides[group[0]] < 0 else number > at
                else:
                    is_later = i > folded[group[0]]
                place[i] += n * len(group) * is_later
        places_taken = {place[i]: (visit, 0) for i, visit in enumerate(self.visits)}
        for i, stride in zip(folded, self.strides):
            places_taken |= {place[i] + copy * stride: (self.visits[i], copy) for copy in range(1, n + 1)}
        if len(places_taken) != len(self.visits) + n * len(folded):
            raise self.failure(None, "interleaves with other layers irregularly")
        return [places_taken[i] for i in sorted(places_taken)]

    def groups(self) -> list[list[int]]:
        """Return the visits of a layer, by number, grouped by those that alternate with its neighbours' together."""
        visits, groups = list(range(len(self.strides))), []
        while visits:
            stride = self.strides[visits[0]]
            groups.append(visits[: abs(stride)])
            visits = visits[len(groups[-1]) :]
            if [self.strides[v] for v in groups[-1]] != [stride] * abs(stride):
                raise self.failure(None, "interleaves with other layers irregularly")
        return groups

    def put(self, node: fx.Node, copy: int, env: dict[fx.Node, fx.Node]) -> None:
        """Append the node, or its copy for a later layer."""
        reader, number = self.layer[node], self.fold.number + copy
        name = f"{node.name}_{number}" if copy else node.name
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.operand(n, reader, copy))
        target = name if node.op == "placeholder" else node.target
        new = env[node] = self.graph.create_node(node.op, target, args, kwargs, name=name)
        record = ir.record(node)
        ir.set_record(new, record if reader is None else self.in_whole(record, self.count_missing(reader, copy), copy))
        if item := self.inputs_by_node.get(node):
            layer, name = Layer(self.fold.stack, number), renumbered(item.name, self.fold.stack, number)
            self.inputs.append(replace(item, name=name, layer=layer) if copy else item)

    def count_missing(self, reader: int, copy: int) -> int:
        """Return the number of layers that are left out before a layer, or before its copy."""
        return copy if reader <= self.fold.number else self.fold.left_out

    def in_whole(self, record: NodeRecord, missing: int, copy: int) -> NodeRecord:
        """Return the record of a node, or of its copy, in the unfolded program.

        It contains the records of the nodes that a call replaces.
        """
        end, in_whole = f"_{self.fold.number + copy}" if copy else "", self.fold.record_in_whole
        body_nodes = tuple(BodyNode(name + end, in_whole(inner, missing)) for name, inner in record.body_nodes)
        return replace(in_whole(record, missing), body_nodes=body_nodes)

    def operand(self, node: fx.Node, reader: int | None, copy: int) -> fx.Node:
        """Return the node that replaces an operand of a node of layer `reader`, or of its copy for a later layer."""
        at, left_out, layer = self.fold.number, self.fold.left_out, self.layer[node]
        if layer is None or node in self.shared:
            return self.env[node]
        if reader is None:
            if layer == at:
                raise self.failure(node, "is read outside of the layers")
            return self.env[node]
        if not copy and (reader <= at) == (layer <= at):
            return self.env[node]
        number = layer + self.count_missing(reader, copy)  # counting all layers
        if at <= number <= at + left_out and node in self.template:
            return self.copies[number - at][self.template[node]]
        counterpart = self.counterparts.get((self.template.get(node), number if number < at else number - left_out))
        if counterpart is None:
            raise self.failure(node, "is read by a layer too far away")
        return self.env[counterpart]
