"""CUDA kernels that count in 32 bits, and the values of a program that are too large for them.

    %attend_1 (model.py:41), backward: k reaches over 2,684,334,207 elements; FlexAttention counts to 2,147,483,647 ...

Shapes are known before a step runs, so a program with such a value is refused, by name. Most kernels need no entry.
Inductor's kernels count in 64 bits if a buffer or their own loops have more than 2^31 - 1 elements
(`tests/passes/lower/test_offsets.py` reads the generated code), flat bodies are no longer than that
(`passes/lower/segment.py`), and CUTLASS computes addresses in 64 bits. `docs/internals/cuda.md` has the list, with the
source of each entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.bodies import flatten
from passes.ir.operators import is_view, name_of
from passes.ops.attend import attend, attend_backward
from passes.ops.routed import GROUPED_MATMULS
from passes.torch_private import OpOverload

aten = torch.ops.aten
MOST = 2**31 - 1  # of a signed word
MOST_UNSIGNED = 2**32 - 1


class Count(NamedTuple):
    """A number that a kernel counts up to, with its description."""

    number: int
    description: str


class Narrow(NamedTuple):
    """Kernels that count up to `limit`, in all PyTorch versions so far.

    `counts` yields the numbers of a call. `option` is the first one to change, `fix` says how.
    """

    kernel: str
    operators: frozenset[OpOverload]
    counts: Callable[[fx.Node], Iterator[Count]]
    limit: int
    link: str
    option: str
    fix: str


# ---- counts of calls --------------------------------------------------------------------------------


def flash_backward(node: fx.Node) -> Iterator[Count]:
    """Yield the elements of FlashAttention's accumulator of query gradients, rounded up as the kernel allocates it."""
    batch, heads, queries, width = ir.example(node.args[1]).shape  # type: ignore[arg-type]
    rows, columns = round_up(queries, 128), round_up(width, 32) if width <= 192 else 256
    shape = f"{batch:,} samples x {heads:,} heads x {rows:,} queries x {columns:,}"
    yield Count(batch * heads * rows * columns, f"accumulates query gradients of {shape} elements")


def planes(node: fx.Node) -> Iterator[Count]:
    """Yield the extent of each operand of attention within one head of one sample, in elements."""
    names = ("q", "k", "v") if node.target is attend else ("gradient", "q", "k", "v")
    for name, operand in zip(names, node.args):
        value = ir.example(operand)  # type: ignore[arg-type]
        rows, stride = value.shape[2], value.stride(2)
        yield Count(reach(value, 2), f"{name} has {rows:,} rows, {stride:,} elements apart,")


def bias(node: fx.Node) -> Iterator[Count]:
    """Yield the extent of the mask of attention within one head of one sample, in elements."""
    mask = node.kwargs.get("attn_mask", node.args[3] if name_of(node).endswith("efficient_attention") else None)
    if isinstance(mask, fx.Node):
        rows, columns = ir.example(mask).shape[-2:]
        yield Count(reach(ir.example(mask), -2), f"a mask of {rows:,} x {columns:,}")


def rows(node: fx.Node) -> Iterator[Count]:
    """Yield the number of rows that are sorted by expert."""
    count = ir.example(node.args[0]).shape[0]  # type: ignore[arg-type]
    yield Count(count, "rows of tokens by expert:")


def sorted_entries(node: fx.Node) -> Iterator[Count]:
    """Yield the length of the dim that is sorted."""
    value = ir.example(node.args[0])  # type: ignore[arg-type]
    yield Count(max(value.shape, default=1), "a sorted dim of a tensor:")


def dims(node: fx.Node) -> Iterator[Count]:
    """Yield the longest dim of the operands of a matmul."""
    longest = max(max(ir.example(operand).shape, default=1) for operand in node.all_input_nodes)
    yield Count(longest, "a dim of a matmul:")


def look_ups(node: fx.Node) -> Iterator[Count]:
    """Yield the elements of the largest operand or result of a call with int32 indices."""
    values = [ir.example(tensor) for tensor in (node, *node.all_input_nodes)]
    if any(value.dtype == torch.int32 for value in values[1:]):
        yield Count(max(value.numel() for value in values), "int32 indices, of a tensor with as many elements as")


def numbers(node: fx.Node) -> Iterator[Count]:
    """Yield the largest integer that is computed only from a range of numbers and constants, in a smaller kernel."""
    if ir.is_tensor(node) and ir.example(node).numel() <= MOST and (bounds := bounds_of(node, {})):
        yield Count(max(abs(end) for end in bounds), "an integer made of `torch.arange` and constants:")


def reach(value: Tensor, first: int) -> int:
    """Return the offset of the last element from the first one, along the dims from `first` on."""
    return sum((size - 1) * stride for size, stride in zip(value.shape[first:], value.stride()[first:]))


def round_up(size: int, step: int) -> int:
    """Return a size rounded up to a multiple."""
    return -(-size // step) * step


# ---- integers that Inductor folds into index arithmetic ---------------------------------------------


Bounds = tuple[int, int]  # least and greatest
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
}
SAME = frozenset({"clone", "expand", "_to_copy", "convert_element_type", "contiguous"})


def bounds_of(operand: Any, cache: dict[fx.Node, Bounds | None]) -> Bounds | None:
    """Return the bounds of an integer made of `arange`, constants, sums, differences and products; None for others.

    Inductor folds these into index arithmetic, which has 32 bits in a small kernel, whatever their dtype. `cache` holds
    the bounds of operands.
    """
    if isinstance(operand, int) and not isinstance(operand, bool):
        return operand, operand
    if not isinstance(operand, fx.Node) or not ir.is_tensor(operand) or ir.example(operand).dtype != torch.int64:
        return None
    if operand not in cache:
        cache[operand] = bounds_of_call(operand, cache)
    return cache[operand]


