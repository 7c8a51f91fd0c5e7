"""Attention by interval as Inductor writes it for CUDA, forward and backward in one graph, without a GPU.

A program that takes the built `trace_cuda.cpp` and cases as JSON. It compiles each case for an absent H100 and prints
the resources of its kernels. With TRITON_INTERPRET=1 in the environment, it runs the compiled graph instead, with every
kernel in Triton's interpreter on the CPU, and prints the difference of the results from the CPU's own kernel.
"""

from __future__ import annotations

import ctypes
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from bounds import bounds_of
from fake_cuda import fake_h100, is_flex
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from passes.context import operators
from passes.ops.attend import attend, attend_backward
from passes.torch_private import compile_inner, inductor_decompositions


class Case(NamedTuple):
    """A form of bounds, heads of queries and of keys, the widths of keys and values, two runs of keys or one."""

    form: str = "documents"
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (16, 16)
    runs: bool = False
    dtype: str = "float32"
    size: int = 300


def values_of(case: Case) -> list[Tensor]:
    """Return queries, keys, values, the gradient, bounds and, if keys lie in two runs, the half that comes first."""
    random = torch.Generator().manual_seed(0)
    (h, g), (e, f) = case.heads, case.widths
    shapes = (h, e), (g, e), (g, f), (h, f)
    dtype = getattr(torch, case.dtype)
    tensors = [torch.randn(2, n, case.size, width, generator=random, dtype=dtype) for n, width in shapes]
    return [*tensors, *bounds_of(case.form, case.size), *([torch.tensor(1)] if case.runs else [])]


def both(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, first: Tensor, last: Tensor, *half: Tensor):
    """Return attention with its log-sum-exp, and its gradients."""
    runs = torch.stack([half[0], 1 - half[0]]) * (k.shape[2] // 2) if half else None  # computed in the graph, as a ring does
    given = (first, last, runs, [], 0.3, "")
    out, lse = attend(q, k, v, *given)
    return out, lse, *attend_backward(gradient, q, k, v, out, lse, *given)


def compiled(case: Case) -> Any:
    """Return Inductor's result for an H100."""
    values = values_of(case)
    with FakeTensorMode() as mode:
        given = [torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in values]
        with torch.no_grad():
            module = make_fx(both, inductor_decompositions() | operators.compiled_for("cuda"))(*given)
    with torch.no_grad():
        return compile_inner(module, given, mode, {})


def emitted(case: Case) -> dict[str, Any]:
    """Return counts of FlexAttention's forward and backward kernels and of all, and the most shared memory."""
    with fake_h100() as kernels:
        compiled(case)
    shared = max(result.kernel.metadata.shared for kernel in kernels for result in kernel.compile_results)
    found = [sum(is_flex(kernel, backward) for kernel in kernels) for backward in (False, True)]
    return {"flex": found, "kernels": len(kernels), "shared": shared}


# ---- in the interpreter -----------------------------------------------------------------------------


class Interpreted:
    """A kernel that Triton's interpreter runs, in its first configuration."""

    def __init__(self, name: str, source: str):
        self.kernel = getattr(PyCodeCache.load(source), name)

    def run(self, *args: Any, stream: int) -> None:
        """Launch the kernel."""
        names, chosen = self.kernel.fn.arg_names, self.kernel.configs[0]
        grids = self.kernel.inductor_meta.get("extra_launcher_args", [])
        given = dict(zip([*names, *grids], [*args[: len(args) - len(grids)], *args[len(args) - len(grids) :]]))
        numbers = {name: value for name, value in given.items() if isinstance(value, int)} | chosen.kwargs
        grid = GridExpr.from_meta(self.kernel.inductor_meta, chosen).eval_slow(numbers)
        constants = {name: value for name, value in chosen.kwargs.items() if name in names}
        self.kernel.fn[grid](*args[: len(args) - len(grids)], **constants)


ON_CPU = {  # of the graph's own code
    "guards._empty_strided_cuda": "guards._empty_strided_cpu",
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = lambda device: 0",
    "with torch.cuda._DeviceGuard(0):": "if True:",
    "torch.cuda.set_device(0)": "pass",
}


def interpreted(case: Case) -> list[float]:
    """Return the largest difference of out, lse and the gradients from the CPU's own kernel in fp64."""
    triton_helpers.set_driver_to_gpu = lambda: None
    values = values_of(case)
    wanted = both(*(x.double() if x.is_floating_point() else x for x in values))
    later = patch.object(AsyncCompile, "triton", lambda self, name, source, **_: Interpreted(name, source))
    with later, fake_h100():
        code = compiled(case).source_code
        for there, here in ON_CPU.items():
            code = code.replace(there, here)
        found = PyCodeCache.load(code).call(values)
    return [farthest(x.double(), y) for x, y in zip(found, wanted, strict=True)]


def farthest(x: Tensor, y: Tensor) -> float:
    """Return the largest difference; infinities have to be equal."""
    return float(torch.where(x == y, 0.0, (x - y).abs()).max())


def main(cases: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the result of each case."""
    ask = interpreted if os.environ.get("TRITON_INTERPRET") == "1" else emitted
    return [ask(Case(**case)) for case in cases]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[2]))))
