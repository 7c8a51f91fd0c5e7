"""Values of a program that add up over the samples of a batch, and those that mix samples.

    losses[B, T], sum                     a sum over samples: those of microbatches add up to that of the full batch
    x[B, D], mean over B, square          mixed: the square of a sum over all samples is no sum over samples
    x[B, D] @ y[B, D] transposed          mixed: each sample meets all others

The rules of sharding tell them, with samples on a mesh axis of their own: values that add up are partial sums, and an
operator that mixes samples reads a complete sum, or a gathered value. Reading samples in another order (look-ups,
sorting of tokens by expert) mixes nothing, nor do integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import fx

from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.operators import name_of
from passes.ir.spec import Spec
from passes.rules import has_rule, tensor_operands
from passes.rules.indexing import RULES as LOOKUPS
from passes.sharding.place import place_batch
from passes.sharding.propagate import Decision, Plan, propagate

AXIS = "dp_replicate"  # of the samples
REORDERS = frozenset(LOOKUPS) | {"sort", "topk"}


@dataclass
class Samples:
    """The values of a program that depend on its batch, those that mix samples, and the placements of all.

    A microbatch of a single sample has no placements: all of its sums count as sums over samples. So do those of
    `unknown` values, which depend on an operator, or a custom function, without rules.
    """

    rows: int
    plan: Plan | None = None
    of_batch: set[fx.Node] = field(default_factory=set)
    mixed: set[fx.Node] = field(default_factory=set)
    unknown: set[fx.Node] = field(default_factory=set)

    def add_up(self, node: fx.Node) -> bool:
        """Return True if the values of microbatches add up to that of the full batch."""
        if self.plan is None or node in self.unknown:
            return node in self.of_batch
        return node not in self.mixed and (AXIS, "sum") in self.plan.produced[node].partial

    def sizes(self, node: fx.Node) -> set[int]:
        """Return the products of the number of samples with other sizes of a sum's operands."""
        products = {self.rows}
        for operand in tensor_operands(node):
            for size in self.other_sizes(operand):
                products |= {size * product for product in products}
        return products

    def other_sizes(self, node: fx.Node) -> Iterable[int]:
        """Return the sizes of a value's factors, of those with samples the size of one sample."""
        if self.plan is None or not isinstance(spec := self.plan.produced[node], Spec):
            return ir.example(node).shape
        return [f.size // (self.rows if AXIS in f.axes else 1) for dim in spec.dims for f in dim]

    def mixes(self, decision: Decision, node: fx.Node) -> bool:
        """Return True if an operator mixes samples: it needs a complete sum, or a gathered value."""
        assert self.plan is not None
        for operand, needed in zip(tensor_operands(node), decision.operands, strict=True):
            spec = self.plan.produced[operand]
            dtype = ir.example(operand).dtype
            if operand not in self.of_batch or not (dtype.is_floating_point or dtype.is_complex):
                continue
            is_completed = bool(spec.partial and not needed.partial)
            is_gathered = bool(spec.sharded and not needed.sharded) and name_of(node) not in REORDERS
            if is_completed or is_gathered:
                return True
        return False


def samples_of(program: ir.Program, ctx: ir.Context) -> Samples:
    """Return how the values of a captured program depend on the samples of its microbatch."""
    inputs = list(zip(program.placeholders(), program.inputs))
    batch = [node for node, item in inputs if item.kind == "batch"]
    rows = min((ir.example(node).shape[0] for node in batch if ir.example(node).dim()), default=1)
    samples = Samples(rows, of_batch=set(batch))
    for node in program.calls():
        if not samples.of_batch.isdisjoint(node.all_input_nodes):
            samples.of_batch.add(node)
    if rows == 1:
        return samples
    mesh = Mesh.of({AXIS: rows})
    specs = [place_batch(item.spec.shape, mesh) if item.kind == "batch" else item.spec for _, item in inputs]
    placed = tuple(replace(item, spec=spec) for (_, item), spec in zip(inputs, specs))
    samples.plan = propagate(replace(program, mesh=mesh, inputs=placed), False, ctx)
    for node in program.calls():
        decision = samples.plan.decisions.get(node)
        is_gathered = decision is not None and not has_rule(node) and not any(map(of_samples, decision.results))
        if is_gathered and node in samples.of_batch or not samples.unknown.isdisjoint(node.all_input_nodes):
            samples.unknown.add(node)
        if not samples.mixed.isdisjoint(node.all_input_nodes) or decision and samples.mixes(decision, node):
            samples.mixed.add(node)
    return samples


def of_samples(spec: Spec) -> bool:
    """Return True if a value has samples of its own, or a term of a sum over them."""
    return AXIS in (*spec.sharded, *spec.partial_axes)
