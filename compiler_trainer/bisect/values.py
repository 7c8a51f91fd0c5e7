"""What every node of a program yields: all ranks in lockstep on whole inputs, values and gradients of the loss.

Values of two programs are compared whole. A local node is held to the node of the global program that it stands
for, on every rank and whatever its placement; where it stands for none, to the node of its name one pass before.
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
from passes.program import ir
from passes.program.functions import body_of
from passes.program.mesh import Mesh
from passes.program.operators import is_random
from passes.program.spec import Spec, boxes, unshard
from passes.program.stages import Stage
from passes.sharding.collectives import Collectives

NEGLIGIBLE = 1e-3  # of the largest operand


@dataclass
class Recorded:
    """A program that was run: its results, and by node name the local values and gradients of all ranks."""

    program: ir.Program
    mesh: Mesh
    results: Results = field(default_factory=dict)
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Mismatch:
    """Where two values of one tensor differ most; `index` is that of the whole tensor."""

    difference: float
    index: tuple[int, ...]
    expected: float
    found: float
    rank: int

    def __str__(self) -> str:
        at = f"[{', '.join(map(str, self.index))}]"
        return f"entry {at} on rank {self.rank} should be {self.expected:.6g}, is {self.found:.6g}"


# ---- running -------------------------------------------------------------------------------------


def tap(value: Tensor, name: str) -> Tensor:
    """Stands beside a node so that its value is seen, also once the node itself is written in other operators."""
    return value


class Recorder(Lockstep):
    """The simulator; keeps what taps see, as copies unless gradients are wanted of it."""

    def __init__(self, program: ir.Program):
        super().__init__(program)
        self.values: dict[str, list[Tensor]] = {}

    def step(self, node: fx.Node, env: list[dict[fx.Node, Any]]) -> list[Any]:
        """One operator on all ranks."""
        if node.target is tap:
            value, name = node.args
            seen = [e[value] for e in env]  # type: ignore[index]
            self.values[str(name)] = seen if torch.is_grad_enabled() else [v.clone() for v in seen]
        return super().step(node, env)


def tapped(program: ir.Program) -> ir.Program:
    """A copy with a tap beside every tensor."""
    program = program.copy()
    for node in list(program.graph.nodes):
        if node.op != "output" and ir.is_tensor(node):
            with program.graph.inserting_after(_last_input(program) if node.op == "placeholder" else node):
                seen = program.graph.call_function(tap, (node, node.name))
            ir.set_value(seen, ir.value(node))
    program.module.recompile()
    return program


def _last_input(program: ir.Program) -> fx.Node:
    return program.placeholders()[-1]


def record(program: ir.Program, ctx: ir.Context, inputs: Mapping[str, Tensor]) -> Recorded:
    """Run a program on whole inputs; raises CompileError naming the node that does not take its operands.

    Nothing is recorded of a program that draws random numbers from PyTorch's generator: it is not determined.
    """
    is_local = program.stage >= Stage.LOCAL
    found = Recorded(program, program.mesh if is_local else Mesh())
    if any(map(is_random, program.calls())):
        return found
    differentiable = not program.has_backward and not any(body_of(node) for node in program.calls())
    ready = tapped(program)
    ready = with_authors_backward(ready) if is_local is False else Collectives()(ready, ctx)[0]
    ready = ready if is_local else on_one_device(ready)
    given = place_inputs(ready, inputs)
    for values in given if differentiable else ():
        for value, i in zip(values, ready.inputs, strict=True):
            value.requires_grad_(i.kind == "parameter")
    with torch.set_grad_enabled(differentiable):
        recorder = Recorder(ready)
        found.results = collect(ready, recorder.run(given), given)
    if differentiable:
        found.gradients = gradients_of(found.results, recorder.values)
        found.results = found.results | differentiate(ready, found.results, given)
    found.values = {name: [v.detach() for v in values] for name, values in recorder.values.items()}
    return found


def gradients_of(results: Results, values: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    """The loss's gradient for every value that it depends on, by node name: each rank's term."""
    losses = [r.value for (kind, _), r in results.items() if kind == "loss" and r.value.requires_grad]
    names = [name for name, seen in values.items() if all(v.requires_grad for v in seen)]
    if not losses or not names:
        return {}
    wanted = [v for name in names for v in values[name]]
    found = iter(torch.autograd.grad(losses[0], wanted, retain_graph=True, materialize_grads=True))
    return {name: [next(found) for _ in values[name]] for name in names}


# ---- comparing -----------------------------------------------------------------------------------


Pair = tuple[int, tuple[int, ...], Tensor, Tensor]  # rank, offset in the whole tensor, expected entries, found ones


def against_whole(expected: Tensor, found: Sequence[Tensor], spec: Spec, mesh: Mesh) -> Iterator[Pair]:
    """Every rank's valid entries with those of the whole value; of a sum, its terms added, once."""
    if spec.partial:
        yield 0, (0,) * expected.dim(), expected, unshard(found, spec, mesh)
        return
    for rank, place in enumerate(mesh):
        for box in boxes(spec, mesh, place):
            yield rank, box.offset, box.of(expected), box.of_local(found[rank])


def against_local(expected: Sequence[Tensor], found: Sequence[Tensor], spec: Spec, mesh: Mesh) -> Iterator[Pair]:
    """Every rank's valid entries before and after."""
    for rank, place in enumerate(mesh):
        for box in boxes(spec, mesh, place):
            yield rank, box.offset, box.of_local(expected[rank]), box.of_local(found[rank])


def largest_difference(pairs: Iterable[Pair]) -> Mismatch:
    """Where entries differ most; a difference of zero if nowhere."""
    worst = Mismatch(0.0, (), 0.0, 0.0, 0)
    for rank, offset, expected, found in pairs:
        difference = distance(expected, found)
        if difference.numel() and difference.max() > worst.difference:
            flat = int(difference.argmax())
            index = tuple(int(i) + o for i, o in zip(torch.unravel_index(torch.tensor(flat), difference.shape), offset))
            entries = expected.reshape(-1)[flat].item(), found.reshape(-1)[flat].item()
            worst = Mismatch(difference.max().item(), index, *entries, rank)
    return worst


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Absolute differences; none between equal infinities or two NaNs, an infinite one if only one is finite."""
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(torch.inf))


def largest(value: Tensor) -> float:
    """The largest finite magnitude."""
    finite = value.detach().double()
    finite = finite[finite.isfinite()]
    return finite.abs().amax().item() if finite.numel() else 0.0


def total_gradient(terms: Sequence[Tensor], spec: Spec, mesh: Mesh) -> Tensor:
    """The whole gradient of a value from every rank's term: copies' terms are added, those of a sum are all alike."""
    total = terms[0].new_zeros(spec.shape)
    for place, term in zip(mesh, terms, strict=True):
        if all(place[axis] == 0 for axis in spec.partial_axes):
            for box in boxes(spec, mesh, place):
                box.of(total).add_(box.of_local(term))
    return total


def spec_of(node: fx.Node, recorded: Recorded) -> Spec:
    """How the recorded values of a node are placed; as they are where nothing is known."""
    known = ir.spec(node) if recorded.program.stage >= Stage.LOCAL else None
    return known or Spec.whole(tuple(ir.example(node).shape))


def whole_value(node: fx.Node, recorded: Recorded) -> Tensor:
    """The value of a node as one tensor."""
    return unshard(recorded.values[node.name], spec_of(node, recorded), recorded.mesh)


def nodes_of(recorded: Recorded) -> Iterator[fx.Node]:
    """Nodes whose values were recorded, in order."""
    return (node for node in recorded.program.graph.nodes if node.name in recorded.values)
