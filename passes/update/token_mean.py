"""Divide means by the count of all microbatches of a step, which is known before the first of them runs.

    count = sum(ne(labels, -100))          of one microbatch
    loss = div(total, count)
becomes
    loss = mul(div(total, count_0), 4)     count_0 of all four, an input

The mean of such losses over the microbatches is the mean over the full batch, however labels are distributed over them;
a microbatch without labels adds nothing. A term of the loss or of a metric is such a mean if it is a sum over samples
divided by a count that depends only on the batch, sample by sample. All other terms are averaged over the microbatches,
among them functions of means that are no weighted sums, which keep the means of their microbatch; remarks name those
that differ from the term of the full batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import fx

from passes.ir import ir
from passes.ir.operators import CASTS, name_of
from passes.ir.slices import backward_slice, cone_of, reach
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.rules import has_rule, rule_of, tensor_operands
from passes.rules.pointwise import RULES
from passes.trace.editor import Editor
from passes.update.samples import Samples, samples_of

aten = torch.ops.aten
POINTWISE = frozenset(RULES)
RESHAPES = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"))
CUTS = frozenset(("slice", "pad", "constant_pad_nd"))
SUMS = frozenset(("sum", "cross_entropy_loss", "ct::linear_cross_entropy"))  # as `normalize` leaves the latter two
PASSED_ON = CASTS | {"alias", "detach"}
ADDITIONS = frozenset(("add", "sub", "rsub"))
KINDS = ("loss", "metric")  # of outputs that may be means


class Mean(NamedTuple):
    """A quotient of two sums, and the sum from which its divisor is made."""

    quotient: fx.Node
    counted: fx.Node


def summands(node: fx.Node, constants: bool = True) -> list[fx.Node]:
    """Return the scalars of which a scalar is a weighted sum, maybe with constants; none if it is no such sum."""
    operands = tensor_operands(node) if has_rule(node) else []
    together, passing = frozenset(range(len(operands))), PASSED_ON | (ADDITIONS if constants else frozenset())
    is_linear = bool(operands) and (name_of(node) in passing or together in rule_of(node).linear)
    return operands if is_linear and not any(ir.example(n).dim() for n in operands) else []


def weighted(results: Iterable[fx.Node], constants: bool = True) -> dict[fx.Node, None]:
    """Return the nodes of which scalars are weighted sums, these scalars and partial sums included."""
    return reach(results, lambda node: summands(node, constants))


def terms(results: Iterable[fx.Node], constants: bool = True) -> list[fx.Node]:
    """Return the last terms of which scalars are weighted sums, maybe with constants."""
    return [node for node in weighted(results, constants) if not summands(node, constants)]


def as_mean(term: fx.Node, batch: Set[fx.Node], samples: Samples) -> Mean | None:
    """Return the term as a sum over a count of the batch; None if it is no such mean.

    Neither may be divided by the number of samples as well, which is another one in the full batch.
    """
    if term.target is not aten.div.Tensor or len(tensor_operands(term)) < 2:
        return None
    total, divisor = tensor_operands(term)
    *scaled, counted = unwrap(divisor)
    sums = terms([total], constants=False)
    if not counts_samples(counted, batch) or not all(is_sum(part) and samples.add_up(part) for part in sums):
        return None
    sizes = set[int]().union(*map(samples.sizes, (counted, *sums)))
    return None if sizes & numbers_of((*scaled, *weighted([total], constants=False))) else Mean(term, counted)


def unwrap(divisor: fx.Node) -> list[fx.Node]:
    """Return a divisor's casts, bounds and other pointwise operators, and the value under them at the end."""
    chain = [divisor]
    while name_of(chain[-1]) in POINTWISE and len(tensor_operands(chain[-1])) == 1:
        chain += tensor_operands(chain[-1])
    return chain


