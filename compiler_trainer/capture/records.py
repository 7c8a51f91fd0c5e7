"""Give captured nodes their records; only this module reads a traceback to find a node's line of the model.

    read_trace       after `torch.export`: val, stack_trace, nn_module_stack and custom become a record
    write_marks      before the graph is traced again: records become marks (`custom`), which tracers copy
    read_marks       after it: a mark becomes the record of the new node

Each function changes the nodes of a graph in place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from types import CodeType

from torch import fx

from passes.ir import ir
from passes.ir.record import UNSET, NodeRecord, Origin
from passes.torch_private import from_torch, to_torch

MARK = "record"
CHECKPOINT = "checkpoint"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARY = re.compile(
    r"/torch/(nn|_|functional|utils|fx)|/site-packages/torch/|/compiler_trainer/capture/(capture|functions|hidden)\.py$"
    r"|/passes/torch_private\.py$"
)


def is_library(file: str) -> bool:
    """Return True for a file of PyTorch, its private API or the capture; generated code has no file."""
    return file.startswith("<") or bool(_LIBRARY.search(file))


def read_trace(module: fx.GraphModule, wrapper: str, loss: CodeType | None) -> None:
    """Give each node of an exported graph its record.

    `torch.export` keeps frames of `forward` only: the innermost frame of a node of the loss is in the file `wrapper`,
    which calls the loss. Such a node gets the first line of the loss function.
    """
    loss_line = line_of(loss.co_filename, loss.co_firstlineno) if loss else ""
    for node in nodes_of(module):
        trace = from_torch(node)
        file, number = innermost(trace.stack_trace)
        line = loss_line if loss_line and file == wrapper else line_of(file, number)
        modules = tuple(path.removeprefix("model").removeprefix(".") for path in trace.modules if path)
        ir.update(node, value=trace.value, origin=Origin(line, modules), checkpoint=trace.marks.get(CHECKPOINT, ""))


def write_marks(module: fx.GraphModule) -> None:
    """Write the values that a retrace reads, and mark each node with its record."""
    for node in nodes_of(module):
        value = {} if ir.value(node) is None else {"val": ir.value(node)}
        to_torch(node, **value, custom={MARK: replace(ir.record(node), value=None)})


def read_marks(module: fx.GraphModule) -> None:
    """Give each node of a retraced graph its record from the marks instead of PyTorch's keys; all are forward."""
    for node in nodes_of(module):
        trace = from_torch(node)
        record = trace.marks.get(MARK, NodeRecord())
        layer = None if record.layer is UNSET else record.layer
        ir.set_record(node, replace(record, value=trace.value, phase="forward", layer=layer))


def nodes_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a graph and of the graphs that its operators call."""
    for part in module.modules():
        yield from part.graph.nodes if isinstance(part, fx.GraphModule) else ()


def line_of(file: str, number: int) -> str:
    """Return a place in the code, `model.py:41`, or an empty string without a file."""
    return f"{file.rsplit('/', 1)[-1]}:{number}" if file else ""


@lru_cache(maxsize=1 << 12)  # equal layers have the same frames
def innermost(stack_trace: str) -> tuple[str, int]:
    """Return file and line of the innermost frame of the model's own code, or of a library if there is none."""
    frames = _FRAME.findall(stack_trace)
    own_frames = [frame for frame in frames if not is_library(frame[0])] or frames
    return (own_frames[-1][0], int(own_frames[-1][1])) if own_frames else ("", 0)
