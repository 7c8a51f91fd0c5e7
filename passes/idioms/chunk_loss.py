"""Compute head and loss in chunks of tokens if a rank's logits would be large.

    logits = linear(hidden, w)                       131,072 tokens of 128,256 classes: 31 GiB in bf16
    x = _to_copy(view(logits, [-1, V]), f32)
    loss = cross_entropy_loss(x, labels)
becomes
    total = ct::linear_cross_entropy(view(hidden, [-1, d]), w, labels, None, ["to float32"], -100, 31)
    loss = total / (labels != -100).sum()
and, if each token's loss is needed (pairs), `ct::linear_cross_entropies`, which recomputes logits for gradients.

A head is a matmul that no other matmul follows. Between it and the loss there may be a bias, casts, scaling by numbers,
a tanh (a soft-cap), views, and slices of tokens. The loss is a cross-entropy by class ids, summed, averaged or per
token, or the same from a log-softmax. If logits are large and have any other reader they are not chunked, and the
report names the reader. If the number of chunks is set, it is an error if no head can be chunked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.mesh import DATA_AXES, WEIGHT_AXES, Mesh
from passes.ir.operators import CASTS, bind, is_operator, name_of
from passes.ir.stages import Stage
from passes.memory.chunked import linear_cross_entropy, name_of_dtype
from passes.memory.chunked_tokens import linear_cross_entropies
from passes.rules.roles import MATMULS, last_of
from passes.trace.editor import Editor

aten = torch.ops.aten
NONE, MEAN = 0, 1  # aten's codes for reduction="none" and "mean"
MIB, GIB = 2**20, 2**30
OPTIONS = "passes.chunk_loss"
LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze", "alias", "contiguous", "clone")
SWAPS = (("transpose", [1, 2]), ("transpose", [2, 1]), ("permute", [0, 2, 1]))  # classes before tokens


class NotChunkable(Exception):
    """Raised with the reason why logits are not chunked."""


@dataclass
class LossHead:
    """A head in the graph: its matmul, the operators after it in order, and the loss at its end."""

    matmul: fx.Node
    bias: fx.Node | None = None
    between: list[str] = field(default_factory=list)
    slices: list[fx.Node] = field(default_factory=list)  # of tokens
    logs: bool = False  # a log-softmax was taken
    classes_first: bool = False  # classes were moved before tokens
    loss: fx.Node | None = None

    @property
    def classes(self) -> int:
        """The number of classes."""
        return ir.example(self.matmul).shape[-1]

    @property
    def is_by_token(self) -> bool:
        """True if each token's loss is needed."""
        return self.loss is not None and bind(self.loss).get("reduction", MEAN) == NONE

    @property
    def hidden(self) -> fx.Node:
        """The operand that is projected."""
        return self.matmul.args[1 if name_of(self.matmul) == "addmm" else 0]  # type: ignore[return-value]

    @property
    def weight(self) -> fx.Node:
        """The matrix, [classes, features] if the matmul is a linear layer, otherwise transposed."""
        return self.matmul.args[2 if name_of(self.matmul) == "addmm" else 1]  # type: ignore[return-value]


# ---- from a head to its loss ---------------------------------------------------------------------------


def follow(matmul: fx.Node) -> LossHead:
    """Return the head of a matmul; raises NotChunkable with the operator that does not fit."""
    head = LossHead(matmul)
    begin(head)
    node = matmul
    while head.loss is None:
        if len(node.users) != 1:
            raise NotChunkable(f"%{node.name} is read by {', '.join(map(describe, node.users)) or 'nothing'}")
        (user,) = node.users
        if not step(head, user, node):
            raise NotChunkable(f"%{node.name} is followed by {describe(user)}")
        node = user
    return head


def describe(user: fx.Node) -> str:
    """Return a reader of logits, with its line."""
    return "the program's end: it is returned" if user.op == "output" else f"%{user.name} ({ir.source(user)})"


def begin(head: LossHead) -> None:
    """Check the matmul: tokens by one matrix, and a bias; raises NotChunkable."""
    matmul, name = head.matmul, name_of(head.matmul)
    if name == "addmm":
        arguments = bind(matmul)
        if arguments.get("beta", 1) != 1 or arguments.get("alpha", 1) != 1:
            raise NotChunkable(f"%{matmul.name} scales its terms")
        if not take_bias(head, matmul.args[0]):
            raise NotChunkable(f"%{matmul.name} adds more than a bias")
    elif name == "linear" and len(matmul.args) > 2 and matmul.args[2] is not None:
        if not take_bias(head, matmul.args[2]):
            raise NotChunkable(f"%{matmul.name} adds more than a bias")
    if ir.example(head.weight).dim() != 2:
        raise NotChunkable(f"%{matmul.name} is not a matmul with one matrix")


def take_bias(head: LossHead, bias: Any) -> bool:
    """Record a value as the logits' bias and return True; return False if it does not fit or the logits were changed.

    It has one number per class and the logits' dtype.
    """
    logits = ir.example(head.matmul)
    fits = ir.is_tensor(bias) and tuple(ir.example(bias).shape) == (head.classes,)
    if not fits or ir.example(bias).dtype != logits.dtype or head.bias or head.between:
        return False
    head.bias = bias
    return True


