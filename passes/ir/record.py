"""The record of a node: typed fields under one key of `node.meta`, which no other file of ours reads.

    update(node, phase="backward", recomputed=True)      record(node).phase == "backward"

Most readers go through `passes/ir/ir.py`. Records are frozen and shared: a copied node has the record of its
original. PyTorch's tools have other keys of `node.meta`: `from_torch` and `to_torch` in `passes/torch_private.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

from torch import fx

from passes.ir.layer import Layer, Role
from passes.ir.spec import Spec
from passes.torch_private import from_torch

_KEY = "record"


class Unset(Enum):
    """The value of a field that no pass has set yet, if None means something else."""

    UNSET = "unset"


UNSET = Unset.UNSET


@dataclass(frozen=True, slots=True)
class Origin:
    """The code of the model that a node comes from: its `line`, `model.py:41`, and the paths of the called modules.

    The outermost module comes first. A node of the loss, outside of the model, has none.
    """

    line: str = ""
    modules: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The path of the innermost module, `layers.3.attention`; empty in the model itself and outside of it."""
        return self.modules[-1] if self.modules else ""


class BodyNode(NamedTuple):
    """A node that the call of a body replaces: its name and its record."""

    name: str
    record: NodeRecord


@dataclass(frozen=True, slots=True, eq=False)
class NodeRecord:
    """The fields of a node. `differences` compares two records: fake tensors do not compare by `==`.

    value        fake tensor (or tuple of them, or number) that the node computes: shape, dtype, device
    spec         placement, None if it is not known
    stands_for   name of the node of the global program whose value this local node holds, as placed
    phase        one of `PHASES`; of a call_function only
    layer        layer of an operator, of an update that of the parameter; None outside of layers
    role         role of an operator with regard to layers, from pass `overlap` on
    recomputed   True if the backward computes a value of the forward again
    checkpoint   region that the model's author marked for recomputation (`torch.utils.checkpoint`)
    parameter    parameter whose update the node is part of
    stage        pipeline stage whose ranks compute the node; None if it is computed wherever it is read
    microbatch   number of the microbatch that the node computes, if a program has several
    origin       code of the model that the node comes from
    body_nodes   nodes that the call of a body replaces, in the body's order
    """

    value: Any = None
    spec: Spec | None = None
    stands_for: str = ""
    phase: str = ""
    layer: Layer | None | Unset = UNSET
    role: Role | None = None
    recomputed: bool = False
    checkpoint: str = ""
    parameter: str = ""
    stage: int | None = None
    microbatch: int | None = None
    origin: Origin = Origin()
    body_nodes: tuple[BodyNode, ...] = ()


FIELDS = tuple(field.name for field in fields(NodeRecord))
EMPTY = NodeRecord()
_values = attrgetter(*FIELDS)


def record(node: fx.Node) -> NodeRecord:
    """Return the record of a node, an empty one if it has none."""
    return node.meta.get(_KEY, EMPTY)


def set_record(node: fx.Node, new_record: NodeRecord) -> None:
    """Replace a node's metadata, PyTorch's keys included, by a record."""
    node.meta.clear()  # in place: setting any attribute of a node moves it in the graph's table of nodes by operator
    node.meta[_KEY] = new_record


def update(node: fx.Node, **changes: Any) -> None:
    """Set fields of a node's record."""
    node.meta[_KEY] = changed(record(node), changes)


def copy_origin(new: fx.Node, old: fx.Node) -> None:
    """Let the node `new` come from the same code, phase, layer, parameter, stage and microbatch as `old`.

    The fields that describe the new node's own value are not copied: value, spec, stands_for, role and body_nodes.
    """
    current = record(new)
    value_fields = {"value": current.value, "spec": current.spec, "stands_for": current.stands_for}
    new.meta[_KEY] = changed(record(old), value_fields | {"role": current.role, "body_nodes": current.body_nodes})


def changed(old: NodeRecord, changes: dict[str, Any]) -> NodeRecord:
    """Return a record with some fields changed, in half the time of `dataclasses.replace`: passes change thousands."""
    return NodeRecord(**dict(zip(FIELDS, _values(old))) | changes)


def differences(a: NodeRecord, b: NodeRecord, same_value: Callable[[Any, Any], bool]) -> list[str]:
    """Return the names of the fields in which two records differ; `same_value` compares values."""
    if a is b:
        return []
    names = [] if same_value(a.value, b.value) else ["value"]
    names += [name for name in FIELDS if name not in ("value", "body_nodes") and getattr(a, name) != getattr(b, name)]
    pairs = list(zip(a.body_nodes, b.body_nodes))
    same_names = [x.name for x in a.body_nodes] == [y.name for y in b.body_nodes]
    same_bodies = same_names and not any(differences(x.record, y.record, same_value) for x, y in pairs)
    return names if same_bodies else [*names, "body_nodes"]


# ---- exchange with PyTorch's own tools -----------------------------------------------------------------


def read_values(graph: fx.Graph) -> None:
    """Give each node of a graph that `make_fx` traced a record with its value; PyTorch's keys stay for Inductor."""
    for node in graph.nodes:
        update(node, value=from_torch(node).value)
