"""A module built without memory for its parameters: sizes and buffers are real, weights are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compiler_trainer.widths import dtypes_in

M = TypeVar("M", bound=nn.Module)
DRAWS = {
    Tensor.normal_,
    Tensor.uniform_,
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.trunc_normal_,
    nn.init.xavier_normal_,
    nn.init.xavier_uniform_,
    nn.init.kaiming_normal_,
    nn.init.kaiming_uniform_,
}


class EmptyOnMeta(TorchFunctionMode):
    """A mode in which `torch.empty`, with which modules make their weights, uses the meta device.

    Results of other functions are real. Random fills of meta tensors are skipped: PyTorch would import its compiler for
    them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = kwargs["tensor"] if "tensor" in kwargs else args[0] if args else None
        if isinstance(tensor, Tensor) and tensor.is_meta and func in DRAWS:
            return tensor
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def fill(module: nn.Module, values: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """Put values, by name, in place of a skeleton's empty parameters and in its buffers; tied ones stay tied."""
    first = {name: parameter for name, parameter in module.named_parameters()}
    real: dict[int, nn.Parameter] = {}
    for name, value in values:
        if name in first:
            real[id(first[name])] = nn.Parameter(value, first[name].requires_grad)
        else:
            module.get_buffer(name).copy_(value)
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(owner, name, real[id(parameter)])
    return module


def skeleton(build: Callable[[], M], dtype: torch.dtype | None = None) -> M:
    """Return the result of `build`, with its parameters on the meta device, as a model of `dtype` has them.

    Tied parameters stay tied. Buffers keep the values they are computed with; if that takes a `torch.empty`, the module
    is also built in memory.
    """
    with EmptyOnMeta():
        module = build()
    if any(buffer.is_meta for buffer in module.buffers()):  # filled after `torch.empty`
        for owner, real in zip(module.modules(), build().modules(), strict=True):
            for name, buffer in real.named_buffers(recurse=False):
                setattr(owner, name, buffer)
    parameters: dict[int, nn.Parameter] = {}
    dtype_of = dtypes_in(module, dtype)
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in parameters:
                kind = dtype_of(f"{path}.{name}", parameter)
                empty = torch.empty_strided(parameter.shape, parameter.stride(), device="meta", dtype=kind)
                parameters[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            setattr(owner, name, parameters[id(parameter)])
    return module
