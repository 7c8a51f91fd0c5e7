"""Head and cross-entropy in chunks if each token's loss is needed, so that its use is known only afterwards.

    losses = ct::linear_cross_entropies(hidden[n, d], weight[c, d], labels[n], bias[c])     [n], 0 at ignored labels
becomes, with a rank's own tokens and classes as in `chunked.py`,
    losses, lse = local::linear_cross_entropies(hidden, weight, labels, ids, bias)
    dhidden, dweight, dbias = local::linear_cross_entropies_backward(dlosses, lse, hidden, weight, labels, ids, bias)

The gradient of the weight is a sum over tokens, each times the gradient of its loss, so it cannot be computed with the
losses. The backward recomputes the logits of each chunk, one matmul more than with full logits. Each operator stays one
node until the program is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from passes.memory.chunked import SCHEMA, Chunk, Head, add_up, count, define_global, emit, flops, in_chunks, losses
from passes.rules.base import EMITTERS
from passes.rules.losses import LINEAR_CROSS_ENTROPIES


@dataclass(frozen=True)
class TokenHead(Head):
    """A head whose losses are not summed."""

    def losses(
        self, chunk: Chunk, hidden: Tensor, weight: Tensor, labels: Tensor, ids: Tensor, *bias: Tensor
    ) -> list[Tensor]:
        """Return a rank's terms of losses[n], and lse[n], both in fp32 or wider.

        Takes hidden[n, d], weight[c, d], labels i64[n], ids i64[c], bias[c].
        """
        parts = self.split(hidden, labels)
        return [torch.cat(pieces) for pieces in zip(*(chunk(x, y, ids, weight, *bias) for x, y in parts))]

    def losses_of_chunk(self, x: Tensor, y: Tensor, ids: Tensor, weight: Tensor, *bias: Tensor) -> list[Tensor]:
        """Return the results of `losses` for x[m, d]."""
        value, _ = self.values(x, ids, weight, *bias)
        lse = self.lse_over_ranks(value.logsumexp(1), y)
        counts, hit = self.match_labels(y, ids)
        return [torch.where(counts, lse, 0.0) / self.shares - torch.where(hit, value, 0.0).sum(1), lse]

    def gradients(
        self,
        chunk: Chunk,
        slopes: Tensor,
        lse: Tensor,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ids: Tensor,
        *bias: Tensor,
    ) -> list[Tensor]:
        """Return gradients of hidden, in its dtype, of weight and bias, in fp32 or wider, from those of losses, [n]."""
        sums = [torch.zeros_like(operand, dtype=lse.dtype) for operand in (weight, *bias)]
        return add_up(chunk, self.split(slopes, lse, hidden, labels), sums, ids, weight, *bias)

    def gradients_of_chunk(
        self, slopes: Tensor, lse: Tensor, x: Tensor, y: Tensor, *sums_and_operands: Tensor
    ) -> list[Tensor]:
        """Return the gradient of x[m, d], and the running sums of gradients of weight and bias."""
        count = len(sums_and_operands) // 2
        sums, (ids, weight, *bias) = sums_and_operands[:count], sums_and_operands[count:]
        value, undo = self.values(x, ids, weight, *bias)
        slope = self.slope(value, lse, *self.match_labels(y, ids)) * slopes.unsqueeze(1)
        along, *terms = self.along(slope, undo, x, weight, *bias)
        return [along, *(before + term for before, term in zip(sums, terms, strict=True))]


linear_cross_entropies = define_global(LINEAR_CROSS_ENTROPIES, SCHEMA, partial(losses, "none"))


# ---- the operators of a rank -------------------------------------------------------------------------


def local_operator(head: TokenHead, biased: bool) -> Any:
    """Define `local::linear_cross_entropies(hidden, weight, labels, ids[, bias]) -> (losses, lse)` and its backward."""
    name = "linear_cross_entropies"
    op = in_chunks(name, head.losses, head.losses_of_chunk, (4 + biased, 2), (4 + biased, 2))
    counts = (6 + biased, 2 + biased), (6 + 2 * biased + 1, 2 + biased)
    backward = in_chunks(f"{name}_backward", head.gradients, head.gradients_of_chunk, *counts)

    def setup(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(output[1], *inputs)

    def differentiate(ctx: Any, gradient: Tensor, *_: Any) -> tuple:
        lse, hidden, weight, labels, ids, *bias = ctx.saved_tensors
        gradients = backward(gradient, lse, hidden, weight, labels, ids, *bias)
        along_hidden, along_weight, *along_bias = (g.to(x.dtype) for g, x in zip(gradients, (hidden, weight, *bias)))
        return along_hidden, along_weight, None, None, *along_bias

    torch.library.register_autograd(op.name().replace(".default", ""), differentiate, setup_context=setup)
    count(op, flops)
    count(backward, flops_backward)
    return op


def flops_backward(_: Any, __: Any, *operands: Sequence[int], **kwargs: Any) -> int:
    """Return the FLOPs of the recomputed logits and of the two gradients."""
    return 3 * flops(*operands[:2])


EMITTERS[LINEAR_CROSS_ENTROPIES] = partial(emit, TokenHead, local_operator)
