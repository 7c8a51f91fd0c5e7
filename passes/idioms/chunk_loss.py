"""Compute head and loss in chunks of tokens if a rank's logits would be large.

    logits = linear(hidden, w)                       131,072 tokens of 128,256 classes: 31 GiB in bf16
    x = _to_copy(view(logits, [-1, V]), f32)
    loss = cross_entropy_loss(x, labels)
becomes
    total = ct::linear_cross_entropy(view(hidden, [-1, d]), w, labels, None, ["to float32"], -100, 31)
    loss = total / (labels != -100).sum()
and, if each token's loss is needed (pairs), `ct::linear_cross_entropies`, which recomputes logits for gradients. The KL
divergence of two heads becomes `ct::linear_divergences` (`passes/idioms/chunk_divergence.py`).

A head is a matmul that no other matmul follows. Between it and the loss there may be a bias, casts, scaling by numbers,
a tanh (a soft-cap), views, and slices of tokens. The loss is a cross-entropy by class ids, summed, averaged or per
token, or the same from a log-softmax. If logits are large and have any other reader they are not chunked, and the
report names the reader. If the number of chunks is set, it is an error if no head can be chunked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from passes.idioms.chunk_divergence import divergences_of, only_read_by, pair_of, trained_nodes
from passes.idioms.loss_heads import MEAN, LossHead, NotChunkable, follow, rows_of
from passes.ir import ir
from passes.ir.mesh import DATA_AXES, WEIGHT_AXES, Mesh
from passes.ir.operators import bind, name_of
from passes.ir.stages import Stage
from passes.memory.chunked import linear_cross_entropy
from passes.memory.chunked_tokens import linear_cross_entropies
from passes.rules.losses import IN_CHUNKS
from passes.rules.roles import MATMULS, last_of
from passes.trace.editor import Editor

aten = torch.ops.aten
MIB, GIB = 2**20, 2**30
OPTIONS = "passes.chunk_loss"
RECOMPUTED = "recomputed for gradients"


# ---- the rewrite ---------------------------------------------------------------------------------------


def local_shape(logits: fx.Node, mesh: Mesh) -> tuple[int, int]:
    """Return a rank's tokens, divided over the data axes, and its classes, divided over the weight axes."""
    value = ir.example(logits)
    tokens, classes = value.numel() // value.shape[-1], value.shape[-1]
    data, weights = (math.prod(mesh[axis] for axis in axes) for axes in (DATA_AXES, WEIGHT_AXES))
    return -(-tokens // data), -(-classes // weights)


def local_bytes(logits: fx.Node, mesh: Mesh) -> int:
    """Return the bytes of a rank's logits."""
    return math.prod(local_shape(logits, mesh)) * ir.example(logits).element_size()


def loss_in_chunks(head: LossHead, chunks: int) -> Callable[..., Tensor]:
    """Return the loss as a function of hidden, weight, labels and bias."""
    assert head.loss is not None
    arguments = bind(head.loss)
    ignored, reduction = arguments.get("ignore_index", -100), arguments.get("reduction", MEAN)
    operator = linear_cross_entropies if head.is_by_token else linear_cross_entropy
    is_linear, dtype = name_of(head.matmul) == "linear", ir.example(head.loss).dtype
    slices = [(ir.example(n.args[0]).shape[:-1], n.args[1:]) for n in head.slices]  # type: ignore[arg-type]

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        for shape, args in slices:
            hidden = aten.slice.Tensor(hidden.reshape(*shape, hidden.shape[-1]), *args)
        rows, ids = rows_of(hidden, 1), rows_of(labels, 0)
        weight = weight if is_linear else weight.t()
        total = operator(rows, weight, ids, bias, head.between, ignored, chunks)
        total = total if total.dtype == dtype else total.to(dtype)
        if head.is_by_token:
            return total if labels.dim() == 1 else total.reshape(labels.shape)
        return total / (ids != ignored).sum() if reduction == MEAN else total

    return loss


def rewrite(head: LossHead, chunks: int, ctx: ir.Context) -> None:
    """Replace the loss by the loss in chunks; the operators that made logits lose their readers."""
    node = head.loss
    assert node is not None
    operands = (head.hidden, head.weight, bind(node)["target"], head.bias)
    node.replace_all_uses_with(Editor.before(node, ctx).trace(loss_in_chunks(head, chunks), *operands))


@dataclass
class Tally:
    """The losses of a program: lines on those in chunks, reasons against others, and bytes of a rank's logits."""

    losses: int = 0
    chunked: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    largest_bytes: int = 0
    saved_bytes: int = 0

    def attempt(self, logits: str, size_bytes: int, chunks: int, change: Callable[[], str]) -> None:
        """Record a loss; if there are several chunks, call `change`, which returns a remark or raises NotChunkable."""
        logits, chunk_bytes = f"{logits}: {size_bytes / GIB:.4g} GiB of logits on a rank", size_bytes
        self.losses += 1
        if chunks > 1:
            try:
                remark = change()
                self.chunked.append(f"{logits} in {chunks} chunks of {size_bytes / chunks / GIB:.4g} GiB, {remark}")
                chunk_bytes = -(-size_bytes // chunks)
            except NotChunkable as reason:
                self.reasons.append(f"{logits} are not chunked: {reason}")
        self.largest_bytes = max(self.largest_bytes, chunk_bytes)
        self.saved_bytes += size_bytes - chunk_bytes


@dataclass(frozen=True)
class ChunkLoss(ir.Pass):
    """Compute head and loss in `chunks`, 1 for no change.

    With None there are enough to keep each chunk's logits within `logits_mib`.
    """

    chunks: int | None = None
    logits_mib: float = 1024.0
    name = "chunk_loss"
    takes = (Stage.CAPTURED,)
    after = ("cast",)  # it casts the operands of the chunks

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        copied, tally = program.copy(), Tally()
        of_divergences = self.chunk_divergences(copied, ctx, tally)
        self.chunk_losses(copied, ctx, tally, of_divergences)
        if tally.chunked:
            copied.module.recompile()
        counts = {"losses": len(tally.chunked), "saved_bytes": tally.saved_bytes}
        effect = self.effect(len(tally.chunked), tally.losses, tally.largest_bytes, tally.reasons)
        return (copied if tally.chunked else program), ir.Report(
            counts, (*tally.chunked, *tally.reasons), effects=(effect,)
        )

    def chunk_divergences(self, program: ir.Program, ctx: ir.Context, tally: Tally) -> set[fx.Node]:
        """Compute divergences in chunks; changes the graph. Return the heads that only divergences read before."""
        trained, heads = trained_nodes(program), set[fx.Node]()
        for total, logs in divergences_of(program).items():
            heads |= only_read_by(logs[0]) | only_read_by(logs[1])
            size_bytes = sum(local_bytes(node, program.mesh) for node in logs)
            chunks = self.chunks_of(size_bytes, logs[0], program.mesh)

            def change(total: fx.Node = total, logs: tuple[fx.Node, fx.Node] = logs, chunks: int = chunks) -> str:
                pair_of(logs, trained).replace(total, chunks, ctx)
                return RECOMPUTED

            tally.attempt(f"%{total.name} ({ir.source(total)})", size_bytes, chunks, change)
        program.graph.eliminate_dead_code()
        return heads

    def chunk_losses(self, program: ir.Program, ctx: ir.Context, tally: Tally, but: Collection[fx.Node]) -> None:
        """Compute cross-entropies in chunks, except those of some heads; changes the graph."""
        for matmul in (node for node in heads_of(program) if node not in but):
            size_bytes = local_bytes(matmul, program.mesh)
            chunks = self.chunks_of(size_bytes, matmul, program.mesh)

            def change(matmul: fx.Node = matmul, chunks: int = chunks) -> str:
                head = follow(matmul)
                rewrite(head, chunks, ctx)
                return RECOMPUTED if head.is_by_token else "gradients with the loss"

            tally.attempt(f"%{matmul.name} ({ir.source(matmul)})", size_bytes, chunks, change)
        program.graph.eliminate_dead_code()

    def effect(self, done: int, total: int, largest_bytes: int, reasons: Sequence[str]) -> ir.Effect:
        """Return the effect of the option that decides the number of chunks, with the `reasons` against chunks."""
        option, fix = f"{OPTIONS}.logits_mib", f"set it to {math.ceil(largest_bytes / MIB):,}"
        if self.chunks is not None:
            option, fix = f"{OPTIONS}.chunks", "set it to null"
            if self.chunks > 1 and not reasons:
                reasons = ["a rank has one token" if total else "the model has no head, the last matmul before a loss"]
        detail = f"the largest logits of a rank have {largest_bytes:,} bytes"
        unmet = f"{'; '.join(reasons)}; {fix}" if reasons else ""
        return ir.Effect(option, done, "losses in chunks", total, detail, unmet)

    def chunks_of(self, size_bytes: int, logits: fx.Node, mesh: Mesh) -> int:
        """Return the number of chunks of logits with that size on a rank, at most one per token."""
        wanted = self.chunks or math.ceil(size_bytes / (self.logits_mib * MIB))
        return min(wanted, local_shape(logits, mesh)[0])


def heads_of(program: ir.Program) -> list[fx.Node]:
    """Return the matmuls that no other matmul follows, in order."""
    matmuls = [n for n in program.calls() if name_of(n) in (*MATMULS, "addmm")]
    last = last_of(program, [*matmuls, *(n for n in program.calls() if name_of(n) in IN_CHUNKS)])
    return [n for n in matmuls if n in last and ir.example(n).dim()]
