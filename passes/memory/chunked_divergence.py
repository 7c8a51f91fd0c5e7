"""Two heads and the KL divergence of their distributions in chunks of tokens: only one chunk's logits exist at a time.

    divergences = ct::linear_divergences(hidden[n, d], weight[c, d], theirs[n, e], their_weight[c, e])     [n]
becomes, with a rank's own tokens and classes as in `chunked.py`,
    terms, totals, lse, their_lse = local::linear_divergences(hidden, weight, theirs, their_weight, ids)
    dhidden, dweight = local::linear_divergences_backward(dterms, totals, lse, their_lse, hidden, theirs, ...)

The first head is trained, the second is not: it is a teacher's. The backward recomputes the logits of each chunk, as
that of `chunked_tokens.py` does. Ranks that share the classes gather one number per token and head in each chunk, and
each rank has one term of a token's sum over classes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.spec import Spec
from passes.memory.chunked import Chunk, add_up, class_ids, count, define_global, flops, in_chunks
from passes.memory.chunked_tokens import TokenHead
from passes.ops import reshard
from passes.rules.base import EMITTERS
from passes.rules.losses import LINEAR_DIVERGENCES
from passes.trace.builder import Builder

NO_LABELS = -1  # heads of divergences have no labels to ignore


@dataclass(frozen=True)
class Divergence:
    """A trained head, a head without gradients, and the direction: KL(theirs || ours) if `is_forward`."""

    ours: TokenHead
    theirs: TokenHead
    is_forward: bool

    def terms(
        self, chunk: Chunk, hidden: Tensor, weight: Tensor, theirs: Tensor, their_weight: Tensor, ids: Tensor
    ) -> list[Tensor]:
        """Return a rank's terms of divergences[n], their sums over ranks, and lse[n] of both heads.

        Takes hidden[n, d], weight[c, d], theirs[n, e], their_weight[c, e], ids i64[c]. Results are in fp32 or wider.
        Only the reverse direction needs the sums; they are the rank's terms otherwise.
        """
        parts = self.ours.split(hidden, theirs)
        return [torch.cat(pieces) for pieces in zip(*(chunk(x, y, weight, their_weight, ids) for x, y in parts))]

    def terms_of_chunk(self, x: Tensor, y: Tensor, weight: Tensor, their_weight: Tensor, ids: Tensor) -> list[Tensor]:
        """Return the results of `terms` for x[m, d] and y[m, e]."""
        ours, _ = self.ours.values(x, ids, weight)
        theirs, _ = self.theirs.values(y, ids, their_weight)
        lse, their_lse = (self.ours.lse_over_ranks(value.logsumexp(1)) for value in (ours, theirs))
        ours, theirs = ours - lse.unsqueeze(1), theirs - their_lse.unsqueeze(1)
        first = theirs if self.is_forward else ours
        terms = (first.exp() * self.difference(ours, theirs, ids)).sum(1)
        return [terms, terms if self.is_forward else self.sum_over_ranks(terms), lse, their_lse]

    def difference(self, ours: Tensor, theirs: Tensor, ids: Tensor) -> Tensor:
        """Return the logarithm of the ratio of probabilities, [m, c]; 0 for padding classes."""
        difference = theirs - ours if self.is_forward else ours - theirs
        return torch.where(ids >= 0, difference, 0.0) if self.ours.padded else difference

    def sum_over_ranks(self, terms: Tensor) -> Tensor:
        """Return the sum of terms[m] over the ranks that share the classes."""
        for axis, parts in self.ours.axes:
            terms = reshard.all_gather(terms.unsqueeze(0), 0, axis, parts, parts, terms.dtype, None).sum(0)
        return terms

    def gradients(
        self,
        chunk: Chunk,
        slopes: Tensor,
        totals: Tensor,
        lse: Tensor,
        their_lse: Tensor,
        hidden: Tensor,
        theirs: Tensor,
        weight: Tensor,
        their_weight: Tensor,
        ids: Tensor,
    ) -> list[Tensor]:
        """Return the gradients of hidden, in its dtype, and of weight, in fp32 or wider, from those of divergences."""
        parts = self.ours.split(slopes, totals, lse, their_lse, hidden, theirs)
        return add_up(chunk, parts, [torch.zeros_like(weight, dtype=lse.dtype)], weight, their_weight, ids)

    def gradients_of_chunk(
        self,
        slopes: Tensor,
        totals: Tensor,
        lse: Tensor,
        their_lse: Tensor,
        x: Tensor,
        y: Tensor,
        along_weight: Tensor,
        weight: Tensor,
        their_weight: Tensor,
        ids: Tensor,
    ) -> list[Tensor]:
        """Return the gradient of x[m, d], and the running sum of weight's gradient."""
        ours, undo = self.ours.values(x, ids, weight)
        ours = ours - lse.unsqueeze(1)
        theirs = self.theirs.values(y, ids, their_weight)[0] - their_lse.unsqueeze(1)
        if self.is_forward:
            slope = ours.exp() - theirs.exp()
        else:
            slope = ours.exp() * (self.difference(ours, theirs, ids) - totals.unsqueeze(1))
        along, term = self.ours.along(slope * slopes.unsqueeze(1), undo, x, weight)
        return [along, along_weight + term]


