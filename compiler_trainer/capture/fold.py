"""Leave out layers of a captured graph that are equal to the layer before: see `passes/ir/folds.py`.

Layers are compared in the graph, not in the model: operators, constants, layouts, inputs from the previous layer and
from values that all layers share, and the options that apply to their names. Only the next layer may read the values
that a middle layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from torch import fx

from passes.ir import ir
from passes.ir.bodies import describe_layout, describe_operand
from passes.ir.folds import Fold, Folding, number_in, renumbered
from passes.ir.layer import Layer
from passes.ir.operators import is_random
from passes.sharding.normalize import drops_entries, is_dropout

NO_LAYER = Layer("", -1)


class StateTensor(NamedTuple):
    """A parameter or a buffer of the model, and True if it is trained."""

    name: str
    is_trained: bool


@dataclass(frozen=True)
class Section:
    """The nodes of one layer and the following nodes without a layer; the first section may have no layer."""

    stack: str
    number: int
    nodes: tuple[fx.Node, ...]


def fold_stacks(
    module: fx.GraphModule, state: Mapping[fx.Node, StateTensor], folding: Folding
) -> tuple[Fold, ...]:
    """Remove layers from the graph; return which ones: of each stack those of its longest run of equal layers.

    `state` are the parameters and buffers of the placeholders.
    """
    stacks = dict.fromkeys(layer.stack for layer in layers_in_order(module.graph) if layer is not NO_LAYER)
    folds = (fold_stack(module, stack, state, folding) for stack in stacks)
    return tuple(fold for fold in folds if fold is not None)


def fold_stack(
    module: fx.GraphModule, stack: str, state: Mapping[fx.Node, StateTensor], folding: Folding
) -> Fold | None:
    """Remove layers of a stack; return which ones, or None if too few are equal."""
    layers, names = layers_in_order(module.graph), {node: tensor.name for node, tensor in state.items()}
    inputs = inputs_by_layer(state, folding.alike)
    texts = [
        text_of(layers, i, names, folding.alike, inputs) if layer.stack == stack else None
        for i, layer in enumerate(layers)
    ]
    first, end = longest_run(layers, texts)
    removed = layers[first + folding.before : max(end - folding.after, 0)]
    if not removed or any(escapes(layers, i, names) for i in range(first, end - 1)):
        return None
    last, following = layers[first + folding.before - 1], layers[end - folding.after]
    replaced = dict(zip(removed[-1].nodes, last.nodes, strict=True))
    for node in following.nodes:
        for operand in node.all_input_nodes:
            node.replace_input_with(operand, replaced.get(operand, operand))
    for layer in reversed(removed):
        for node in reversed(layer.nodes):
            module.graph.erase_node(node)
    module.recompile()
    return Fold(last.stack, last.number, len(removed))


def layers_in_order(graph: fx.Graph) -> list[Section]:
    """Return the graph's operators, cut where a layer begins."""
    layer, labels, nodes = NO_LAYER, [], [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for node in nodes:
        layer = ir.layer(node) or layer
        labels.append(layer)
    grouped = groupby(zip(labels, nodes), key=lambda pair: pair[0])
    return [Section(at.stack, at.number, tuple(node for _, node in group)) for at, group in grouped]


def inputs_by_layer(
    state: Mapping[fx.Node, StateTensor], option_key: Callable[[str], Hashable]
) -> Callable[[str, int], Any]:
    """Return a function that gives the state of a layer, whether it is read or not.

    For each tensor this is its name within the layer, True if it is trained, its layout, and the options for its name.
    """

    def layer_inputs(stack: str, number: int) -> Any:
        tensors = ((n, *tensor) for n, tensor in state.items() if number_in(tensor.name, stack) == number)
        return sorted(
            (renumbered(name, stack, 0), trained, _value(n), repr(option_key(name))) for n, name, trained in tensors
        )

    return layer_inputs


def text_of(
    layers: Sequence[Section],
    i: int,
    names: Mapping[fx.Node, str],
    option_key: Callable[[str], Hashable],
    inputs: Callable[[str, int], Any],
) -> Any:
    """Return a description of a layer's computation that equal layers share; None for a layer that cannot be folded."""
    layer = layers[i]
    if {number_in(ir.module_path(node), layer.stack) for node in layer.nodes} - {None} != {layer.number}:
        return None  # without a name of its own, its parameters are unknown
    words = {node: name for node, name in names.items()}
    own_names = {
        n: renumbered(w, layer.stack, 0) for n, w in names.items() if number_in(w, layer.stack) == layer.number
    }
    words |= {node: f"own {name}" for node, name in own_names.items()}  # not layer 0's names
    nodes_before = layers[i - 1].nodes if i else ()
    words |= {node: f"before {k}" for k, node in enumerate(nodes_before)} | {
        n: f"own {k}" for k, n in enumerate(layer.nodes)
    }
    marks = {mark: f"before {k}" for k, mark in enumerate(dict.fromkeys(ir.record(n).checkpoint for n in nodes_before))}
    lines = []
    for node in layer.nodes:
        if node.op != "call_function" or draws(node):
            return None
        operand_words = {operand: words.get(operand, operand.name) for operand in node.all_input_nodes}
        mark = ir.record(node).checkpoint
        marks.setdefault(mark, f"new {len(marks)}") if mark else marks.setdefault(mark, "none")
        path = ir.module_path(node)
        try:
            operands = describe_operand((node.args, node.kwargs), operand_words)
        except ir.CompileError:
            return None
        lines.append(
            (node.target, operands, _value(node), renumbered(path, layer.stack, 0), option_key(path), marks[mark])
        )
    return inputs(layer.stack, layer.number), lines


def draws(node: fx.Node) -> bool:
    """Return True if an operator draws random numbers, which differ by layer; dropout that is off does not."""
    return drops_entries(node) if is_dropout(node) else is_random(node)


def _value(node: fx.Node) -> str:
    return describe_layout(ir.value(node))


def longest_run(layers: Sequence[Section], texts: Sequence[Any]) -> tuple[int, int]:
    """Return the longest run of equal, consecutively numbered layers: its first layer, and the one after its last."""
    longest = (0, 0)
    first = 0
    for i, layer in enumerate(layers):
        follows = i > first and texts[i] is not None and texts[i] == texts[i - 1]
        if not (follows and (layer.stack, layer.number) == (layers[i - 1].stack, layers[i - 1].number + 1)):
            first = i
        longest = max(longest, (first, i + 1), key=lambda run: run[1] - run[0])
    stack = layers[longest[0]].stack if layers else ""
    numbers = [layer.number for layer in layers if layer.stack == stack]
    return longest if len(set(numbers)) == len(numbers) else (0, 0)  # otherwise a layer is called twice


def escapes(layers: Sequence[Section], i: int, names: Mapping[fx.Node, str]) -> bool:
    """Return True if other layers than this and the next read its results, or if other layers read its state."""
    layer, near = layers[i], {*layers[i].nodes, *layers[i + 1].nodes}
    own_state = (node for node, name in names.items() if number_in(name, layer.stack) == layer.number)
    result_readers = {user for node in layer.nodes for user in node.users}
    state_readers = {user for node in own_state for user in node.users}
    return not (result_readers <= near and state_readers <= set(layer.nodes))
