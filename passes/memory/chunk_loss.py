"""Compute head and loss in chunks of tokens if a rank's logits would be large.

    logits = linear(hidden, w)                       131,072 tokens of 128,256 classes: 31 GiB in bf16
    x = _to_copy(view(logits, [-1, V]), f32)
    loss = cross_entropy_loss(x, labels)
becomes
    total = ct::linear_cross_entropy(view(hidden, [-1, d]), w, labels, None, ["to float32"], -100, 31)
    loss = total / (labels != -100).sum()
and, if each token's loss is needed (DPO), `ct::linear_cross_entropies`, which recomputes logits for gradients.

A head is a matmul that no other matmul follows. Between it and the loss there may be a bias, casts, scaling by numbers,
a tanh (a soft-cap), views, and slices of tokens. The loss is a cross-entropy by class ids, summed, averaged or per
token, or the same from a log-softmax. If logits are large and have any other reader they are not chunked, and the
report names the reader. If the number of chunks is set, it is an error if no head can be chunked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from passes.memory.chunked import linear_cross_entropy, name_of_dtype
from passes.memory.chunked_tokens import linear_cross_entropies
from passes.program import ir
from passes.program.editor import Editor
from passes.program.mesh import DATA_AXES, WEIGHT_AXES, Mesh
from passes.program.operators import CASTS, bind, is_operator, name_of
from passes.program.stages import Stage
from passes.rules.roles import PRODUCTS, last_of

aten = torch.ops.aten
NONE, MEAN = 0, 1  # aten's codes for reduction="none" and "mean"
MIB, GIB = 2**20, 2**30
LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze", "alias", "contiguous", "clone")
SWAPS = (("transpose", [1, 2]), ("transpose", [2, 1]), ("permute", [0, 2, 1]))  # classes before tokens


class NotChunkable(Exception):
    """Raised with the reason why logits are not chunked."""


@dataclass
class Found:
    """A head in the graph: its matmul, the operators after it in order, and the loss at its end."""

    product: fx.Node
    bias: fx.Node | None = None
    between: list[str] = field(default_factory=list)
    taken: list[fx.Node] = field(default_factory=list)  # slices of tokens
    logs: bool = False  # a log-softmax was taken
    swapped: bool = False
    loss: fx.Node | None = None

    @property
    def classes(self) -> int:
        """The number of classes."""
        return ir.example(self.product).shape[-1]

    @property
    def is_by_token(self) -> bool:
        """True if each token's loss is needed."""
        return self.loss is not None and bind(self.loss).get("reduction", MEAN) == NONE

    @property
    def hidden(self) -> fx.Node:
        """The operand that is projected."""
        return self.product.args[1 if name_of(self.product) == "addmm" else 0]  # type: ignore[return-value]

    @property
    def weight(self) -> fx.Node:
        """The matrix, [classes, features] if the matmul is a linear layer, otherwise transposed."""
        return self.product.args[2 if name_of(self.product) == "addmm" else 1]  # type: ignore[return-value]


# ---- from a head to its loss ---------------------------------------------------------------------------


def follow(product: fx.Node) -> Found:
    """Return the head of a matmul; raises NotChunkable with the operator that does not fit."""
    found = Found(product)
    begin(found)
    node = product
    while found.loss is None:
        if len(node.users) != 1:
            raise NotChunkable(f"%{node.name} is read by {', '.join(map(describe, node.users)) or 'nothing'}")
        (user,) = node.users
        if not step(found, user, node):
            raise NotChunkable(f"what reads %{node.name} is {describe(user)}")
        node = user
    return found


def describe(user: fx.Node) -> str:
    """Return a reader of logits, with its line."""
    return "the program's end: it is returned" if user.op == "output" else f"%{user.name} ({ir.source(user)})"


def begin(found: Found) -> None:
    """Check the matmul: tokens by one matrix, and a bias; raises NotChunkable."""
    product, name = found.product, name_of(found.product)
    if name == "addmm":
        given = bind(product)
        if given.get("beta", 1) != 1 or given.get("alpha", 1) != 1:
            raise NotChunkable(f"%{product.name} scales its terms")
        take_bias(found, product.args[0])
    elif name == "linear" and len(product.args) > 2 and product.args[2] is not None:
        take_bias(found, product.args[2])
    if ir.example(found.weight).dim() != 2:
        raise NotChunkable(f"%{product.name} is no product by one matrix")