def numbers_of(nodes: Iterable[fx.Node]) -> set[float]:
    """Return the numbers by which operators multiply or divide."""
    return {a for n in nodes if name_of(n) in ("mul", "div") for a in n.args if isinstance(a, int | float) and a != 1}


def counts_samples(counted: fx.Node, batch: Set[fx.Node]) -> bool:
    """Return True if a node sums entries that depend only on the batch, each only on its own sample."""
    if name_of(counted) != "sum" or ir.example(counted).dim():
        return False
    cone = cone_of(counted, batch) - {counted}
    sizes = {ir.example(n).shape[:1] for n in cone & batch}
    return len(sizes) == 1 and all(n in batch or keeps_samples(n, *sizes) for n in cone)


def keeps_samples(node: fx.Node, samples: torch.Size) -> bool:
    """Return True if the result has the entries of each sample together and in order, as its operands have them.

    `samples` is the first size of a batch's entries, [samples of a microbatch].
    """
    operands, shape = tensor_operands(node), ir.example(node).shape
    if name_of(node) in POINTWISE:
        return bool(operands) and all(ir.example(n).shape == shape for n in operands)
    if name_of(node) in CUTS:
        return ir.example(operands[0]).shape[:1] == shape[:1] == samples
    return name_of(node) in RESHAPES


def is_sum(node: fx.Node) -> bool:
    """Return True if a node adds up all entries of a tensor."""
    return name_of(node) in SUMS and not ir.example(node).dim()


def count_of(program: ir.Program, counted: fx.Node, microbatches: int) -> ir.Count:
    """Return the count of a sum of entries of the batch."""
    ends = {n: i for n, i in zip(program.placeholders(), program.inputs) if i.kind == "batch"}
    return ir.Count(backward_slice(program, ends, tensor_operands(counted)), microbatches)


def common_count(result: fx.Node, divisors: Mapping[fx.Node, str]) -> str:
    """Return the name of the count that divides all terms of a result, by `divisors`; an empty string without one."""
    names = {divisors.get(term, "") for term in terms([result])}
    return names.pop() if len(names) == 1 else ""


def placeholder(program: ir.Program, ctx: ir.Context, counted: fx.Node, name: str) -> fx.Node:
    """Insert a new input, after the others, for a count of all microbatches."""
    with program.graph.inserting_after(program.placeholders()[-1]):
        node = program.graph.placeholder(name)
    with ctx.fake_mode:
        ir.set_value(node, torch.zeros((), dtype=ir.example(counted).dtype, device=ir.example(counted).device))
    return node


def divided(mean: Mean, count: fx.Node, microbatches: int, ctx: ir.Context) -> fx.Node:
    """Insert the sum of a mean divided by the count of all microbatches, times their number."""
    total, divisor = tensor_operands(mean.quotient)
    edit = Editor.before(mean.quotient, ctx)
    with edit.inserting():
        whole = with_count(divisor, mean.counted, count)
    return edit.trace(lambda x, d: x / d * microbatches, total, whole)


def rewire(program: ir.Program, new: dict[fx.Node, fx.Node]) -> None:
    """Let loss and metrics be weighted sums of the nodes in `new`, by those they replace; other uses stay."""
    of_kind = [node for node, out in zip(program.results(), program.outputs) if out.kind in KINDS]
    reached = weighted(of_kind)
    for node in [n for n in program.graph.nodes if n in reached and n not in new]:
        operands = {n: new.get(n, n) for n in node.all_input_nodes}
        if summands(node) and any(n is not m for n, m in operands.items()):
            with program.graph.inserting_before(node):
                new[node] = ir.copy_node(program.graph, node, operands)
    ends = zip(program.results(), program.outputs)
    program.graph.output_node().args = (tuple(new.get(n, n) if out.kind in KINDS else n for n, out in ends),)


def with_count(divisor: fx.Node, counted: fx.Node, count: fx.Node) -> fx.Node:
    """Return a copy of the divisor, computed from another count."""
    if divisor is counted:
        return count
    (operand,) = tensor_operands(divisor)
    return ir.copy_node(divisor.graph, divisor, {operand: with_count(operand, counted, count)})


