"""Offloading: keep forward values that the backward needs in host memory.

    y = silu(x)                     y = silu(x)
    z = mm(y, w)                    z = mm(y, w)
    ...                             host = to_host(y)        after the last use in the forward
    dw = mm(t(y), dz)               ...
                                    back = from_host(host)   a layer ahead of the first use in the backward
                                    dw = mm(t(back), dz)

On CUDA these are the operators of `passes/ops/host.py`, copies on their own stream, each with a wait: the memory is
free once the copy out is done, and the copy back runs next to the layer before. On the CPU they are clones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.ir import ir
from passes.ir.layer import Layer
from passes.memory.recompute import saved_nodes, storages
from passes.ops import host as host_copies
from passes.trace.editor import Editor

aten = torch.ops.aten
CLONED = {"cpu"}  # devices whose memory is the host's


def offload(program: ir.Program, chosen: set[fx.Node], ctx: ir.Context) -> set[fx.Node]:
    """Move the chosen values that the backward reads to host memory and back; changes the graph, returns the values."""
    saved = saved_nodes(program)
    holders = Counter(id(s) for node in saved for s in storages(node))
    timetable = Timetable.of(program)
    away = [n for n in saved if n in chosen and isinstance(ir.value(n), torch.Tensor)]
    away = [n for n in away if holders[id(storages(n)[0])] == 1]  # shared memory would stay occupied
    for node in sorted(away, key=first_use):  # the value that is needed first is copied back first
        Move(timetable, node, ctx).write()
    program.module.recompile()
    return set(away)


def first_use(node: fx.Node) -> fx.Node:
    """Return the first node of the backward that reads a value."""
    return min(user for user in node.users if user.op != "output" and ir.phase(user) == "backward")


@dataclass(frozen=True)
class Timetable:
    """The readers of each memory in the forward, and the first nodes of layers, in order."""

    readers: dict[int, list[fx.Node]]  # by memory: nodes of the forward that yield or read it
    forward: dict[Layer, fx.Node]
    backward: dict[Layer, fx.Node]
    middle: fx.Node  # the first node after the forward

    @staticmethod
    def of(program: ir.Program) -> Timetable:
        """Build the timetable from a program's graph, before anything is moved."""
        readers: dict[int, list[fx.Node]] = {}
        begins = {"forward": dict[Layer, fx.Node](), "backward": dict[Layer, fx.Node]()}
        middle = program.graph.output_node()
        for node in program.calls():
            if (layer := ir.layer(node)) and ir.phase(node) in begins:
                begins[ir.phase(node)].setdefault(layer, node)
            if ir.phase(node) == "forward":
                middle = node.next
                for storage in {id(s) for n in (node, *node.all_input_nodes) for s in storages(n)}:
                    readers.setdefault(storage, []).append(node)
        return Timetable(readers, **begins, middle=middle)

    def after_next(self, node: fx.Node) -> fx.Node:
        """Return the first node in the forward of the layer after the next one: by then a copy out is done."""
        layers = list(self.forward)
        place = layers.index(ir.layer(node)) + 2 if ir.layer(node) in layers else len(layers)
        return self.forward[layers[place]] if place < len(layers) else self.middle

    def ahead_of(self, user: fx.Node) -> fx.Node:
        """Return the first node in the backward of the layer before the user's; the user itself outside of layers."""
        layers, layer = list(self.backward), ir.layer(user)
        if layer not in layers:
            return user
        return min(user, self.backward[layers[max(layers.index(layer) - 1, 0)]])


@dataclass(frozen=True)
class Move:
    """The way of one value to the host after its last use in the forward, and back before its first in the backward."""

    timetable: Timetable
    node: fx.Node
    ctx: ir.Context

    def write(self) -> None:
        """Insert the copies into the graph."""
        value = ir.example(self.node)
        users = [u for u in self.node.users if u.op != "output" and ir.phase(u) == "backward"]
        last = max(n for s in storages(self.node) for n in self.timetable.readers[id(s)])
        first = first_use(self.node)
        ahead = self.timetable.ahead_of(first)
        if value.device.type in CLONED:
            host = self.call(last.next, "forward", aten.clone.default, self.node)
            back = self.call(ahead, "backward", aten.clone.default, host)
        else:
            layout = (value.device, list(value.shape), list(value.stride()))
            start = self.call(last.next, "forward", host_copies.offload, self.node)
            host = self.call(self.timetable.after_next(last), "forward", host_copies.there, start, self.node)
            start = self.call(ahead, "backward", host_copies.reload, host, *layout)
            back = self.call(first, "backward", host_copies.there, start, host)
        for user in users:
            user.replace_input_with(self.node, back)

    def call(self, before: fx.Node, phase: str, target: Any, *args: Any) -> fx.Node:
        """Insert an operator before a node, with the origin of the value."""
        new = Editor(self.ctx, before.graph, before, self.node).call(target, args)
        ir.update(new, phase=phase)
        return new
