"""Compute several microbatches in one program, so that one is computed while values of another travel.

    x = embedding(tokens)            x, x_1 = embedding(tokens), embedding(tokens@1)
    y = block(x)                     y, y_1 = block(x), block(x_1)
    loss = cross_entropy(y)          loss = cross_entropy(y) + cross_entropy(y_1)

Operators on parameters alone occur once: weights are gathered, and gradients reduced, for all microbatches together.
Custom functions occur once for each, because their authors' backwards need not be linear in the gradient. Each layer
has the operators of one microbatch, then those of the next; `take_turns` alternates them once the sends are known.
Losses and counts are added, metrics are averaged, and microbatches change buffers one after another. So gradients
equal those of microbatches run in turn and added.

Elsewhere: two-batch overlap (SGLang), dual batch overlap (vLLM); first in DeepSeek-V3 (arXiv 2412.19437, 3.2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.trace.editor import Editor, own_memory
from passes.trace.functions import function_of

SEED = "seed"


def name_of(name: str, number: int) -> str:
    """Return the name of a microbatch's batch entry, or seed, in a program of several microbatches."""
    return f"{name}@{number}" if number else name


def join_microbatches(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the microbatches as the inputs of a program that computes all of them."""
    return {name_of(name, number): value for number, part in enumerate(parts) for name, value in part.items()}


def has_copies(item: ir.Input) -> bool:
    """Return True if each microbatch has its own copy of an input."""
    return item.kind == "batch" or item.kind == "scalar" and item.original == SEED


def microbatches_in(programs: Iterable[ir.Program]) -> int:
    """Return the number of microbatches that the programs compute at once."""
    return 1 + max((item.microbatch for program in programs for item in program.inputs), default=0)


@dataclass(frozen=True)
class BatchOverlap(ir.Pass):
    """Compute several microbatches in one program."""

    microbatches: int
    name = "batch_overlap"
    takes = (Stage.NORMALIZED,)

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        check_names(program.inputs, self.microbatches)
        writer = Writer(program, self.microbatches, ctx)
        written = writer.write()
        return written, ir.Report({"microbatches": self.microbatches, "shared_operators": writer.shared})


def check_names(inputs: Sequence[ir.Input], microbatches: int) -> None:
    """Raise Refused if an input has the name of another input's copy for a later microbatch."""
    names = [item.name for item in inputs if has_copies(item)]
    copies = {name_of(name, number): name for name in names for number in range(1, microbatches)}
    if clash := next((item.name for item in inputs if item.name in copies), None):
        problem = f"with {microbatches} microbatches this is the name of a copy of {copies[clash]!r}; rename the entry"
        raise ir.Refused(f"batch[{clash!r}]", None, problem)


class Writer:
    """A graph that grows by the operators of each of `count` microbatches; `copies` holds the nodes of each."""

    def __init__(self, program: ir.Program, count: int, ctx: ir.Context):
        self.program, self.ctx, self.graph = program, ctx, fx.Graph()
        self.inputs = dict(zip(program.placeholders(), program.inputs, strict=True))
        new = {o.name: node for node, o in zip(program.results(), program.outputs, strict=True) if o.kind == "buffer"}
        self.changed = {n: new[i.name] for n, i in self.inputs.items() if i.kind == "buffer" and i.name in new}
        self.per_microbatch = {node for node, item in self.inputs.items() if has_copies(item) or node in self.changed}
        for node in program.calls():
            if function_of(node) or not self.per_microbatch.isdisjoint(node.all_input_nodes):
                self.per_microbatch.add(node)
        self.shared = sum(node not in self.per_microbatch for node in program.calls())
        self.copies: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]

    def write(self) -> ir.Program:
        """Return the program of all microbatches, layer by layer."""
        inputs = [item for k, copies in enumerate(self.copies) for item in self.put_inputs(k, copies)]
        for _, run in groupby(self.program.calls(), ir.layer):
            nodes = list(run)
            for k in range(len(self.copies)):
                for node in nodes:
                    self.put(node, k)
        for first, copies in zip(self.copies, self.copies[1:]):
            own_memory([new for old, new in copies.items() if new is not first.get(old)], self.ctx)
        outputs = tuple(self.put_outputs())
        return self.program.with_graph(self.graph, inputs=tuple(inputs), outputs=outputs)

    def put_inputs(self, number: int, copies: dict[fx.Node, fx.Node]) -> list[ir.Input]:
        """Append a microbatch's inputs.

        The first also gets the shared ones. Later microbatches read a changed buffer when needed.
        """
        added = []
        for node, item in self.inputs.items():
            if not number or has_copies(item):
                copies[node] = ir.copy_node(self.graph, node, {})
                name = name_of(item.name, number)
                added.append(replace(item, name=name, microbatch=number, copy_of=item.name if number else ""))
                copies[node].target = copies[node].name if number else node.target
            elif node not in self.changed:
                copies[node] = self.copies[0][node]
        return added

    def put(self, node: fx.Node, number: int) -> None:
        """Append an operator for a microbatch, after its operands."""
        waiting = [(node, number)]  # an explicit stack, because chains are as long as programs
        while waiting:
            node, k = waiting[-1]
            copies = self.copies[k]
            if node in self.changed and k and node not in copies:
                new = self.changed[node]
                if new in self.copies[k - 1]:
                    copies[node] = self.copies[k - 1][new]
                else:
                    waiting.append((new, k - 1))
                continue
            missing = [] if node in copies else [n for n in node.all_input_nodes if n not in copies]
            waiting += [(operand, k) for operand in reversed(missing)]
            if missing:
                continue
            waiting.pop()
            if node in copies:
                continue
            if k and node not in self.per_microbatch:
                self.put(node, 0)
                copies[node] = self.copies[0][node]
            else:
                copies[node] = ir.copy_node(self.graph, node, copies)
                if node in self.per_microbatch:
                    ir.update(copies[node], microbatch=k)

    def put_outputs(self) -> list[ir.Output]:
        """Append the program's outputs, combined from those of the microbatches."""
        last = self.graph.output(())
        edit, results, outputs = Editor(self.ctx, self.graph), list[fx.Node](), list[ir.Output]()
        for node, output in zip(self.program.results(), self.program.outputs, strict=True):
            result = self.copies[-1][node]
            if output.kind in JOINED:
                values = [copies[node] for copies in self.copies]
                result = edit.moved_to(last, node).trace(JOINED[output.kind], *values, key=output.kind)
            results.append(result)
            outputs.append(replace(output, spec=Spec.whole(tuple(ir.example(result).shape))))
        last.args = (tuple(results),)
        return outputs


def mean(*values: Tensor) -> Tensor:
    """Return the mean of numbers."""
    return total(*values) / len(values)


def total(first: Tensor, *others: Tensor) -> Tensor:
    """Return the sum of numbers, added in order."""
    for value in others:
        first = first + value
    return first


def rows(*values: Tensor) -> Tensor:
    """Concatenate rows."""
    return torch.cat(values)


JOINED: dict[str, Callable[..., Tensor]] = {"loss": total, "metric": mean, "count": total, "rows": rows}
