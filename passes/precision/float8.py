"""Matmuls in float8 with dynamic scales, forward and backward.

    y = linear(x, w)
becomes
    xq, sx = quantize(x)                 rows of x: scale = 448 / amax(row), rounded down to a power of two
    wq, sw = quantize(w)                 rows of w
    y = _scaled_mm(xq, wq.t(), sx, sw.t())

Its gradients are two more such matmuls, quantized along the dims that they sum. The recipes `tensorwise` (one scale per
tensor, any value) and `rowwise` are those of torchao (torchao.float8, `Float8LinearConfig`). The function bodies are
partitioned like the rest of the graph: a weight that is stored in shards is quantized in shards, so that float8
travels; the amax of a sharded dim is reduced over its axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.layer import within
from passes.ir.operators import name_of
from passes.ir.stages import Stage
from passes.ops import routed
from passes.rules.contractions import MULTIPLE
from passes.rules.losses import IN_CHUNKS
from passes.rules.roles import last_of
from passes.trace.functions import Function, define, record

aten = torch.ops.aten
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TINY = 1e-12  # least amax, so that a row of zeros has a finite scale (torchao's EPS)
OPTION = "passes.cast.float8"

Quantize = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]


def rowwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return float8[m, k] and the factors f32[m, 1] that undo its scales, each a power of two."""
    amax = x.abs().detach().amax(-1, keepdim=True)
    return to_float8(x, torch.exp2(torch.floor(torch.log2(to_scale(amax, dtype)))), dtype)


def tensorwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return float8[m, k] and the factor f32[] that undoes its scale."""
    amax = x.abs().detach().amax()
    return to_float8(x, to_scale(amax, dtype), dtype)


def to_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that maps the largest value to the largest number of the dtype, f32."""
    return (torch.finfo(dtype).max / amax.to(torch.float64).clamp(min=TINY)).to(torch.float32)


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scaled values, saturated, and the inverse of the scale."""
    largest = torch.finfo(dtype).max
    return (x.to(torch.float32) * scale).clamp(-largest, largest).to(dtype), scale.reciprocal()


def float8_matmul(a: Tensor, b: Tensor, quantize: Quantize, dtype: torch.dtype = E4M3) -> Tensor:
    """Return the matmul of a[m, k] (as `dtype`) and b[n, k] transposed, both quantized along k, in the dtype of `a`."""
    (aq, sa), (bq, sb) = quantize(a.contiguous(), dtype), quantize(b.contiguous(), E4M3)
    return aten._scaled_mm.default(aq, bq.t(), sa, sb.t() if sb.dim() else sb, None, None, a.dtype)


def forward(quantize: Quantize, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Return linear(x, w)."""
    y = float8_matmul(x.reshape(-1, x.shape[-1]), w, quantize)
    return (y.reshape(*x.shape[:-1], w.shape[0]),)


def backward(quantize: Quantize, x: Tensor, w: Tensor, y: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of x and w."""
    dtype = E5M2 if quantize is tensorwise else E4M3  # torchao: one scale for all gradients needs the wider range
    rows, flat = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    along_n, along_m = float8_matmul(rows, w.t(), quantize, dtype), float8_matmul(rows.t(), flat.t(), quantize, dtype)
    return along_n.reshape(x.shape), along_m


RECIPES: dict[str, Quantize] = {"rowwise": rowwise, "tensorwise": tensorwise}


@dataclass(frozen=True)
class Float8(ir.Pass):
    """Compute linear layers in float8 by `recipe` (None: none), except in modules of `skip` and unsuitable ones.

    The head, a linear layer that no other follows, stays as it is unless `head`. Both dims of a weight must be
    multiples of 16, or padding them would cost more than it saves, and at least `min_size`. Layers that stay as they
    are are reported. Tokens and shares of a rank may have any size (`passes.rules.contractions`).
    """

    recipe: Literal["tensorwise", "rowwise"] | None = None
    skip: tuple[str, ...] = ()
    min_size: int = MULTIPLE
    head: bool = False
    name = "float8"
    takes = (Stage.PLACED,)

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if self.recipe is None:
            return program, ir.Report()
        program = program.copy()
        left: Counter[str] = Counter()
        matched: set[str] = set()
        done = 0
        layers = [n for n in program.calls() if n.target is aten.linear.default]
        chunked = [n for n in program.calls() if name_of(n) in IN_CHUNKS]
        heads = set() if self.head else last_of(program, [*layers, *chunked])
        linear = self.operator()
        grouped = program.count(n for n in program.calls() if n.target in (routed.expert_mm, routed.grouped_mm))
        left += Counter({"grouped matmuls of experts": grouped, "heads whose losses are in chunks": len(chunked)})
        for node in layers:
            if reason := self.why_not(node, matched) or ("the head" if node in heads else ""):
                left[reason] += program.times(node)
                continue
            node.target, node.args, node.kwargs = linear, node.args[:2], {}
            done += program.times(node)
        if unmatched := [p for p in self.skip if p not in matched]:
            raise ir.Refused("float8", None, f"passes.cast.float8_skip: no linear layer is named like {unmatched[0]!r}")
        program.module.recompile()
        others = ", ".join(f"{n:,} not: {reason}" for reason, n in sorted(left.items()))
        unmet = f"nothing can compute in float8: {'; '.join(left) or 'the model has no linear layer'}; set it to null"
        effect = ir.Effect(OPTION, done, "linear layers in float8", done + left.total(), others, unmet)
        return program, ir.Report({"linear": done, "left": left.total()}, effects=(effect,))

    def why_not(self, node: fx.Node, matched: set[str]) -> str:
        """Return the reason why a linear layer stays as it is, or an empty string."""
        x, w = (ir.example(n) for n in node.args[:2])  # type: ignore[arg-type]
        skipped = [p for p in self.skip if within(ir.module_path(node), p)]
        matched.update(skipped)
        if skipped:
            return f"named like {skipped[0]}"
        if x.dtype not in (torch.bfloat16, torch.float32):
            return f"{x.dtype} operands"
        if any(n % MULTIPLE for n in w.shape):
            return f"{w.shape[0]} x {w.shape[1]} are not multiples of {MULTIPLE}"
        return f"a dim under {self.min_size}" if min(w.shape) < self.min_size else ""

    def operator(self) -> Any:
        """Return a linear layer as a function whose bodies the shard pass partitions."""
        assert self.recipe is not None
        bodies = [partial(fn, RECIPES[self.recipe]) for fn in (forward, backward)]
        op = define("fn", "float8_linear", bodies[0], 2, 1)
        record(op, Function("float8_linear", bodies[0], bodies[1], 1))
        return op
