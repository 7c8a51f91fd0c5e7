"""Every use of PyTorch's private API, checked on torch 2.13.0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode", "c10d", "decomposition", "setup_stacktrace_preservation_hooks"]

c10d = torch.ops._c10d_functional


def decomposition(op: Any) -> Callable | None:
    """One level of an operator's definition in terms of others, or None."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    table = core_aten_decompositions()
    if op in table:
        return table[op]
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return op.decompose
    return None
