"""The dtypes of a model's parameters: transformers keeps some in float32 in a model of 16 bits, such as routers.

Their names are in its models. Checked with transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

DtypeOf = Callable[[str, Tensor], torch.dtype]


def dtypes_in(model: nn.Module, dtype: torch.dtype | None) -> DtypeOf:
    """Return a function from a parameter's name and value to its dtype in a model of `dtype` (None: its own).

    Integers keep theirs. A weight that peft wraps has the dtype that it would have alone.
    """
    readers = (getattr(part, "_get_dtype_plan", None) for part in model.modules())
    plans = [reader(dtype) for reader in readers if callable(reader)]
    patterns = {pattern.replace("*", ".*") for plan in plans for pattern in plan}

    def dtype_of(name: str, value: Tensor) -> torch.dtype:
        if dtype is None or not value.is_floating_point():
            return value.dtype
        in_files = name.replace(".base_layer", "")
        is_wide = ".lora_" not in name and any(re.search(pattern, in_files) for pattern in patterns)
        return torch.float32 if is_wide else dtype

    return dtype_of


def cast_parameters(model: nn.Module, dtype: torch.dtype | None) -> DtypeOf:
    """Give a model's parameters their dtypes in a model of `dtype`, in place, and return `dtypes_in`; leave buffers."""
    dtype_of = dtypes_in(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype_of(name, parameter))
    return dtype_of
