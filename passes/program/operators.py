"""Facts about the operator of a node: its name and arguments, whether it views, writes, draws or communicates.

    view(x, [4, 2])                                  a view
    add_(x, 1)                                       writes into an operand
    native_dropout(x, 0.1, True)                     random; `scaled_dot_product_attention` is, with dropout
    all_gather_into_tensor(w, 4, "fsdp:gradients")   kind "all_gather", axis "fsdp", communicator "fsdp:gradients"

Of what is no operator (an input, a part of a tuple) none of this is so, but that a part of a view is one.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from passes.program import ir
from passes.program.reshard import RESHARD_OPS, Kind
from passes.program.shift import SHIFTS
from passes.program.torch_private import OpOverload, c10d

CASTS = frozenset({"to", "_to_copy"})  # operators by name that change a dtype, or nothing
SHAPED = frozenset(f"{what}_like" for what in ("empty", "full", "ones", "zeros")) | frozenset(
    f"new_{what}" for what in ("empty", "full", "ones", "zeros")
)  # operators by name that take no more of their operand than its shape, dtype and device
EXCHANGES = "exchanges"  # of rows or heads: likewise, where gathers of the next layer's parameters are in flight
RING = "ring"  # of steps of a ring
GRADIENTS = "gradients"  # whose a communicator is, where an axis has one for them and one for the rest
# of the functional collectives that reshard operators become, and of the steps of a ring
KINDS: dict[OpOverload, Kind] = {
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.all_gather_into_tensor_coalesced.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.reduce_scatter_tensor_coalesced.default: "reduce_scatter",
    c10d.all_reduce.default: "all_reduce",
    c10d.all_reduce_coalesced.default: "all_reduce",
    c10d.all_to_all_single.default: "all_to_all",
    **dict.fromkeys(SHIFTS, "shift"),  # by hops as if every step were needed
}


def is_operator(node: fx.Node) -> bool:
    """Whether a node calls an operator: it is no input and no part of a tuple."""
    return isinstance(node.target, OpOverload)


def name_of(node: fx.Node) -> str:
    """The name of the operator that a node calls; empty of what is none."""
    return key_of(node.target) if isinstance(node.target, OpOverload) else ""


def namespace_of(op: OpOverload) -> str:
    """`aten`, `ct`, ...; `fn` or `local` of what was made for a program, whichever it was."""
    space = op.namespace.rstrip("0123456789")
    return space if space in ("fn", "local") else op.namespace


@functools.cache
def key_of(op: OpOverload) -> str:
    """An operator's name: `linear` for `aten.linear.default`, `my::op` outside aten."""
    name, space = op._schema.name.partition("::")[2], namespace_of(op)
    return name if space == "aten" else f"{space}::{name}"


# ---- arguments -------------------------------------------------------------------------------------


def bind(node: fx.Node) -> dict[str, Any]:
    """The operator's arguments by name, those left at their defaults aside."""
    names = (argument.name for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def argument(node: fx.Node, name: str, otherwise: Any = None) -> Any:
    """An operator's argument, given or by default; `otherwise` where it has none of that name."""
    for i, known in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if known.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, known.default_value)
    return otherwise


# ---- what it does to memory, and whether it would do the same again --------------------------------


def is_mutable(node: fx.Node) -> bool:
    """Whether an operator writes into an operand."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def is_view(node: fx.Node) -> bool:
    """Whether an operator yields its operand's memory and nothing else happens: a view, or a part of several."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    if not may_alias(node) or node.is_impure():  # the wait for what arrives yields what travelled
        return False
    return name_of(node) not in PERHAPS_COPIES or is_same_line(node)


def may_alias(node: fx.Node) -> bool:
    """Whether an operator, by its schema, may yield its operand's memory as it found it."""
    return isinstance(node.target, OpOverload) and _may_alias(node.target)


@functools.cache
def _may_alias(op: OpOverload) -> bool:
    return not op._schema.is_mutable and any(result.alias_info is not None for result in op._schema.returns)


PERHAPS_COPIES = frozenset({"to", "contiguous", "reshape", "reshape_as", "flatten", "ravel"})


def is_same_line(node: fx.Node) -> bool:
    """Whether one of these operators yields its operand's entries as they lie."""
    given, made = (ir.example(n) for n in (node.args[0], node))  # type: ignore[arg-type]
    return given.is_contiguous() and made.is_contiguous() and (given.dtype, given.device) == (made.dtype, made.device)


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers; attention and recurrent networks do only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if argument(node, "dropout") is not None:
        return bool(argument(node, "train")) and argument(node, "dropout") != 0.0
    return argument(node, "dropout_p", 1.0) != 0.0


# ---- communication ---------------------------------------------------------------------------------


def kind_of(node: fx.Node) -> Kind | None:
    """What kind of collective an operator is, or None where nothing travels."""
    record = RESHARD_OPS.get(node.target)
    return record.kind if record else KINDS.get(node.target)  # type: ignore[arg-type]


def communicator_of(node: fx.Node) -> str | None:
    """What an operator names to communicate, or None: the mesh axis, or with several on it "axis:whose"."""
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("ct", "_c10d_functional"):
        return None
    bound = bind(node)
    return bound.get("axis", bound.get("group_name"))


def axis_of(node: fx.Node) -> str | None:
    """The mesh axis that an operator communicates over, or None."""
    communicator = communicator_of(node)
    return communicator and communicator.partition(":")[0]


def started(wait: fx.Node) -> fx.Node:
    """The collective that a wait is for; in a body, what it was given if that began in another."""
    node = wait.all_input_nodes[0]
    return node if kind_of(node) or node.op == "placeholder" else node.all_input_nodes[0]  # of several tensors, one