def take_bias(found: Found, bias: Any) -> bool:
    """Record a value as the logits' bias and return True; return False if it does not fit or the logits were changed.

    It has one number per class and the logits' dtype.
    """
    logits = ir.example(found.product)
    fits = ir.is_tensor(bias) and tuple(ir.example(bias).shape) == (found.classes,)
    if not fits or ir.example(bias).dtype != logits.dtype or found.bias or found.between:
        return False
    found.bias = bias
    return True


def step(found: Found, node: fx.Node, before: fx.Node) -> bool:
    """Record an operator on the logits; return True if it may stand before the loss, or is the loss."""
    if not is_operator(node):
        return False
    name, value = name_of(node), ir.value(node)
    if name in LOSSES:
        return end(found, node)
    if found.swapped or not isinstance(value, Tensor):
        return False
    if (name, [*_flat(node.args[1:])]) in SWAPS and value.dim() == 3:
        found.swapped = True
    elif name == "log_softmax" and node.args[1] in (-1, value.dim() - 1) and len(node.args) == 2 and not node.kwargs:
        found.logs = True
    elif name in VIEWS and value.shape[-1:] == (found.classes,):
        pass  # the number of classes is the same, so the rows are
    elif name == "slice" and node.args[1] % ir.example(before).dim() != ir.example(before).dim() - 1:  # type: ignore
        found.taken.append(node)
    elif name == "add" and before in node.args and not node.kwargs:
        return take_bias(found, node.args[1] if node.args[0] is before else node.args[0])
    else:
        return not found.logs and changes(found, node, before)
    return True


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [n for arg in args for n in (arg if isinstance(arg, (list, tuple)) else [arg])]


def changes(found: Found, node: fx.Node, before: fx.Node) -> bool:
    """Record a cast, a scaling by a number or a tanh; return False for other operators."""
    name, value = name_of(node), ir.example(node)
    numbers = [arg for arg in node.args if type(arg) in (int, float)]
    if name in CASTS and value.is_floating_point() and value.device == ir.example(before).device:
        found.between.append(f"to {name_of_dtype(value.dtype)}")
    elif name == "tanh":
        found.between.append("tanh")
    elif name in ("mul", "div") and len(numbers) == 1 and len(node.args) == 2 and not node.kwargs:
        if name == "div" and node.args[0] is not before:
            return False
        found.between.append(f"{name} {float(numbers[0])!r}")
    else:
        return False
    return True


def end(found: Found, node: fx.Node) -> bool:
    """Record the loss if it is over tokens by class ids; raises NotChunkable otherwise."""
    given = bind(node)
    target = ir.example(given["target"])
    if given.get("weight") is not None:
        raise NotChunkable(f"{describe(node)} weighs classes")
    if (name_of(node) == "cross_entropy_loss") == found.logs:
        raise NotChunkable(f"{describe(node)} takes {'logits' if found.logs else 'logarithms'}")
    if target.is_floating_point() or given.get("label_smoothing", 0.0):
        raise NotChunkable(f"{describe(node)} has labels that are no class ids, or smooths them")
    if found.swapped != (target.dim() == 2):
        raise NotChunkable(f"{describe(node)} takes classes along another dim")
    found.loss = node
    return True


# ---- the rewrite ---------------------------------------------------------------------------------------


