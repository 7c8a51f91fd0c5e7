"""A program that is started operator by operator twice, recorded as one CUDA graph, and replayed from then on.

    step 1, 2      run: kernels are loaded and tuned, communicators and workspaces made
    step 3         recorded, and replayed
    step 4 ...     batch and scalars copied to where they were recorded; replayed

A replay repeats the same kernels on the same addresses, and the host takes no part: so a recorded program may read no
value into Python, have no shape that depends on one, and copy nothing from or to the host: `breaks` finds what does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.context.operators import kernel_of
from passes.lower.calls import Executable
from passes.program import ir
from passes.program.bodies import flatten
from passes.program.shift import shift_by
from passes.program.torch_private import OpOverload

aten = torch.ops.aten

WARM_UP = 2  # runs before a program is recorded
FED = ("batch", "layout", "scalar")  # inputs that are new at every run; others are where they were, changed in place
MASKED = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default})
ASSERTS = frozenset({aten._assert_async.default, aten._assert_async.msg, aten._assert_scalar.default})


# ---- what cannot be recorded ------------------------------------------------------------------------


def breaks(program: ir.Program, compiled: bool = True) -> list[str]:
    """What of a program, run as it is or compiled, a CUDA graph cannot record: each node with its line and why."""
    found = ((node, reason) for node in flatten(program).graph.nodes if (reason := why_not(node, compiled)))
    return [f"%{node.name} ({ir.source(node) or 'no source line'}) {reason}" for node, reason in found]


def why_not(node: fx.Node, compiled: bool = True) -> str:
    """Why a CUDA graph cannot record a node, run as it is or compiled, empty if it can."""
    if node.op == "output":
        return ""
    if (kernel := kernel_of(node)) and kernel.on_host and not compiled:
        return kernel.on_host
    if node.target is shift_by:
        return "sends as far as a batch says: a replay would as the first one did; set passes.context.skip_steps=false"
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    if node.target in ASSERTS:
        return "tests a value: nobody would hear of a replay that failed"
    if torch.Tag.data_dependent_output in tags:
        return "reads a value on the host: a replay would go on with the first one"
    if node.target in MASKED:
        mask = any(ir.is_tensor(n) and ir.example(n).dtype in (torch.bool, torch.uint8) for n in indices_of(node))
        return "counts on the host what a mask selects; use torch.where" if mask else ""
    if torch.Tag.dynamic_output_shape in tags or any(map(depends_on_data, values_of(node))):
        return "has a shape or a number that depends on data: a replay would go on with the first one"
    devices = {v.device.type for n in (node, *node.all_input_nodes) for v in values_of(n) if isinstance(v, Tensor)}
    if len(devices) > 1:
        return f"is of {' and '.join(sorted(devices))}: a replay neither waits for the host nor lets it wait"
    return ""


def indices_of(node: fx.Node) -> Iterable[Any]:
    """The indices that an operator of `MASKED` is given."""
    return node.args[1]  # type: ignore[return-value]


def depends_on_data(value: Any) -> bool:
    """Whether a value is a number that only data will tell, or a tensor with such a size."""
    numbers = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool) for n in numbers)


def values_of(node: fx.Node) -> Iterable[Any]:
    """What a node computes, parts of a tuple one by one."""
    value = ir.value(node)
    return value if isinstance(value, (tuple, list)) else (value,)


# ---- recording --------------------------------------------------------------------------------------


class Replayed:
    """A program on CUDA that is recorded when it has been run `WARM_UP` times, and replayed from then on."""

    def __init__(self, run: Executable, inputs: Sequence[ir.Input]):
        self.run, self.runs = run, 0
        self.fed = [i for i, given in enumerate(inputs) if given.kind in FED]
        self.names = [given.name for given in inputs]
        self.stream = torch.cuda.Stream()  # of the runs and the recording: what is made on the first stays in use
        self.graph: torch.cuda.CUDAGraph | None = None
        self.values: list[Tensor] = []  # that were recorded
        self.results: tuple[Tensor, ...] = ()

    def __call__(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The program's results, in memory of their own."""
        self.runs += 1
        if self.runs <= WARM_UP:
            return self.warm_up(values)
        if self.graph is None:
            self.graph = self.record(values)
        self.feed(values)
        self.graph.replay()
        return tuple(result.clone() for result in self.results)  # the next replay writes over these

    def warm_up(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the program on the stream that it will be recorded on."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            results = self.run(values)
        torch.cuda.current_stream().wait_stream(self.stream)
        return results

    def record(self, values: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """Record the program on copies of what is fed; nothing is computed."""
        self.values = [value.clone() if i in self.fed else value for i, value in enumerate(values)]
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events in a thread of its own, which "global" would take for a mistake of ours
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.results = self.run(self.values)
        return graph

    def feed(self, values: Sequence[Tensor]) -> None:
        """Copy what is new; raises RuntimeError if state is no longer where it was recorded."""
        for i, (value, recorded) in enumerate(zip(values, self.values, strict=True)):
            if i in self.fed:
                recorded.copy_(value)
            elif value is not recorded:
                raise RuntimeError(f"{self.names[i]} is another tensor than the CUDA graph has recorded; write into it")
