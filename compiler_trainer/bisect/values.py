"""The value of every node of a program, and the loss's gradients, with all ranks in lockstep on full inputs.

Full values of two programs are compared. A local node is compared with the global node that it stands for, on every
rank and for any placement; if it stands for none, with the node of the same name one pass earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from passes.check.numeric import (
    Results,
    collect,
    differentiate,
    on_one_device,
    place_inputs,
    with_authors_backward,
)
from passes.check.simulate import Lockstep
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.operators import is_random
from passes.ir.spec import Spec, boxes, unshard
from passes.ir.stages import Stage
from passes.sharding.collectives import Collectives
from passes.trace.functions import body_of

NEGLIGIBLE = 1e-3  # of the largest operand


@dataclass
class Recorded:
    """A program that was run: its results, and all ranks' local values and gradients by node name."""

    program: ir.Program
    mesh: Mesh
    results: Results = field(default_factory=dict)
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Mismatch:
    """The largest difference between two values of a tensor; `index` is in the full tensor."""

    difference: float
    index: tuple[int, ...]
    expected: float
    actual: float
    rank: int

    def __str__(self) -> str:
        at = f"[{', '.join(map(str, self.index))}]"
        return f"entry {at} on rank {self.rank} should be {self.expected:.6g}, is {self.actual:.6g}"


# ---- running -------------------------------------------------------------------------------------


def tap(value: Tensor, name: str) -> Tensor:
    """Return the value; mark a node whose value is recorded, even if the node itself is decomposed."""
    return value


class Recorder(Lockstep):
    """The simulator that records tapped values, as copies unless gradients are needed."""

    def __init__(self, program: ir.Program):
        super().__init__(program)
        self.values: dict[str, list[Tensor]] = {}

    def step(self, node: fx.Node) -> list[Any]:
        """Run one operator on all ranks."""
        if node.target is tap:
            value, name = node.args
            values = self.env[value]  # type: ignore[index]
            self.values[str(name)] = values if torch.is_grad_enabled() else [v.clone() for v in values]
        return super().step(node)


def tapped(program: ir.Program) -> ir.Program:
    """Return a copy with a tap after every tensor."""
    program = program.copy()
    for node in list(program.graph.nodes):
        if node.op != "output" and ir.is_tensor(node):
            with program.graph.inserting_after(_last_input(program) if node.op == "placeholder" else node):
                tapped_node = program.graph.call_function(tap, (node, node.name))
            ir.set_value(tapped_node, ir.value(node))
    program.module.recompile()
    return program


def _last_input(program: ir.Program) -> fx.Node:
    return program.placeholders()[-1]


def record(program: ir.Program, ctx: ir.Context, inputs: Mapping[str, Tensor]) -> Recorded:
    """Run a program on full inputs; raise CompileError naming the node that does not accept its operands.

    A program that draws random numbers from PyTorch's generator is not recorded, because it is not deterministic.
    """
    is_local = program.stage >= Stage.LOCAL
    recorded = Recorded(program, program.mesh if is_local else Mesh())
    if any(map(is_random, program.calls())):
        return recorded
    differentiable = not program.has_backward and not any(body_of(node) for node in program.calls())
    runnable = tapped(program)
    runnable = with_authors_backward(runnable) if is_local is False else Collectives()(runnable, ctx)[0]
    runnable = runnable if is_local else on_one_device(runnable)
    rank_inputs = place_inputs(runnable, inputs)
    for values in rank_inputs if differentiable else ():
        for value, i in zip(values, runnable.inputs, strict=True):
            value.requires_grad_(i.kind == "parameter")
    with torch.set_grad_enabled(differentiable):
        recorder = Recorder(runnable)
        recorded.results = collect(runnable, recorder.run(rank_inputs), rank_inputs)
    if differentiable:
        recorded.gradients = gradients_of(recorded.results, recorder.values)
        recorded.results = recorded.results | differentiate(runnable, recorded.results, rank_inputs)
    recorded.values = {name: [v.detach() for v in values] for name, values in recorder.values.items()}
    return recorded


