"""A head in a graph: a matmul that no other matmul follows, and the operators between it and a loss over tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from passes.ir import ir
from passes.ir.operators import CASTS, bind, is_operator, name_of
from passes.memory.chunked import name_of_dtype

NONE, MEAN = 0, 1  # aten's codes for reduction="none" and "mean"
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


def rows_of(x: Tensor, dims: int) -> Tensor:
    """Return a tensor with all dims but the last `dims` flattened into one."""
    return x if x.dim() == dims + 1 else x.reshape(-1, *x.shape[x.dim() - dims :])
