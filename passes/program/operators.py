"""Facts about operators: what one communicates over, and how.

    all_gather_into_tensor(w, 4, "fsdp:gradients")   kind "all_gather", axis "fsdp", communicator "fsdp:gradients"
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.program.boundary import BOUNDARY_OPS, Kind
from passes.program.shift import SHIFTS
from passes.program.torch_private import OpOverload, c10d

GRADIENTS = "gradients"  # whose a communicator is, where an axis has one for them and one for the rest
# of boundary operators, of the functional collectives that they become, and of the steps of a ring
KINDS: dict[OpOverload, Kind] = {
    **{op: record.kind for op, record in BOUNDARY_OPS.items() if record.kind},
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.all_gather_into_tensor_coalesced.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.reduce_scatter_tensor_coalesced.default: "reduce_scatter",
    c10d.all_reduce.default: "all_reduce",
    c10d.all_reduce_coalesced.default: "all_reduce",
    c10d.all_to_all_single.default: "all_to_all",
    **dict.fromkeys(SHIFTS, "shift"),  # by hops as if every step were needed
}


def bind(node: fx.Node) -> dict[str, Any]:
    """The operator's arguments by name, those left at their defaults aside."""
    names = (argument.name for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def kind_of(node: fx.Node) -> Kind | None:
    """What kind of collective an operator is, or None where nothing travels."""
    return KINDS.get(node.target)  # type: ignore[arg-type]


def communicator_of(node: fx.Node) -> str | None:
    """What an operator names to communicate, or None: the mesh axis, or with several on it "axis:gradients"."""
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
