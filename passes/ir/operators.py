"""Facts about a node's operator: name and arguments, and if it views, writes, draws random numbers or communicates.

    view(x, [4, 2])                                  a view
    add_(x, 1)                                       writes into an operand
    native_dropout(x, 0.1, True)                     random; so is `scaled_dot_product_attention` with dropout
    all_gather_into_tensor(w, 4, "fsdp:gradients")   kind "all_gather", axis "fsdp", communicator "fsdp:gradients"

For nodes without an operator (inputs, elements of a tuple) all are false, except that an element of a view is a view.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from passes.ir import ir
from passes.ops.reshard import RESHARD_OPS, Kind
from passes.ops.shift import SHIFTS
from passes.torch_private import OpOverload, c10d

CASTS = frozenset({"to", "_to_copy"})  # operators by name that change at most the dtype
SHAPED = frozenset(f"{kind}_like" for kind in ("empty", "full", "ones", "zeros")) | frozenset(
    f"new_{kind}" for kind in ("empty", "full", "ones", "zeros")
)  # operators by name that use only their operand's shape, dtype and device
# uses of communicators, if an axis has several
EXCHANGES = "exchanges"  # of rows or heads, during gathers of the next layer's parameters
RING = "ring"  # steps of a ring
GRADIENTS = "gradients"  # of parameters
# kinds of the functional collectives that reshard operators become, and of ring steps
KINDS: dict[OpOverload, Kind] = {
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.all_gather_into_tensor_coalesced.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.reduce_scatter_tensor_coalesced.default: "reduce_scatter",
    c10d.all_reduce.default: "all_reduce",
    c10d.all_reduce_coalesced.default: "all_reduce",
    c10d.all_to_all_single.default: "all_to_all",
    **dict.fromkeys(SHIFTS, "shift"),  # `shift_by` counts as if every step were needed
}


def is_operator(node: fx.Node) -> bool:
    """Return True if a node calls an operator: it is neither an input nor an element of a tuple."""
    return isinstance(node.target, OpOverload)


def name_of(node: fx.Node) -> str:
    """Return the name of the operator that a node calls; empty if it calls none."""
    return key_of(node.target) if isinstance(node.target, OpOverload) else ""


def namespace_of(op: OpOverload) -> str:
    """Return `aten`, `ct`, ...; `fn` or `local` for operators defined for a program, whichever program."""
    space = op.namespace.rstrip("0123456789")
    return space if space in ("fn", "local") else op.namespace


@functools.cache
def key_of(op: OpOverload) -> str:
    """Return an operator's name: `linear` for `aten.linear.default`, `my::op` outside aten."""
    name, space = op._schema.name.partition("::")[2], namespace_of(op)
    return name if space == "aten" else f"{space}::{name}"


# ---- arguments -------------------------------------------------------------------------------------


def bind(node: fx.Node) -> dict[str, Any]:
    """Return the operator's arguments by name, except those at their defaults."""
    names = (argument.name for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def argument(node: fx.Node, name: str, otherwise: Any = None) -> Any:
    """Return an operator's argument, explicit or by default; `otherwise` if it has none of that name."""
    for i, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if parameter.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, parameter.default_value)
    return otherwise


# ---- memory and randomness ---------------------------------------------------------------------------


def is_mutable(node: fx.Node) -> bool:
    """Return True if an operator writes into an operand."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def is_view(node: fx.Node) -> bool:
    """Return True if an operator only returns its operand's memory: a view, or an element of several."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    if not may_alias(node) or node.is_impure():  # `arrive` returns the received tensor, but has a side effect
        return False
    return name_of(node) not in PERHAPS_COPIES or is_same_line(node)


def may_alias(node: fx.Node) -> bool:
    """Return True if an operator's schema allows it to return its operand's memory unchanged."""
    return isinstance(node.target, OpOverload) and _may_alias(node.target)


@functools.cache
def _may_alias(op: OpOverload) -> bool:
    return not op._schema.is_mutable and any(result.alias_info is not None for result in op._schema.returns)


PERHAPS_COPIES = frozenset({"to", "contiguous", "reshape", "reshape_as", "flatten", "ravel"})


def is_same_line(node: fx.Node) -> bool:
    """Return True if one of `PERHAPS_COPIES` returns its operand's entries as they lie."""
    x, y = (ir.example(n) for n in (node.args[0], node))  # type: ignore[arg-type]
    return x.is_contiguous() and y.is_contiguous() and (x.dtype, x.device) == (y.dtype, y.device)


def is_random(node: fx.Node) -> bool:
    """Return True if an operator draws random numbers; attention and recurrent networks do so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if argument(node, "dropout") is not None:
        return bool(argument(node, "train")) and argument(node, "dropout") != 0.0
    return argument(node, "dropout_p", 1.0) != 0.0


# ---- communication ---------------------------------------------------------------------------------


def kind_of(node: fx.Node) -> Kind | None:
    """Return the kind of an operator's collective, or None if nothing is sent."""
    record = RESHARD_OPS.get(node.target)
    return record.kind if record else KINDS.get(node.target)  # type: ignore[arg-type]


def communicator_of(node: fx.Node) -> str | None:
    """Return the communicator that an operator names, or None: the mesh axis, or "axis:use" if it has several."""
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("ct", "_c10d_functional"):
        return None
    arguments = bind(node)
    return arguments.get("axis", arguments.get("group_name"))


def axis_of(node: fx.Node) -> str | None:
    """Return the mesh axis that an operator communicates over, or None."""
    communicator = communicator_of(node)
    return communicator and communicator.partition(":")[0]


def started(wait: fx.Node) -> fx.Node:
    """Return the collective that a wait is for; in a body, its input if the collective began in another body."""
    node = wait.all_input_nodes[0]
    return node if kind_of(node) or node.op == "placeholder" else node.all_input_nodes[0]  # one of several tensors
