"""Kernels that Inductor generates for tensors of more than 2^31 - 1 elements: in how many bits they count, without a GPU.

A program, on the built `trace_cuda.cpp` and sizes by the names of `BODIES` as JSON. It compiles each body for an H100 that
is not there, runs the generated code on meta tensors, and prints for each body a list of its kernels as JSON:

    [["triton_poi_fused_0", true, 2348810240], ...]      name, whether it counts in 64 bits, elements of its largest tensor

With TRITON_INTERPRET=1 in the environment it runs `drawn` instead, in Triton's interpreter, for the JSON
[shape, ranks, most], and prints how many random numbers differ from those of eager PyTorch.
"""

from __future__ import annotations

import ctypes
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])

import json
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from fake_cuda import fake_h100
from flex_cuda import ON_CPU, Interpreted
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec
from passes.ops import routed
from passes.sharding import random as draws
from passes.sharding.random import global_index, uniform_at
from passes.torch_private import compile_inner, inductor_decompositions

IN_64_BITS = "tl.program_id(0).to(tl.int64)"
Operands = list[tuple[tuple[int, ...], torch.dtype]]
BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


# ---- bodies, of a number of rows --------------------------------------------------------------------


def embedding(rows: int) -> tuple[Callable[..., Any], Operands]:
    """Look up 4,096 tokens in a table of so many rows, and add up the table's gradient."""

    def body(table: Tensor, tokens: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows_read = torch.ops.aten.embedding(table, tokens)
        return rows_read, torch.ops.aten.embedding_dense_backward(gradient, tokens, rows, -1, False)

    return body, [((rows, 8192), F32), ((4096,), I64), ((4096, 8192), F32)]


def cross_entropy(rows: int) -> tuple[Callable[..., Any], Operands]:
    """Compute the loss of so many tokens of 131,072 classes, and the gradient of the logits."""

    def body(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        lse = logits.float().logsumexp(1, keepdim=True)
        loss = F.nll_loss(logits.float() - lse, labels, reduction="sum")
        gradient = (logits.float() - lse).exp() - F.one_hot(labels, logits.shape[1])
        return loss, gradient.to(logits.dtype)

    return body, [((rows, 131072), BF16), ((rows,), I64)]


def experts(rows: int) -> tuple[Callable[..., Any], Operands]:
    """Sort so many slots of 4,096 features by expert, and put them back."""

    def body(x: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        chosen = routed._rows(x, order, 2)
        return chosen, routed._unorder(chosen * 2, order)

    return body, [((rows // 2, 4096), BF16), ((1, rows), I64)]


def update(rows: int) -> tuple[Callable[..., Any], Operands]:
    """Step a weight of so many rows of 8,192, and add up its squares."""

    def body(weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return weight - 0.1 * gradient, gradient.square().sum()

    return body, [((rows, 8192), F32), ((rows, 8192), F32)]


def bucket(rows: int) -> tuple[Callable[..., Any], Operands]:
    """Concatenate two gradients of so many rows of 8,192 together."""
    return lambda x, y: (torch.cat([(2 * x).flatten(), (2 * y).flatten()]),), [((rows // 2, 8192), BF16)] * 2


BODIES = {f.__name__: f for f in (embedding, cross_entropy, experts, update, bucket)}


# ---- their kernels ----------------------------------------------------------------------------------


class Recorded:
    """A kernel that is not run: it notes the elements of the largest tensor that it is given."""

    def __init__(self, name: str, source: str, launches: list[tuple[str, bool, int]]):
        self.name, self.is_wide, self.launches = name, IN_64_BITS in source, launches

    def run(self, *args: Any, stream: int) -> None:
        """Note a launch."""
        sizes = [x.untyped_storage().nbytes() // x.itemsize for x in args if isinstance(x, Tensor)]
        self.launches.append((self.name, self.is_wide, max(sizes)))


def compiled(body: Callable[..., Any], operands: Operands) -> str:
    """Return Inductor's code of a body for an H100."""
    with FakeTensorMode() as mode, torch.no_grad():
        values = [torch.empty(shape, dtype=dtype, device="cuda:0") for shape, dtype in operands]
        module = make_fx(body, inductor_decompositions())(*values)
    with torch.no_grad():
        return compile_inner(module, values, mode, {}).source_code


def loaded(code: str) -> Any:
    """Return the module of generated code, with its calls of CUDA replaced."""
    for there, here in ON_CPU.items():
        code = code.replace(there, here)
    return PyCodeCache.load(code)


def kernels(body: Callable[..., Any], operands: Operands) -> list[tuple[str, bool, int]]:
    """Return the kernels of a body, in order."""
    launches: list[tuple[str, bool, int]] = []
    later = patch.object(AsyncCompile, "triton", lambda self, name, source, **_: Recorded(name, source, launches))
    with later, fake_h100():
        module = loaded(compiled(body, operands))
        module.empty_strided_cuda = lambda *layout, dtype=None: torch.empty_strided(
            *layout[:2], dtype=dtype or layout[2], device="meta"
        )
        module.call([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in operands])
    return launches


# ---- random numbers ---------------------------------------------------------------------------------


def drawn(shape: Sequence[int], ranks: int, most: int) -> int:
    """Count the numbers drawn for a shard that the compiled body gets wrong; `most` is the greatest index taken as it is."""
    mesh, spec = Mesh.of({"tp": ranks}), Spec(tuple((Factor(n, ("tp",) * (k == 1)),) for k, n in enumerate(shape)))

    def body(seed: Tensor, place: Tensor) -> tuple[Tensor]:
        return (uniform_at(global_index(spec, mesh, {"tp": place}, seed.device), seed, 3),)

    operands = [torch.tensor(11), torch.tensor(ranks - 1)]
    later = patch.object(AsyncCompile, "triton", lambda self, name, source, **_: Interpreted(name, source))
    with later, fake_h100(), patch.object(draws, "MOST", most):
        (numbers,) = loaded(compiled(body, [((), I64), ((), I64)])).call([x.clone() for x in operands])
    return int((numbers != body(*operands)[0]).sum())


def main(sizes: Any) -> Any:
    """Return what was asked for."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        triton_helpers.set_driver_to_gpu = lambda: None
        return drawn(*sizes)
    return {name: kernels(*BODIES[name](rows)) for name, rows in sizes.items()}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[2]))))