def step(head: LossHead, node: fx.Node, before: fx.Node) -> bool:
    """Record an operator on the logits; return True if it may stand before the loss, or is the loss."""
    if not is_operator(node):
        return False
    name, value = name_of(node), ir.value(node)
    if name in LOSSES:
        return end(head, node)
    if head.classes_first or not isinstance(value, Tensor):
        return False
    if (name, [*_flat(node.args[1:])]) in SWAPS and value.dim() == 3:
        head.classes_first = True
    elif name == "log_softmax" and node.args[1] in (-1, value.dim() - 1) and len(node.args) == 2 and not node.kwargs:
        head.logs = True
    elif name in VIEWS and value.shape[-1:] == (head.classes,):
        pass  # the number of classes is the same, so the rows are
    elif name == "slice" and node.args[1] % ir.example(before).dim() != ir.example(before).dim() - 1:  # type: ignore
        head.slices.append(node)
    elif name == "add" and before in node.args and not node.kwargs and not head.logs:
        return take_bias(head, node.args[1] if node.args[0] is before else node.args[0])
    else:
        return not head.logs and take_scaling(head, node, before)
    return True


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [n for arg in args for n in (arg if isinstance(arg, (list, tuple)) else [arg])]


def take_scaling(head: LossHead, node: fx.Node, before: fx.Node) -> bool:
    """Record a cast, a scaling by a number or a tanh; return False for other operators."""
    name, value = name_of(node), ir.example(node)
    numbers = [arg for arg in node.args if type(arg) in (int, float)]
    if name in CASTS and value.is_floating_point() and value.device == ir.example(before).device:
        head.between.append(f"to {name_of_dtype(value.dtype)}")
    elif name == "tanh":
        head.between.append("tanh")
    elif name in ("mul", "div") and len(numbers) == 1 and len(node.args) == 2 and not node.kwargs:
        if name == "div" and node.args[0] is not before:
            return False
        head.between.append(f"{name} {float(numbers[0])!r}")
    else:
        return False
    return True


def end(head: LossHead, node: fx.Node) -> bool:
    """Record the loss if it is over tokens by class ids; raises NotChunkable otherwise."""
    arguments = bind(node)
    target = ir.example(arguments["target"])
    if arguments.get("weight") is not None:
        raise NotChunkable(f"{describe(node)} has class weights")
    if (name_of(node) == "cross_entropy_loss") == head.logs:
        raise NotChunkable(f"{describe(node)} expects {'logits' if head.logs else 'log-probabilities'}")
    if target.is_floating_point() or arguments.get("label_smoothing", 0.0):
        raise NotChunkable(f"{describe(node)} has labels that are not class ids, or label smoothing")
    if head.classes_first != (target.dim() == 2):
        raise NotChunkable(f"{describe(node)} expects classes in another dim")
    head.loss = node
    return True


# ---- the rewrite ---------------------------------------------------------------------------------------


def local_shape(matmul: fx.Node, mesh: Mesh) -> tuple[int, int]:
    """Return a rank's tokens, divided over the data axes, and its classes, divided over the weight axes."""
    logits = ir.example(matmul)
    tokens, classes = logits.numel() // logits.shape[-1], logits.shape[-1]
    data, weights = (math.prod(mesh[axis] for axis in axes) for axes in (DATA_AXES, WEIGHT_AXES))
    return -(-tokens // data), -(-classes // weights)


def local_bytes(matmul: fx.Node, mesh: Mesh) -> int:
    """Return the bytes of a rank's logits."""
    return math.prod(local_shape(matmul, mesh)) * ir.example(matmul).element_size()


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


def rows_of(x: Tensor, dims: int) -> Tensor:
    """Return a tensor with all dims but the last `dims` flattened into one."""
    return x if x.dim() == dims + 1 else x.reshape(-1, *x.shape[x.dim() - dims :])


def rewrite(head: LossHead, chunks: int, ctx: ir.Context) -> None:
    """Replace the loss by the loss in chunks; the operators that made logits lose their readers."""
    node = head.loss
    assert node is not None
    operands = (head.hidden, head.weight, bind(node)["target"], head.bias)
    node.replace_all_uses_with(Editor.before(node, ctx).trace(loss_in_chunks(head, chunks), *operands))


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
        heads = {n: self.chunks_of(n, program.mesh) for n in heads_of(program)}
        copied = program.copy() if max(heads.values(), default=1) > 1 else program
        copies = dict(zip(program.graph.nodes, copied.graph.nodes, strict=True))
        chunked, reasons, largest, saved = list[str](), list[str](), 0, 0
        for head, chunks in heads.items():
            size = local_bytes(head, program.mesh)
            place = f"%{head.name} ({ir.source(head)}): {size / GIB:.4g} GiB of logits on a rank"
            try:
                loss_head = follow(copies[head]) if chunks > 1 else None
            except NotChunkable as reason:
                reasons.append(f"{place} are not chunked: {reason}")
                loss_head = None
            chunk = size if loss_head is None else -(-size // chunks)
            largest, saved = max(largest, chunk), saved + size - chunk
            if loss_head is not None:
                rewrite(loss_head, chunks, ctx)
                when = "recomputed for gradients" if loss_head.is_by_token else "gradients with the loss"
                chunked.append(f"{place} in {chunks} chunks of {size / chunks / GIB:.4g} GiB, {when}")
        if chunked:
            copied.graph.eliminate_dead_code()
            copied.module.recompile()
        counts = {"losses": len(chunked), "saved_bytes": saved}
        effect = self.effect(len(chunked), len(heads), largest, reasons)
        return (copied if chunked else program), ir.Report(counts, (*chunked, *reasons), effects=(effect,))

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

    def chunks_of(self, head: fx.Node, mesh: Mesh) -> int:
        """Return the number of chunks of a head, at most one per token."""
        wanted = self.chunks or math.ceil(local_bytes(head, mesh) / (self.logits_mib * MIB))
        return min(wanted, local_shape(head, mesh)[0])


def heads_of(program: ir.Program) -> list[fx.Node]:
    """Return the matmuls that no other matmul follows, in order."""
    matmuls = [n for n in program.calls() if name_of(n) in (*MATMULS, "addmm")]
    last = last_of(program, matmuls)
    return [n for n in matmuls if n in last]
