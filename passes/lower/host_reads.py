"""Find nodes that a CUDA graph cannot record, because they read the host or keep it busy.

    %item (model.py:41), forward: reads a value on the host: ...; use torch.where
    %mul (norm), optimizer: uses cpu and cuda: ...

A replay repeats the same kernels on the same addresses without the host. So a recorded program may not read a value
into Python, have a shape that depends on one, or copy from or to the host. An operator of another library may do so
undetected: CUDA then refuses the recording itself, and names no node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from passes.context.operators import kernel_of
from passes.ir import ir
from passes.ir.bodies import flatten
from passes.ir.operators import name_of
from passes.ops.host import COPIES
from passes.ops.routed import GROUPED_MATMULS, has_kernel
from passes.ops.shift import shift_by
from passes.torch_private import OpOverload

aten = torch.ops.aten

MASKED = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default})
ASSERTS = frozenset({aten._assert_async.default, aten._assert_async.msg, aten._assert_scalar.default})
# operators that read a status or a result on the host without the tag for it
UNTAGGED = frozenset(
    {"is_nonzero", "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_lstsq", "histc"}
)
STALE = "a replay would reuse the first one"


class Break(NamedTuple):
    """A node that no CUDA graph can record, with the reason and the fix."""

    node: fx.Node
    why: str

    def __str__(self) -> str:
        phase = "no phase" if ir.has_no_phase(self.node) else ir.phase(self.node)
        place = ir.source(self.node) or ir.parameter(self.node) or "no source line"
        return f"%{self.node.name} ({place}), {phase}: {self.why}"


def find_breaks(program: ir.Program, compiled: bool = True) -> list[Break]:
    """Return the nodes that a CUDA graph cannot record, in order, if the program runs as it is or `compiled`."""
    nodes = flatten(program).graph.nodes
    return [Break(node, reason) for node in nodes if node.op != "output" and (reason := why_not(node, compiled))]


def why_not(node: fx.Node, compiled: bool = True) -> str:
    """Return the reason why a CUDA graph cannot record a node, as it is or compiled; empty if it can."""
    return next(filter(None, reasons(node, compiled)), "")


def reasons(node: fx.Node, compiled: bool) -> Iterator[str]:
    """Yield each possible reason why a node cannot be recorded, empty if it does not apply."""
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    if (kernel := kernel_of(node)) and not compiled:
        yield kernel.on_host
    if node.target is shift_by:
        yield "sends as far as the batch says: a replay would repeat the first; set passes.context.skip_steps=false"
    if node.target in GROUPED_MATMULS and not has_kernel(*(ir.example(node.args[i]) for i in (0, 2))):  # type: ignore
        fix = "set passes.cast.param_dtype=bfloat16, on Hopper or Blackwell (sm90, sm100)"
        yield f"reads on the host the ends of each expert's rows: only bfloat16 has a kernel; {fix}"
    if node.target in COPIES:
        yield "copies from or to the host, which a replay would not wait for; use another passes.remat.policy"
    if node.target in ASSERTS:
        yield "tests a value: a replay cannot report a failure; remove the test"
    if torch.Tag.data_dependent_output in tags or name_of(node) in UNTAGGED:
        yield f"reads a value on the host: {STALE}; keep it a tensor, for example with torch.where"
    if torch.Tag.cudagraph_unsafe in tags:
        yield "is marked by its library as unsafe in CUDA graphs; use another operator"
    if node.target in MASKED and any(map(is_mask, node.args[1])):  # type: ignore[arg-type]
        yield "counts the entries of a mask on the host; use torch.where"
    is_dynamic = torch.Tag.dynamic_output_shape in tags and node.target not in MASKED  # MASKED: checked above
    if is_dynamic or any(map(depends_on_data, values_of(node))):
        yield f"has a shape or a number that depends on data: {STALE}; give it a fixed size"
    devices = {v.device.type for n in (node, *node.all_input_nodes) for v in values_of(n) if isinstance(v, Tensor)}
    if len(devices) > 1:
        names = " and ".join(sorted(devices))
        yield f"uses {names}: a replay does not synchronize with the host; put all its tensors on the device"


def is_mask(index: Any) -> bool:
    """Return True if an index is a mask over entries."""
    return ir.is_tensor(index) and ir.example(index).dtype in (torch.bool, torch.uint8)


def depends_on_data(value: Any) -> bool:
    """Return True if a value is a number that depends on data, or a tensor with such a size."""
    numbers = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool) for n in numbers)


def values_of(node: fx.Node) -> Iterable[Any]:
    """Return the values that a node computes, items of a tuple one by one."""
    value = ir.value(node)
    return value if isinstance(value, (tuple, list)) else (value,)
