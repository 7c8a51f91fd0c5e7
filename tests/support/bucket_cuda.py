"""Gradients of a norm in a bucket, as Inductor writes them for CUDA, without a GPU: the elements that kernels store.

A program that takes the built `trace_cuda.cpp` and a list of pairs as JSON, of a shape and of Inductor's options, with
TRITON_INTERPRET=1 in the environment. It compiles the body in each shape for an absent H100, runs the generated code on
the CPU, with every kernel in Triton's interpreter and memory filled with NaN, and prints JSON:

    [{"fused": true, "unwritten": [0, 2048], "error": 0.0}, ...]

`fused` is true if a kernel reduces in both orders, `unwritten` counts the elements of each result that no kernel has
stored, `error` is the largest difference from eager PyTorch among the others.
"""

from __future__ import annotations

import ctypes
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])

import json
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from fake_cuda import fake_h100
from flex_cuda import ON_CPU, Interpreted
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from passes.torch_private import compile_inner, inductor_decompositions

FUSED = "Call mix order reduction kernel"  # a comment in the generated code


def norm_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of a norm's input, reduced along rows, and a bucket of two gradients reduced by column."""
    along_rows = (gradient * weight * x).sum(1, keepdim=True)
    return gradient * weight - x * along_rows, torch.cat([(gradient * x).sum(0), gradient.sum(0)])


def operands(rows: int, columns: int) -> list[Tensor]:
    """Return the operands of the body: small whole numbers, so that sums in any order are the same."""
    random = torch.Generator().manual_seed(0)
    shapes = (rows, columns), (rows, columns), (columns,)
    return [torch.randint(-3, 4, shape, generator=random).float() for shape in shapes]


def generated(shape: tuple[int, int], options: Mapping[str, Any]) -> str:
    """Return Inductor's code of the body for an H100."""
    with FakeTensorMode() as mode, torch.no_grad():
        values = [torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in operands(*shape)]
        module = make_fx(norm_backward, inductor_decompositions())(*values)
    with torch.no_grad():
        return compile_inner(module, values, mode, options).source_code


def filled_with_nan(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate memory filled with NaN, to detect elements that nothing stores."""
    return torch.empty_strided(shape, stride, dtype=dtype).fill_(torch.nan)


def run(shape: tuple[int, int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a compilation with these options."""
    wanted = norm_backward(*operands(*shape))
    later = patch.object(AsyncCompile, "triton", lambda self, name, source, **_: Interpreted(name, source))
    with later, fake_h100():
        code = generated(shape, options)
        fused = FUSED in code
        for there, here in ON_CPU.items():
            code = code.replace(there, here)
        module = PyCodeCache.load(code)
        module.empty_strided_cuda = filled_with_nan
        results = module.call(operands(*shape))
    unwritten = [int(result.isnan().sum()) for result in results]
    error = max(float((x - y).abs().nan_to_num(0.0).max()) for x, y in zip(results, wanted, strict=True))
    return {"fused": fused, "unwritten": unwritten, "error": error}


if __name__ == "__main__":
    triton_helpers.set_driver_to_gpu = lambda: None
    print(json.dumps([run(*case) for case in json.loads(sys.argv[2])]))