def gradients_of(results: Results, values: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    """Return the loss's gradients by node name, as each rank's term, for every value that the loss depends on."""
    losses = [r.value for (kind, _), r in results.items() if kind == "loss" and r.value.requires_grad]
    names = [name for name, parts in values.items() if all(v.requires_grad for v in parts)]
    if not losses or not names:
        return {}
    tensors = [v for name in names for v in values[name]]
    gradients = iter(torch.autograd.grad(losses[0], tensors, retain_graph=True, materialize_grads=True))
    return {name: [next(gradients) for _ in values[name]] for name in names}


# ---- comparing -----------------------------------------------------------------------------------


Pair = tuple[int, tuple[int, ...], Tensor, Tensor]  # rank, offset in the full tensor, expected and actual entries


def against_whole(expected: Tensor, actual: Sequence[Tensor], spec: Spec, mesh: Mesh) -> Iterator[Pair]:
    """Yield every rank's valid entries with those of the full value; the terms of a partial sum are added first."""
    if spec.partial:
        yield 0, (0,) * expected.dim(), expected, unshard(actual, spec, mesh)
        return
    for rank, place in enumerate(mesh):
        for box in boxes(spec, mesh, place):
            yield rank, box.offset, box.of(expected), box.of_local(actual[rank])


def against_local(expected: Sequence[Tensor], actual: Sequence[Tensor], spec: Spec, mesh: Mesh) -> Iterator[Pair]:
    """Yield every rank's valid entries before and after."""
    for rank, place in enumerate(mesh):
        for box in boxes(spec, mesh, place):
            yield rank, box.offset, box.of_local(expected[rank]), box.of_local(actual[rank])


def largest_difference(pairs: Iterable[Pair]) -> Mismatch:
    """Return the largest difference of entries; zero if there is none."""
    worst = Mismatch(0.0, (), 0.0, 0.0, 0)
    for rank, offset, expected, actual in pairs:
        difference = distance(expected, actual)
        if difference.numel() and difference.max() > worst.difference:
            flat = int(difference.argmax())
            index = tuple(int(i) + o for i, o in zip(torch.unravel_index(torch.tensor(flat), difference.shape), offset))
            entries = expected.reshape(-1)[flat].item(), actual.reshape(-1)[flat].item()
            worst = Mismatch(difference.max().item(), index, *entries, rank)
    return worst


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return absolute differences: 0 between equal infinities or two NaNs, infinite if only one is finite."""
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(torch.inf))


def largest(value: Tensor) -> float:
    """Return the largest finite magnitude."""
    finite = value.detach().double()
    finite = finite[finite.isfinite()]
    return finite.abs().amax().item() if finite.numel() else 0.0


def total_gradient(terms: Sequence[Tensor], spec: Spec, mesh: Mesh) -> Tensor:
    """Return the full gradient of a value from every rank's term.

    Terms of copies are added; the terms of a partial sum have equal gradients.
    """
    total = terms[0].new_zeros(spec.shape)
    for place, term in zip(mesh, terms, strict=True):
        if all(place[axis] == 0 for axis in spec.partial_axes):
            for box in boxes(spec, mesh, place):
                box.of(total).add_(box.of_local(term))
    return total


def spec_of(node: fx.Node, recorded: Recorded) -> Spec:
    """Return the placement of a node's recorded values; full if unknown."""
    spec = ir.spec(node) if recorded.program.stage >= Stage.LOCAL else None
    return spec or Spec.whole(tuple(ir.example(node).shape))


def whole_value(node: fx.Node, recorded: Recorded) -> Tensor:
    """Return the value of a node as one tensor."""
    return unshard(recorded.values[node.name], spec_of(node, recorded), recorded.mesh)


def nodes_of(recorded: Recorded) -> Iterator[fx.Node]:
    """Return the nodes with recorded values, in order."""
    return (node for node in recorded.program.graph.nodes if node.name in recorded.values)
