"""Recompute each node's shape, strides, dtype and storage from the graph's inputs alone.

Each operator runs on fake tensors once per signature, and its answer is cached; answers of PyTorch's and our own
operators are shared by all programs of the process, so a layer like the one before it costs a look-up. Storages are
numbered, which tells views, waits and in-place updates from fresh memory. Recorded values cannot serve here: a rewrite
that replaces a node leaves its users' records as they were.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.printer import format_dtype
from passes.torch_private import c10d

LASTING = frozenset({"aten", "prims", "ct", "_c10d_functional"})  # operators of other namespaces may be redefined
_answers: dict[Any, Any] = {}  # results of operators in these namespaces, by signature


class Layout(NamedTuple):
    """The layout of a tensor in its storage; strides and offset in entries."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage_bytes: int

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """Return the layout of a (fake) tensor."""
        return Layout(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            tensor.untyped_storage().nbytes(),
        )

    def empty(self) -> Tensor:
        """Create a tensor of this layout in a storage of its own."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        if not self.offset and tensor.untyped_storage().nbytes() == self.storage_bytes:
            return tensor
        base = torch.empty(self.storage_bytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        return base.as_strided(self.shape, self.stride, self.offset)

    @property
    def entries(self) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype."""
        return self.shape, self.dtype

    @property
    def size_bytes(self) -> int:
        """The bytes of the entries."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{format_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"


class Value(NamedTuple):
    """A node's tensor: its layout, and the number of the storage that holds it."""

    layout: Layout
    storage: int


@dataclass
class Avals:
    """Each node's value (a Value, several, or a number), and the bytes of each storage, by number."""

    values: dict[fx.Node, Any] = field(default_factory=dict)
    storage_bytes: list[int] = field(default_factory=list)
    storages_by_node: dict[fx.Node, frozenset[int]] = field(default_factory=dict)  # cache of `storages`

    def new(self, layout: Layout) -> Value:
        """Return a value in fresh memory."""
        self.storage_bytes.append(layout.storage_bytes)
        return Value(layout, len(self.storage_bytes) - 1)

    def storages(self, node: fx.Node) -> frozenset[int]:
        """Return the storages that hold the node's tensors."""
        if node not in self.storages_by_node:
            self.storages_by_node[node] = frozenset(value.storage for value in tensors(self.values[node]))
        return self.storages_by_node[node]


class Recorded(dict):
    """The recorded values of nodes, read on demand, with each tensor as if in memory of its own."""

    def __missing__(self, node: fx.Node) -> Any:
        self[node] = map_values(ir.value(node), lambda t: Value(Layout.of(t), -1), Tensor)
        return self[node]


def recorded() -> Avals:
    """Return abstract values of any nodes, taken from their records: enough if only sizes are needed."""
    return Avals(Recorded())


def laid_out(result: Any, recorded: Any) -> Any:
    """Return an operator's result in the recorded strides: some real kernels choose others than their fake ones.

    A later view may need the recorded strides.
    """
    if isinstance(result, (tuple, list)):
        return type(result)(map(laid_out, result, recorded))
    if not isinstance(result, Tensor) or result.stride() == recorded.stride():
        return result
    strides = zip(result.shape, result.stride(), recorded.stride(), strict=True)
    if all(n < 2 or real_stride == recorded_stride for n, real_stride, recorded_stride in strides):
        return result
    return torch.empty_strided(result.shape, recorded.stride(), dtype=result.dtype, device=result.device).copy_(result)


def tensors(value: Any) -> Iterator[Value]:
    """Yield the tensors in a node's value."""
    if isinstance(value, Value):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)


def map_values(tree: Any, fn: Callable[[Any], Any], kind: type) -> Any:
    """Apply `fn` to each leaf of the given kind in a tree of tuples and lists."""
    if isinstance(tree, kind):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        return tuple(map_values(part, fn, kind) for part in tree)
    return tree


def abstract_eval(program: ir.Program, ctx: ir.Context) -> Avals:
    """Recompute every node; raise CompileError, naming the node, if an operator refuses its operands."""
    avals = Avals()
    for node in program.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            value = ir.value(node) if node.op == "placeholder" else getattr(program.module, node.target)
            avals.values[node] = map_values(value, lambda t: avals.new(Layout.of(t)), Tensor)
        elif node.op == "call_function":
            try:
                avals.values[node] = _call(node, avals, ctx)
            except Exception as error:
                raise ir.CompileError("abstract_eval", node, f"{type(error).__name__}: {error}") from error
        elif node.op != "output":
            raise ir.CompileError("abstract_eval", node, f"is a {node.op}; a program has operators only")
    return avals


def _call(node: fx.Node, avals: Avals, ctx: ir.Context) -> Any:
    """Return an operator's value. In a cached answer, storage k >= 0 is operand k's, and a negative one is new."""
    source = avals.values.get(node.args[0]) if node.target is operator.getitem else None  # type: ignore[arg-type]
    if isinstance(source, tuple) and not isinstance(source, Value):
        return source[node.args[1]]  # type: ignore[index]
    operands: list[Value] = []
    key = (node.target, _signature((node.args, node.kwargs), avals, operands))
    answers = ctx.answers if getattr(node.target, "namespace", "") not in LASTING else _answers
    if key not in answers:
        answers[key] = _evaluate(node, avals, ctx)
    fresh: dict[int, int] = {}

    def place(answer: Value) -> Value:
        if answer.storage >= 0:
            return Value(answer.layout, operands[answer.storage].storage)
        if answer.storage not in fresh:
            fresh[answer.storage] = avals.new(answer.layout).storage
        return Value(answer.layout, fresh[answer.storage])

    return map_values(answers[key], place, Value)


def _signature(tree: Any, avals: Avals, operands: list[Value]) -> Any:
    """Return the arguments in hashable form, with 1, 1.0 and True distinct; collect tensor operands in order."""
    if isinstance(tree, fx.Node):
        tree = avals.values[tree]
    if not isinstance(tree, (tuple, list, dict, slice)):  # most are numbers
        return type(tree), tree
    if isinstance(tree, Value):
        operands.append(tree)
        return tree.layout
    if isinstance(tree, (tuple, list)):
        return tuple([_signature(part, avals, operands) for part in tree])
    if isinstance(tree, dict):
        return tuple([(key, _signature(part, avals, operands)) for key, part in tree.items()])
    return _signature(("slice", tree.start, tree.stop, tree.step), avals, operands)


def _evaluate(node: fx.Node, avals: Avals, ctx: ir.Context) -> Any:
    """Run an operator on fake tensors, each in a storage of its own, and find the storages of its results."""
    storages: list[Any] = []

    def make(value: Value) -> Tensor:
        operand = value.layout.empty()
        storages.append(operand.untyped_storage())
        return operand

    with ctx.fake_mode, torch.no_grad():
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: map_values(avals.values[n], make, Value))
        # the fake kernel of a wait returns new memory, the real one the same memory
        result = args[0] if node.target is c10d.wait_tensor.default else node.target(*args, **kwargs)  # type: ignore
    count = len(storages)

    def describe(tensor: Tensor) -> Value:
        storage = tensor.untyped_storage()
        number = next((k for k, s in enumerate(storages) if s is storage), None)
        if number is None:
            storages.append(storage)
            number = len(storages) - 1
        return Value(Layout.of(tensor), number if number < count else count - 1 - number)

    return map_values(result, describe, Tensor)