def notes_on(left: Mapping[str, Sequence[fx.Node]]) -> tuple[str, ...]:
    """Return notes on the terms of loss and metrics that are no means over labels, by kind of output."""
    named = {
        f"{kind} has": ", ".join(f"%{term.name} ({ir.source(term)})" for term in terms) for kind, terms in left.items()
    }
    return tuple(
        f"the {who} terms averaged over microbatches, as no count of labels divides them: {listed}"
        for who, listed in named.items()
        if listed
    )


def is_scaled_by_samples(term: fx.Node, samples: Samples) -> bool:
    """Return True if a sum is divided by the microbatch's samples, possibly times other sizes of the summed tensor."""
    divisors = (user for user in term.users if user.target is aten.div.Tensor and user.args[0] is term)
    return bool(samples.sizes(term) & {user.args[1] for user in divisors if isinstance(user.args[1], int | float)})


def remarks_on(left: Sequence[fx.Node], samples: Samples, microbatches: int) -> Iterator[str]:
    """Yield remarks on terms of the batch that depend on `microbatches`: sums that are no means, and no sums at all."""
    of_batch = [term for term in left if term in samples.of_batch]
    sums = [term for term in of_batch if samples.add_up(term) and not is_scaled_by_samples(term, samples)]
    if sums:
        problem = f"no count of labels or samples divides terms of the loss ({sources(sums)}): they are averaged over"
        yield (
            f"{problem} microbatches, so that a sum divided by a constant is divided by "
            f"train.microbatches={microbatches} as well"
        )
    if others := [term for term in of_batch if not samples.add_up(term)]:
        yield (
            f"terms of the loss ({sources(others)}) are no sums over samples: each of train.microbatches="
            f"{microbatches} computes them from its own samples, and the mean is taken"
        )


def sources(nodes: Iterable[fx.Node]) -> str:
    """Return the lines of the model that nodes come from."""
    return ", ".join(dict.fromkeys(map(ir.source, nodes)))


@dataclass(frozen=True)
class TokenMean(ir.Pass):
    """Divide the means in loss and metrics by the counts of all `microbatches`, times their number."""

    microbatches: int
    name = "token_mean"
    takes = (Stage.NORMALIZED,)

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        batch = {n for n, i in zip(program.placeholders(), program.inputs) if i.kind == "batch"}
        ends = list(zip(program.results(), program.outputs))
        terms_of = {kind: terms(n for n, out in ends if out.kind == kind) for kind in KINDS}
        samples = samples_of(program, ctx)
        quotients = (as_mean(term, batch, samples) for term in dict.fromkeys((*terms_of["loss"], *terms_of["metric"])))
        means = [mean for mean in quotients if mean is not None]
        added = [(node, count_of(program, node, self.microbatches)) for node in dict.fromkeys(m.counted for m in means)]
        counts = {node: placeholder(program, ctx, node, f"count_{i}") for i, (node, _) in enumerate(added)}
        divisors = {mean.quotient: counts[mean.counted].name for mean in means}
        outputs = tuple(replace(out, count=common_count(node, divisors)) for node, out in ends)
        new = {mean.quotient: divided(mean, counts[mean.counted], self.microbatches, ctx) for mean in means}
        left = {kind: [term for term in terms if term not in new] for kind, terms in terms_of.items()}
        remarks = tuple(remarks_on(left["loss"], samples, self.microbatches))
        notes = notes_on(left)
        rewire(program, new)
        program.graph.eliminate_dead_code()
        program.module.recompile()
        inputs = (ir.Input(counts[node].name, "scalar", Spec(()), count=count) for node, count in added)
        report = ir.Report({"means": len(means)}, notes, remarks=remarks)
        return replace(program, inputs=(*program.inputs, *inputs), outputs=outputs), report
