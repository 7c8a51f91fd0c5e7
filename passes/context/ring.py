"""Ring attention: queries stay, keys and values travel, results are merged by their log-sum-exp.

Liu et al., arXiv 2310.01889; the backward takes the merged result and log-sum-exp, and gradients of keys and values
travel home with them, in fp32. Under a causal mask the sequence lies in a zigzag (Zhu): rank r holds chunks r and
2P-1-r of 2P. At step s > 0, rank r holds the chunks (k0, k1) of rank r-s. Its tail q1 sees all of k0. Beyond that,
either its head q0 sees k0 (if they come from a lower rank), or q1 sees k1. So each step computes two full blocks,
chosen by the coordinate, and all ranks run the same program. Padding keys lie after every query.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.context import kernels
from passes.context.kernels import Block, Part, merge, wide_dtype
from passes.ir.layout import to_rank_order
from passes.ops.attend import attend, attend_backward, sink_gradient, with_sink
from passes.ops.shift import arrive, shift, shift_by
from passes.trace.functions import define, remember


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return head and tail along the sequence, the third dim."""
    return x.chunk(2, 2)  # type: ignore[return-value]


@dataclass(frozen=True)
class Ring:
    """Attention over `axis_size` ranks of an axis; the sequence of `size` lies in a zigzag if causal.

    At step s, each rank holds the K/V block of the rank s positions earlier; `steps` are those at which any rank sees
    anything, 0 first. With a `score` ("" for no function), each query sees an interval of keys, and the operands
    include the score function's terms (`attend.py`), a sink if it `has_sink`, and the first positions of each rank's
    key runs, i64[axis_size, runs]. With a `row`, the needed steps depend on the batch: that row of the hops tensor
    holds them (`shift.py`).
    """

    axis: str
    axis_size: int
    size: int
    causal: bool
    zigzag: bool
    scale: float | None
    steps: tuple[int, ...]
    score: str | None = None
    row: int | None = None
    has_sink: bool = False

    def hops(self) -> dict[int, int]:
        """Return the distance that keys travel after each step: to the next step, after the last one home."""
        return {step: next_step - step for step, next_step in itertools.pairwise((*self.steps, self.axis_size))}

    # -- travel -----------------------------------------------------------------------------------

    def send(self, x: Tensor, step: int, hops: Tensor | None, home: bool) -> Tensor:
        """Send `x` on, after the last step home if `home`, or not at all; a step that no rank needs sends nothing."""
        if self.row is None:
            return shift(x, self.axis, self.hops()[step])
        return shift_by(x, hops, self.axis, self.row, step, home)

    def travel(self, *tensors: Tensor, hops: Tensor | None = None) -> Any:
        """Yield (step, tensors of the rank that many places before), own ones first; the next are in flight meanwhile.

        At a step that no rank needs, the tensors are those of the step before, and are not read.
        """
        flat = torch.cat([x.reshape(-1) for x in tensors])
        for step in self.steps:
            last = step == self.steps[-1]
            incoming = None if last else self.send(flat, step, hops, home=False)
            pieces = flat.split([x.numel() for x in tensors])
            yield step, *(part.view(x.shape) for part, x in zip(pieces, tensors))
            flat = flat if last else arrive(incoming, flat)

    # -- causal -----------------------------------------------------------------------------------

    def causal_forward(self, q: Tensor, k: Tensor, v: Tensor, axis_index: Tensor) -> Part:
        """Return result and log-sum-exp of the rank's queries."""
        q0, q1 = halves(q)
        partials: list[Part | None] = [None, None]
        for step, key, value in self.travel(k, v):
            if step == 0:
                out, lse = kernels.forward(q, key, value, Block(True, self.scale))
                partials = list(zip(halves(out.to(wide_dtype(q.dtype))), halves(lse)))
                continue
            lower = axis_index >= step
            (k0, k1), (v0, v1) = halves(key), halves(value)
            out, lse = kernels.forward(
                torch.cat([q1, torch.where(lower, q0, q1)]),
                torch.cat([k0, torch.where(lower, k0, k1)]),
                torch.cat([v0, torch.where(lower, v0, v1)]),
                Block(False, self.scale),
            )
            (tail, either), (tail_lse, either_lse) = out.to(wide_dtype(q.dtype)).chunk(2), lse.chunk(2)
            partials[0] = merge(partials[0], (either, torch.where(lower, either_lse, -math.inf)))
            partials[1] = merge(partials[1], (tail, tail_lse))
            partials[1] = merge(partials[1], (either, torch.where(lower, -math.inf, either_lse)))
        (out0, lse0), (out1, lse1) = partials  # type: ignore[misc]
        return torch.cat([out0, out1], 2).to(q.dtype), torch.cat([lse0, lse1], 2)

    def causal_backward(self, gradient, q, k, v, out, lse, axis_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the rank's own q, k and v."""
        along_q: Any = None
        key_gradients = KeyGradients(self)
        for step, key, value in self.travel(k, v):
            if step == 0:
                gradients = kernels.backward(gradient, q, key, value, out, lse, Block(True, self.scale))
                along_q = list(halves(gradients[0].to(wide_dtype(q.dtype))))
                key_gradients.add(step, *gradients[1:])
                continue
            lower = axis_index >= step

            def pick(x: Tensor, lower: Tensor = lower) -> Tensor:
                head, tail = halves(x)
                return torch.cat([tail, torch.where(lower, head, tail)])

            (k0, k1), (v0, v1) = halves(key), halves(value)
            gradients = kernels.backward(
                pick(gradient),
                pick(q),
                torch.cat([k0, torch.where(lower, k0, k1)]),
                torch.cat([v0, torch.where(lower, v0, v1)]),
                pick(out),
                pick(lse),
                Block(False, self.scale),
            )
            tail, either = gradients[0].to(wide_dtype(q.dtype)).chunk(2)
            along_q[0] = along_q[0] + torch.where(lower, either, 0.0)
            along_q[1] = along_q[1] + tail + torch.where(lower, 0.0, either)
            key_gradients.add(step, *(self.to_halves(x.to(wide_dtype(q.dtype)), lower) for x in gradients[1:]))
        return torch.cat(along_q, 2).to(q.dtype), *key_gradients.receive(k.dtype)

    @staticmethod
    def to_halves(x: Tensor, lower: Tensor) -> Tensor:
        """Return gradients of (k0, either half) as gradients of (k0, k1)."""
        head, either = x.chunk(2)
        return torch.cat([head + torch.where(lower, either, 0.0), torch.where(lower, 0.0, either)], 2)

    # -- any mask ---------------------------------------------------------------------------------

    def masks(self, mask: Tensor | None, q: Tensor, k: Tensor, axis_index: Tensor) -> Callable[[int], Tensor | None]:
        """Return step -> additive mask of the rank's queries and the current keys, None if all are visible."""
        padding = k.shape[2] * self.axis_size - self.size
        if mask is None and not padding:
            return lambda step: None
        rows = q.shape[2]
        if mask is None:
            mask = torch.zeros((1, 1, rows, self.size), dtype=q.dtype, device=q.device)
        elif mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
        mask = mask.reshape([1] * (4 - mask.dim()) + list(mask.shape))
        mask = mask.expand(*mask.shape[:2], rows, self.size)
        full, last = F.pad(mask, [0, padding], value=-math.inf), 3
        by_rank = to_rank_order(full, last, self.axis_size) if self.zigzag else full
        by_rank = by_rank.unflatten(last, (self.axis_size, -1))

        def mask_at(step: int) -> Tensor:
            source = torch.remainder(axis_index - step, self.axis_size).reshape(1)
            return by_rank.index_select(last, source).squeeze(last).contiguous()

        return mask_at

    def full_forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, axis_index: Tensor) -> Part:
        """Return result and log-sum-exp of the rank's queries."""
        mask_at, merged = self.masks(mask, q, k, axis_index), None
        for step, key, value in self.travel(k, v):
            out, lse = kernels.forward(q, key, value, Block(False, self.scale, mask_at(step)))
            merged = merge(merged, (out.to(wide_dtype(q.dtype)), lse))
        assert merged is not None
        return merged[0].to(q.dtype), merged[1]

    def full_backward(self, gradient, q, k, v, mask, out, lse, axis_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the rank's own q, k and v."""
        mask_at, along_q, key_gradients = (
            self.masks(mask, q, k, axis_index),
            torch.zeros_like(q, dtype=wide_dtype(q.dtype)),
            KeyGradients(self),
        )
        for step, key, value in self.travel(k, v):
            gradients = kernels.backward(gradient, q, key, value, out, lse, Block(False, self.scale, mask_at(step)))
            along_q = along_q + gradients[0]
            key_gradients.add(step, *gradients[1:])
        return along_q.to(q.dtype), *key_gradients.receive(k.dtype)

    # -- intervals --------------------------------------------------------------------------------

    def interval_forward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[Tensor], hops: Tensor | None, axis_index: Tensor
    ) -> Part:
        """Return result and log-sum-exp of the rank's queries."""
        merged = None
        for step, key, value in self.travel(k, v, hops=hops):
            out, lse = attend(q, key, value, *self.interval_arguments(rows, axis_index, step))
            merged = merge(merged, (out.to(wide_dtype(q.dtype)), lse))
        assert merged is not None
        out, lse = with_sink(*merged, self.sink(rows)) if self.has_sink else merged
        return out.to(q.dtype), lse

    def interval_backward(self, gradient, q, k, v, rows, hops, out, lse, axis_index) -> tuple[Tensor, ...]:
        """Return the gradients of the rank's own q, k and v, and of a sink."""
        along_q, key_gradients = torch.zeros_like(q, dtype=wide_dtype(q.dtype)), KeyGradients(self, hops)
        for step, key, value in self.travel(k, v, hops=hops):
            arguments = self.interval_arguments(rows, axis_index, step)
            gradients = attend_backward(gradient, q, key, value, out, lse, *arguments)
            along_q = along_q + gradients[0]
            key_gradients.add(step, *gradients[1:])
        of_sink = [sink_gradient(gradient, out, lse, self.sink(rows))] if self.has_sink else []
        return along_q.to(q.dtype), *key_gradients.receive(k.dtype), *of_sink

    def sink(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the sink, of operands after queries, keys and values."""
        return rows[-2]

    def interval_arguments(self, rows: Sequence[Tensor], axis_index: Tensor, step: int) -> tuple[Any, ...]:
        """Return the arguments of attention by interval after queries, keys and values."""
        first, last, *terms, starts = rows
        terms = terms[:-1] if self.has_sink else terms
        runs = starts.index_select(0, torch.remainder(axis_index - step, self.axis_size).view(1)).view(-1)
        return first, last, runs, terms, self.scale, self.score


class KeyGradients:
    """Gradients of keys and values on their way home, one step behind the keys and values."""

    def __init__(self, ring: Ring, hops: Tensor | None = None):
        self.ring, self.hops = ring, hops
        self.sent: Tensor | None = None
        self.incoming: Tensor | None = None
        self.shapes: list[torch.Size] = []

    def add(self, step: int, *gradients: Tensor) -> None:
        """Add this step's gradients to those of earlier steps, and send the sum on."""
        self.shapes = [g.shape for g in gradients]
        flat = torch.cat([g.to(wide_dtype(g.dtype)).reshape(-1) for g in gradients])
        if self.incoming is not None:
            flat = flat + arrive(self.incoming, self.sent)
        self.sent = flat
        if len(self.ring.steps) > 1:
            self.incoming = self.ring.send(flat, step, self.hops, home=True)

    def receive(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the gradients of the rank's own keys and values."""
        flat = self.sent if self.incoming is None else arrive(self.incoming, self.sent)
        assert flat is not None
        pieces = flat.split([math.prod(shape) for shape in self.shapes])
        return tuple(piece.view(shape).to(dtype) for piece, shape in zip(pieces, self.shapes))


def operator(ring: Ring, operands: int) -> Any:
    """Return the operator `local::ring_attention(q, k, v, ..., axis_index) -> (out, lse)`, with its gradient.

    After values come a mask, or bounds, score terms, a sink, the first positions of key runs, and hops if the ring has
    a row.
    """
    split = -1 if ring.row is not None else None

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *rows, axis_index = tensors
        if ring.causal:
            return ring.causal_forward(q, k, v, axis_index)
        if ring.score is not None:
            return ring.interval_forward(q, k, v, rows[:split], rows[-1], axis_index)
        return ring.full_forward(q, k, v, rows[0] if rows else None, axis_index)

    def run_backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *rows, axis_index, out, lse, gradient = tensors
        gradient = gradient.contiguous()
        if ring.causal:
            return ring.causal_backward(gradient, q, k, v, out, lse, axis_index)
        if ring.score is not None:
            return ring.interval_backward(gradient, q, k, v, rows[:split], rows[-1], out, lse, axis_index)
        return ring.full_backward(gradient, q, k, v, rows[0] if rows else None, out, lse, axis_index)

    inputs_count, travels = operands + 1, ring.axis_size > 1
    op = define("local", "ring_attention", run, inputs_count, 2)
    back = define("local", "ring_attention_backward", run_backward, inputs_count + 3, 3 + ring.has_sink)
    remember(op, run, communicates=travels)
    remember(back, run_backward, communicates=travels)

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output)

    def differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple:
        gradients = list(back(*ctx.saved_tensors, gradient))
        result: list[Tensor | None] = [*gradients[:3], *[None] * (inputs_count - 3)]
        if ring.has_sink:  # before the first positions of key runs, hops, and the rank's place
            result[-4 if ring.row is not None else -3] = gradients[3]
        return tuple(result)

    torch.library.register_autograd(op.name().replace(".default", ""), differentiate, setup_context=setup)
    return op