def local_shape(product: fx.Node, mesh: Mesh) -> tuple[int, int]:
    """Return a rank's tokens, divided over the data axes, and its classes, divided over the weight axes."""
    logits = ir.example(product)
    tokens, classes = logits.numel() // logits.shape[-1], logits.shape[-1]
    data, weights = (math.prod(mesh[axis] for axis in axes) for axes in (DATA_AXES, WEIGHT_AXES))
    return -(-tokens // data), -(-classes // weights)


def local_bytes(product: fx.Node, mesh: Mesh) -> int:
    """Return the bytes of a rank's logits."""
    return math.prod(local_shape(product, mesh)) * ir.example(product).element_size()


def loss_in_chunks(found: Found, chunks: int) -> Callable[..., Tensor]:
    """Return the loss as a function of hidden, weight, labels and bias."""
    assert found.loss is not None
    given = bind(found.loss)
    ignored, reduction = given.get("ignore_index", -100), given.get("reduction", MEAN)
    taken = linear_cross_entropies if found.is_by_token else linear_cross_entropy
    is_linear, dtype = name_of(found.product) == "linear", ir.example(found.loss).dtype
    slices = [(ir.example(n.args[0]).shape[:-1], n.args[1:]) for n in found.taken]  # type: ignore[arg-type]

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        for shape, args in slices:
            hidden = aten.slice.Tensor(hidden.reshape(*shape, hidden.shape[-1]), *args)
        rows, ids = rows_of(hidden, 1), rows_of(labels, 0)
        weight = weight if is_linear else weight.t()
        total = taken(rows, weight, ids, bias, found.between, ignored, chunks)
        total = total if total.dtype == dtype else total.to(dtype)
        if found.is_by_token:
            return total if labels.dim() == 1 else total.reshape(labels.shape)
        return total / (ids != ignored).sum() if reduction == MEAN else total

    return loss


def rows_of(x: Tensor, dims: int) -> Tensor:
    """Return a tensor with all dims but the last `dims` flattened into one."""
    return x if x.dim() == dims + 1 else x.reshape(-1, *x.shape[x.dim() - dims :])


def rewrite(found: Found, chunks: int, ctx: ir.Context) -> None:
    """Replace the loss by the loss in chunks; the operators that made logits lose their readers."""
    node = found.loss
    assert node is not None
    operands = (found.hidden, found.weight, bind(node)["target"], found.bias)
    node.replace_all_uses_with(Editor.before(node, ctx).trace(loss_in_chunks(found, chunks), *operands))


@dataclass(frozen=True)
class ChunkLoss(ir.Pass):
    """Compute head and loss in `chunks` (None: enough to keep each chunk's logits within `logits_mib`.

    1: unchanged).
    """

    chunks: int | None = None
    logits_mib: float = 1024.0
    name = "chunk_loss"
    takes = (Stage.CAPTURED,)
    after = ("cast",)  # it casts the operands of the chunks

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        heads = {n: k for n in heads_of(program) if (k := self.chunks_of(n, program.mesh)) > 1}
        if not heads:
            return program, ir.Report()
        copied = program.copy()
        copies = dict(zip(program.graph.nodes, copied.graph.nodes, strict=True))
        notes, saved, done = [], 0, 0
        for head, chunks in heads.items():
            size = local_bytes(head, program.mesh)
            what = f"%{head.name} ({ir.source(head)}): {size / GIB:.4g} GiB of logits on a rank"
            try:
                found = follow(copies[head])
            except NotChunkable as why:
                notes.append(f"{what} stay whole: {why}")
                continue
            rewrite(found, chunks, ctx)
            when = "made again for gradients" if found.is_by_token else "gradients with the loss"
            notes.append(f"{what} in {chunks} chunks of {size / chunks / GIB:.4g} GiB, {when}")
            saved, done = saved + size - -(-size // chunks), done + 1
        if not done:
            if self.chunks is not None:
                raise ir.Refused("chunk_loss", next(iter(heads)), f"passes.chunk_loss.chunks: {'; '.join(notes)}")
            return program, ir.Report({"losses": 0}, tuple(notes))
        copied.graph.eliminate_dead_code()
        copied.module.recompile()
        return copied, ir.Report({"losses": done, "saved_bytes": saved}, tuple(notes))

    def chunks_of(self, head: fx.Node, mesh: Mesh) -> int:
        """Return the number of chunks of a head, at most one per token."""
        wanted = self.chunks or math.ceil(local_bytes(head, mesh) / (self.logits_mib * MIB))
        return min(wanted, local_shape(head, mesh)[0])


def heads_of(program: ir.Program) -> list[fx.Node]:
    """Return the matmuls that no other matmul follows, in order."""
    products = [n for n in program.calls() if name_of(n) in (*PRODUCTS, "addmm")]
    last = last_of(program, products)
    return [n for n in products if n in last]