# ---- the operator of the global program --------------------------------------------------------------

SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor theirs, Tensor their_weight, str[] between, str[] their_between, "
    "bool is_forward, int chunks) -> Tensor"
)


def divergence_of(
    between: Sequence[str],
    their_between: Sequence[str],
    is_forward: bool,
    chunks: int,
    axes: tuple[tuple[str, int], ...] = (),
    padded: bool = False,
) -> Divergence:
    """Return the computation of a rank, whose classes are shared with the ranks of `axes`."""
    ours, theirs = (TokenHead(tuple(steps), NO_LABELS, chunks, axes, padded) for steps in (between, their_between))
    return Divergence(ours, theirs, is_forward)


def divergences(hidden: Tensor, weight: Tensor, theirs: Tensor, their_weight: Tensor, *options: Any) -> Tensor:
    """Return the divergences, from all logits at once; the second head gets no gradient."""
    divergence = divergence_of(*options)
    ours, _ = divergence.ours.apply_steps(F.linear(hidden, weight))
    others, _ = divergence.theirs.apply_steps(F.linear(theirs, their_weight).detach())
    target, other = (others, ours) if divergence.is_forward else (ours, others)
    return F.kl_div(other.log_softmax(1), target.log_softmax(1), log_target=True, reduction="none").sum(1)


linear_divergences = define_global(LINEAR_DIVERGENCES, SCHEMA, divergences)


# ---- the operators of a rank -------------------------------------------------------------------------


def local_operator(divergence: Divergence) -> Any:
    """Define `local::linear_divergences(hidden, weight, theirs, their_weight, ids)` and its backward."""
    name = "linear_divergences"
    op = in_chunks(name, divergence.terms, divergence.terms_of_chunk, (5, 4), (5, 4))
    backward = in_chunks(f"{name}_backward", divergence.gradients, divergence.gradients_of_chunk, (9, 2), (10, 2))

    def setup(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*output[1:], *inputs)

    def differentiate(ctx: Any, gradient: Tensor, *_: Any) -> tuple:
        totals, lse, their_lse, hidden, weight, theirs, their_weight, ids = ctx.saved_tensors
        operands = hidden, theirs, weight, their_weight, ids
        along, along_weight = backward(gradient, totals, lse, their_lse, *operands)
        return along.to(hidden.dtype), along_weight.to(weight.dtype), None, None, None

    torch.library.register_autograd(op.name().replace(".default", ""), differentiate, setup_context=setup)
    count(op, flops_of_both)
    count(backward, flops_backward)
    return op


def flops_of_both(
    hidden: Sequence[int], weight: Sequence[int], theirs: Sequence[int], their_weight: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return the FLOPs of both heads."""
    return flops(hidden, weight) + flops(theirs, their_weight)


def flops_backward(*operands: Sequence[int], **_: Any) -> int:
    """Return the FLOPs of the recomputed logits of both heads and of the two gradients."""
    hidden, theirs, weight, their_weight = operands[4:8]
    return 3 * flops(hidden, weight) + flops(theirs, their_weight)


def emit(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Insert the `local` operator and return its first result."""
    (factor,) = specs[1].dims[0]
    numbers, axes, padded = class_ids(builder, factor, ir.example(operands[1]).device)
    between, their_between, is_forward, chunks = node.args[4:]
    divergence = divergence_of(between, their_between, is_forward, chunks, axes, padded)  # type: ignore[arg-type]
    if divergence not in builder.operators:
        builder.operators[divergence] = local_operator(divergence)
    outputs = builder.call(builder.operators[divergence], (*operands, numbers))
    return builder.call(operator.getitem, (outputs, 0))


EMITTERS[LINEAR_DIVERGENCES] = emit