def bounds_of_call(node: fx.Node, cache: dict[fx.Node, Bounds | None]) -> Bounds | None:
    """Return the bounds of the result of an operator."""
    name = name_of(node)
    if name == "arange":
        ends = node.args if len(node.args) > 1 else (0, *node.args)
        span = range(*ends) if all(isinstance(end, int) for end in ends) else None  # type: ignore[arg-type]
        return (min(span[0], span[-1]), max(span[0], span[-1])) if span else None
    if name in ARITHMETIC and len(node.args) == 2 and not node.kwargs:
        first, second = (bounds_of(operand, cache) for operand in node.args)
        if first is None or second is None:
            return None
        corners = [ARITHMETIC[name](x, y) for x in first for y in second]
        return min(corners), max(corners)
    return bounds_of(node.args[0], cache) if name in SAME or is_view(node) else None


# ---- the table --------------------------------------------------------------------------------------


FLASH_BACKWARD = frozenset(
    {
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,  # in a dry run, which traces on the CPU
    }
)
MASKED = frozenset(
    {
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
SORTS = frozenset({aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable})
MATMULS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})
INTEGERS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.add.Scalar, aten.mul.Scalar})
LOOK_UPS = frozenset(
    {
        aten.embedding.default,
        aten.embedding_dense_backward.default,
        aten.index.Tensor,
        aten.index_put.default,
        aten.index_select.default,
        aten._unsafe_index.Tensor,
        aten._unsafe_index_put.default,
    }
)
FEWER = "raise train.microbatches"

NARROW = (
    Narrow(
        "FlashAttention's backward",
        FLASH_BACKWARD,
        flash_backward,
        MOST + 1,  # a count of exactly 2^31 is fine: it is one past the last element's index
        "https://github.com/Dao-AILab/flash-attention/pull/2260",
        "train.microbatches",
        f"{FEWER}, or split heads by mesh.tp or queries by mesh.cp",
    ),
    Narrow(
        "FlexAttention",
        frozenset({attend, attend_backward}),
        planes,
        MOST,
        "https://github.com/pytorch/pytorch/issues/190857",
        "mesh.cp",
        "split the sequence by mesh.cp or heads by mesh.tp, or lower train.seq_len",
    ),
    Narrow(
        "memory-efficient attention",
        MASKED,
        bias,
        MOST_UNSIGNED,
        "https://github.com/pytorch/pytorch/issues/187227",
        "mesh.cp",
        "split the sequence by mesh.cp, or give the mask as bounds (model.attention=documents)",
    ),
    Narrow(
        "the grouped matmul, whose offsets are int32,",
        frozenset(GROUPED_MATMULS),
        rows,
        MOST,
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html",
        "train.microbatches",
        f"{FEWER}, or divide experts by mesh.ep",
    ),
    Narrow(
        "PyTorch's sort",
        SORTS,
        sorted_entries,
        MOST,
        "https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/Sort.cpp",
        "train.microbatches",
        FEWER,
    ),
    Narrow(
        "cuBLAS",
        MATMULS,
        dims,
        MOST,
        "https://docs.nvidia.com/cuda/cublas/#bit-integer-interface",
        "train.microbatches",
        f"{FEWER}, or split the dim by mesh.tp",
    ),
    Narrow(
        "a kernel that Inductor generates, for numbers that it takes for indices,",
        INTEGERS,
        numbers,
        MOST,
        "https://github.com/pytorch/pytorch/issues/175966",
        "model",
        "write `torch.arange(...) & 0xFFFFFFFF` before the arithmetic, which keeps it in 64 bits",
    ),
    Narrow(
        "a kernel that Inductor generates, which multiplies indices as they are,",
        LOOK_UPS,
        look_ups,
        MOST,
        "https://github.com/pytorch/torchtitan/issues/2430",
        "model",
        "make the indices int64, as by `.long()`",
    ),
)


class Overflow(NamedTuple):
    """A call that counts beyond its kernel's limit, with the count."""

    node: fx.Node
    narrow: Narrow
    reached: Count

    def __str__(self) -> str:
        phase = "no phase" if ir.has_no_phase(self.node) else ir.phase(self.node)
        place = ir.source(self.node) or ir.parameter(self.node) or "no source line"
        limit = f"{self.narrow.kernel} counts to {self.narrow.limit:,} in 32 bits ({self.narrow.link})"
        return f"%{self.node.name} ({place}), {phase}: {self.reached.description} {self.reached.number:,}; {limit}"


def overflows(program: ir.Program) -> list[Overflow]:
    """Return the calls of a program, in order, that count beyond the limits of their CUDA kernels."""
    calls = []
    for node in flatten(program).graph.nodes:
        for narrow in NARROW_BY_OPERATOR.get(node.target, ()):
            if has_sizes(node):
                beyond = (count for count in narrow.counts(node) if count.number > narrow.limit)
                calls += [Overflow(node, narrow, count) for count in beyond][:1]
    return calls


def has_sizes(node: fx.Node) -> bool:
    """Return True if the sizes of a call's tensors are known and do not depend on data."""
    tensors = (ir.example(tensor) for tensor in (node, *node.all_input_nodes) if ir.is_tensor(tensor))
    return all(isinstance(size, int) for value in tensors for size in value.shape)


NARROW_BY_OPERATOR: dict[Any, list[Narrow]] = {}
for _narrow in NARROW:
    for _operator in _narrow.operators:
        NARROW_BY_OPERATOR.setdefault(_operator, []).append(_narrow)
