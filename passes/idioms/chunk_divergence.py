"""Find the KL divergence of two heads' distributions, of which one is trained, and compute both heads in chunks.

    p, q = (linear(hidden, w) / t).log_softmax(-1), (linear(theirs, v) / t).log_softmax(-1)
    divergences = (exp(q) * (q - p)).sum(-1)
becomes
    divergences = ct::linear_divergences(hidden, w, theirs, v, ["div t"], ["div t"], True, 31)

Between a head and its log-softmax there may be casts, scaling by numbers, a tanh (a soft-cap), and views. Both
directions are found: the one of the example, KL(q || p), is called forward. A head with a bias, slices of tokens, two
trained heads and two frozen ones are refused. `passes/idioms/chunk_loss.py` is the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from passes.idioms.loss_heads import LossHead, NotChunkable, begin, describe, rows_of, step
from passes.ir import ir
from passes.ir.operators import is_operator, name_of
from passes.memory.chunked_divergence import linear_divergences
from passes.rules import tensor_operands
from passes.rules.roles import MATMULS
from passes.trace.editor import Editor


@dataclass(frozen=True)
class HeadPair:
    """The heads of a divergence, the trained one first, and the direction."""

    ours: LossHead
    theirs: LossHead
    is_forward: bool

    def replace(self, total: fx.Node, chunks: int, ctx: ir.Context) -> None:
        """Replace the divergences; the operators that made logits lose their readers."""
        operands = self.ours.hidden, self.ours.weight, self.theirs.hidden, self.theirs.weight
        total.replace_all_uses_with(Editor.before(total, ctx).trace(self.in_chunks(total, chunks), *operands))

    def in_chunks(self, total: fx.Node, chunks: int) -> Callable[..., Tensor]:
        """Return the divergences as a function of hidden, weight, theirs and their weight."""
        value = ir.example(total)
        heads = self.ours, self.theirs
        is_linear = [name_of(head.matmul) == "linear" for head in heads]

        def divergences(*operands: Tensor) -> Tensor:
            rows = [rows_of(x, 1) for x in operands[::2]]
            weights = [w if stays else w.t() for w, stays in zip(operands[1::2], is_linear)]
            options: Any = *(head.between for head in heads), self.is_forward, chunks
            result = linear_divergences(rows[0], weights[0], rows[1], weights[1], *options)
            return result.to(value.dtype).reshape(value.shape)

        return divergences


def divergences_of(program: ir.Program) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    """Return the divergences over a last dim, each with the log-softmax nodes p and q of KL(p || q), in order."""
    pairs = ((node, logs_of(node)) for node in program.calls() if is_operator(node))
    return {node: logs for node, logs in pairs if logs is not None}


def logs_of(total: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the log-softmax nodes p and q if a node is sum(exp(p) * (p - q)) over the last dim; None otherwise."""
    if name_of(total) != "sum" or len(total.args) != 2 or total.kwargs or not is_last(total.args[1], total.args[0]):
        return None
    (product,) = total.all_input_nodes
    for ratio in product.all_input_nodes if name_of(product) == "mul" else ():
        powers = [n for n in product.all_input_nodes if n is not ratio and name_of(n) == "exp"]
        if powers and name_of(ratio) == "sub" and len(ratio.all_input_nodes) == 2 and not ratio.kwargs:
            p, q = ratio.args
            if powers[0].args[0] is p and is_logs(p) and is_logs(q) and ir.example(p).shape == ir.example(q).shape:  # type: ignore[arg-type]
                return p, q  # type: ignore[return-value]
    return None


def is_last(dims: Any, x: Any) -> bool:
    """Return True if dims are the last one alone."""
    return list(dims) in ([-1], [ir.example(x).dim() - 1])


def is_logs(node: fx.Node) -> bool:
    """Return True for a log-softmax over the last dim."""
    return name_of(node) == "log_softmax" and len(node.args) == 2 and is_last([node.args[1]], node)


def trained_nodes(program: ir.Program) -> set[fx.Node]:
    """Return the nodes to whose operands a gradient would flow."""
    trained = {n for n, entry in zip(program.placeholders(), program.inputs) if entry.kind == "parameter"}
    for node in program.calls():
        if name_of(node) != "detach" and any(n in trained for n in node.all_input_nodes):
            trained.add(node)
    return trained


def pair_of(logs: tuple[fx.Node, fx.Node], trained: Collection[fx.Node]) -> HeadPair:
    """Return the heads of KL(p || q); raises NotChunkable with the reason if they do not fit."""
    if sum(node in trained for node in logs) != 1:
        raise NotChunkable("not one of the two distributions is trained")
    is_forward = logs[1] in trained
    ours, theirs = (head_before(node) for node in (reversed(logs) if is_forward else logs))
    return HeadPair(ours, theirs, is_forward)


def head_before(logs: fx.Node) -> LossHead:
    """Return the head whose logarithms of probabilities a node is; raises NotChunkable with what does not fit."""
    chain = [*reversed(list(back_to_matmul(logs)))]
    head = LossHead(chain[0])
    begin(head)
    for before, after in pairwise(chain):
        if not step(head, after, before):
            raise NotChunkable(f"%{before.name} is followed by {describe(after)}")
    if head.bias or head.slices or head.classes_first:
        raise NotChunkable(f"%{head.matmul.name} has a bias, or tokens are cut or moved after it")
    return head


def only_read_by(logs: fx.Node) -> set[fx.Node]:
    """Return the matmul before the logarithms of probabilities, if nothing else reads its logits."""
    try:
        *others, matmul = back_to_matmul(logs)
    except NotChunkable:
        return set()
    return {matmul} if all(len(node.users) == 1 for node in (*others[1:], matmul)) else set()


def back_to_matmul(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node and those before it, up to a matmul."""
    while name_of(node) not in (*MATMULS, "addmm"):
        yield node
        operands = tensor_operands(node)
        if len(operands) != 1 or not is_operator(operands[0]):
            raise NotChunkable(f"{describe(node)} has other operands than logits")
        (node,) = operands
    yield node
