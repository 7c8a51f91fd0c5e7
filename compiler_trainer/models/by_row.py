"""Models that see, unmodified: their branches on data are decided once, and each row of a batch has its own images.

The vision-language models of transformers put the features of a batch's images, one after another, at its image tokens
(`masked_scatter`): there are as many features as image tokens. In one graph for all data, shapes are fixed: each row of
a batch has the same number of images, of the same sizes, in the order of its tokens. Rows with fewer images end with
images that no token reads. Inside `ByRow`, therefore

    x.masked_scatter(mask, features)   ->   the k-th image token of a row gets the k-th feature of this row
    x[mask]                            ->   the entries of a row at its image tokens, as many as it has features
    x[mask] = values                   ->   the k-th image token of a row gets the k-th value of this row
    x[order]                           ->   the entries of each row in its own order, for an order that `ordered` made
    if mask.any():                     ->   the branch is taken, which changes nothing where the mask is false

Without missing images, the results are those of transformers. No value is read, and rows stay where they are: neither
data nor context parallelism gathers features. An image token without a feature gets NaN, and so does the loss.

Sizes of images are the same for all data. `Known` follows them through a capture, so that Python can read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from passes.torch_private import FakeTensor, is_real, tree_iter, tree_map_only, without_modes

MOST_KNOWN = 2**16  # entries of a tensor of numbers that is followed


class ByRow(TorchFunctionMode):
    """A mode for a call of a model on `rows` rows of tokens, whose images have the same sizes in every row.

    Models leave out images that are all zeros, as padding. In a capture, none of its `pixels` are padding.
    """

    def __init__(self, rows: int, pixels: Tensor):
        super().__init__()
        self.rows, self.features = rows, 0  # of a row
        self.is_uneven = False  # images have unlike numbers of features
        self.asked: dict[int, Tensor] = {}  # by id, whether masks are true anywhere
        self.known = Known(pixels) if isinstance(pixels, FakeTensor) else None  # eager PyTorch reads values itself
        self.orders: dict[int, tuple[Tensor, Tensor]] = {}  # id of an order of all rows -> (it, that of each row)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BY_ROW and (result := BY_ROW[func](self, *args, **kwargs)) is not NotImplemented:
            return result
        return self.known.call(func, args, kwargs) if self.known else func(*args, **kwargs)

    def scatter(self, x: Tensor, mask: Tensor, source: Tensor) -> Any:
        """Return x [B, T, D] with the next feature of the row, of source [B * K, D], wherever the mask is true."""
        if mask.dim() < x.dim():
            mask = mask.unsqueeze(-1)
        if x.dim() != 3 or not (mask.shape[-1] == 1 or mask.stride(-1) == 0):
            return NotImplemented
        source = source.reshape(self.rows, -1, x.shape[-1])
        self.features = source.shape[1]
        return put(x, mask[..., 0], source)

    def select(self, x: Tensor, index: Any) -> Any:
        """Return the entries of x [B, T, ...] at a row's image tokens, [B * K, ...], and any after the last of them.

        Of images with padding, x [B * I, L, ...], return the entries of each row without padding, [B * I * L, ...], and
        any after the last of them. For an order of rows, return x [B * M, ...] in this order.
        """
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == x.shape and x.dim() == 3:
            return x.flatten()  # of which only the number is asked, which `masked_scatter` does not need
        if (order := self.order_in(index)) is not None:
            place = order.view(*order.shape, *[1] * (x.dim() - 1)).expand(-1, -1, *x.shape[1:])
            return x.unflatten(0, order.shape).gather(1, place).flatten(0, 1)
        mask = mask_in(index)
        if self.features == 0 and self.is_data(mask) and mask.shape == x.shape[:2] and len(mask) % self.rows == 0:
            self.is_uneven = True  # each row has as many places as all its images could have features
            x, mask = x.reshape(self.rows, -1, *x.shape[2:]), mask.reshape(self.rows, -1)
            return picked(x, mask, mask.shape[1])
        return picked(x, mask, self.features) if self.is_of_images(mask) else NotImplemented

    def assign(self, x: Tensor, index: Any, values: Any) -> Any:
        """Write values [B * K, D] into x [B, T, D] at the image tokens."""
        if not self.is_of_images(mask := mask_in(index)) or not isinstance(values, Tensor) or values.dim() != 2:
            return NotImplemented
        return x.copy_(put(x, mask, values.reshape(self.rows, -1, x.shape[-1])))

    def ordered(self, order: Tensor) -> Tensor:
        """Return an order [B, M] of entries within rows as one of the entries of all rows, [B * M], for `x[order]`."""
        start = torch.arange(self.rows, device=order.device).unsqueeze(1) * order.shape[1]
        whole = (order + start).flatten()
        self.orders[id(whole)] = whole, order
        return whole

    def order_in(self, index: Any) -> Tensor | None:
        """Return the order [B, M] of an index `order` or `order, :, ...`; None for others."""
        first, *others = index if isinstance(index, tuple) else (index,)
        is_whole = all(isinstance(part, slice) and part == slice(None) for part in others)
        return self.orders.get(id(first), (None, None))[1] if is_whole else None

    def argsort(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the inverse of an order of rows."""
        if id(x) not in self.orders or args or kwargs:
            return NotImplemented
        return self.ordered(self.orders[id(x)][1].argsort(1))

    def any(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return whether a mask is true anywhere; models ask it to save work, so that a branch on it is taken."""
        anywhere = self.known.call(Tensor.any, (x, *args), kwargs) if self.known else x.any(*args, **kwargs)
        if isinstance(anywhere, Tensor) and self.is_data(x):
            self.asked[id(anywhere)] = anywhere
        return anywhere

    def is_true(self, x: Tensor) -> Any:
        """Return True for the question whether a mask, which is data, is true anywhere."""
        return True if self.known and id(x) in self.asked else NotImplemented

    def item(self, x: Tensor) -> Any:
        """Return the number of features of an image, which is not known if images have unlike numbers."""
        return Unknown() if self.is_uneven and self.is_data(x) else NotImplemented

    def tolist(self, x: Tensor) -> Any:
        """Return the numbers of features of images, which are not known if these are unlike."""
        return [Unknown()] * len(x) if self.is_uneven and self.is_data(x) else NotImplemented

    def split(self, x: Tensor, sizes: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the features of images of unknown numbers as one piece, for a model that joins them again."""
        is_unknown = isinstance(sizes, list) and all(isinstance(size, Unknown) for size in sizes)
        return (x,) if is_unknown else NotImplemented

    def is_data(self, x: Tensor | None) -> bool:
        """Return True for a tensor whose value is data."""
        return x is not None and (self.known is None or self.known.value_of(x) is None)

    def is_of_images(self, mask: Tensor | None) -> bool:
        """Return True for a mask of image tokens: one whose value is data, after features were put in."""
        return self.features > 0 and self.is_data(mask)


class Unknown:
    """The number of features of an image, which depends on the data; no number, so that nothing computes with it."""


def picked(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return the first `count` entries of x [B, T, ...] where mask [B, T] is true, [B * count, ...]; any beyond."""
    number = torch.arange(1, count + 1, device=x.device).expand(len(x), -1).contiguous()
    place = torch.searchsorted(mask.cumsum(1), number).clamp(max=x.shape[1] - 1)
    place = place.view(*place.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, place).flatten(0, 1)


def put(x: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    """Return x [B, T, D] with features [B, K, D], one after another, wherever mask [B, T] is true; NaN beyond K."""
    number = mask.cumsum(1) - 1
    place = number.clamp(0, features.shape[1] - 1).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    rows = features.to(x.dtype).gather(1, place)
    rows = torch.where((number < features.shape[1]).unsqueeze(-1), rows, torch.nan)
    return torch.where(mask.unsqueeze(-1), rows, x)


def mask_in(index: Any) -> Any:
    """Return the mask [B, T] of an index `mask` or `mask, :`; None for others."""
    if isinstance(index, tuple) and len(index) == 2 and index[1] == slice(None):
        index = index[0]
    return index if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() == 2 else None


BY_ROW: dict[Any, Callable[..., Any]] = {
    Tensor.masked_scatter: ByRow.scatter,
    Tensor.__getitem__: ByRow.select,
    Tensor.__setitem__: ByRow.assign,
    torch.argsort: ByRow.argsort,
    torch.split: ByRow.split,
    Tensor.any: ByRow.any,
    Tensor.__bool__: ByRow.is_true,
    Tensor.tolist: ByRow.tolist,
    Tensor.item: ByRow.item,
}


# ---- known values --------------------------------------------------------------------------------------


class Known:
    """Values in a capture that do not depend on data: of tensors made of numbers, and of operators on these alone.

    A number that Python asks for is that of the values. If a result's shape depends on values, it is a real tensor
    instead of a fake one, and a constant where it meets a fake one. Pixels count as ones, to decide which are padding.
    """

    def __init__(self, pixels: Tensor) -> None:
        with without_modes():
            ones = torch.ones((), dtype=pixels.dtype).expand(pixels.shape)
        self.values = {id(pixels): (pixels, ones)}  # id of a fake tensor -> (the tensor, its value)
        self.constants: dict[int, tuple[Tensor, Tensor]] = {}  # id of a real tensor -> (the tensor, its constant)
        self.stale: set[int] = set()  # storages of values into which data were written

    def value_of(self, x: Tensor) -> Tensor | None:
        """Return the value of a tensor, or None if it is not known."""
        if is_real(x):
            return x
        value = self.values[id(x)][1] if id(x) in self.values else None
        return None if value is None or value.untyped_storage().data_ptr() in self.stale else value

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch."""
        args, kwargs = self.with_numbers(func, args, kwargs)
        operands = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if not operands:
            return self.made(func, args, kwargs)
        if all(map(is_real, operands)):
            with without_modes():
                return func(*args, **kwargs)
        if all(self.value_of(x) is not None for x in operands):
            return self.followed(func, args, kwargs)
        if is_write(func) and (old := self.value_of(operands[0])) is not None:
            self.stale.add(old.untyped_storage().data_ptr())
        return self.traced(func, args, kwargs)

    def made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of numbers, and follow the value of the tensor that it makes."""
        result = func(*args, **kwargs)
        if func in FACTORIES and isinstance(result, FakeTensor) and result.numel() <= MOST_KNOWN:
            with without_modes():
                self.values[id(result)] = result, func(*args, **{**kwargs, "device": "cpu"})
        return result

    def followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of known values, and follow the values of its results."""
        real_args, real_kwargs = tree_map_only(Tensor, self.value_of, (args, kwargs))
        with without_modes():
            real = func(*real_args, **real_kwargs)
        values = [x for x in tree_iter(real) if isinstance(x, Tensor)]
        if func in DECIDING or not (values or is_write(func)):
            return real
        result = self.traced(func, args, kwargs)
        fakes = [x for x in tree_iter(result) if isinstance(x, Tensor)]
        self.values |= {id(fake): (fake, value) for fake, value in zip(fakes, values) if is_real(value)}  # not of vmap
        return result

    def traced(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function with fake operands: real ones as constants, known masks of an index as places."""
        if func in INDEXED:
            args = args[0], self.places(args[1]), *args[2:]
        args, kwargs = tree_map_only(Tensor, self.as_constant, (args, kwargs))
        return func(*args, **kwargs)

    def places(self, index: Any) -> Any:
        """Return an index in which each known mask is the places where it is true, or slices if it is everywhere."""
        places: list[Any] = []
        for part in index if isinstance(index, tuple) else (index,):
            mask = self.value_of(part) if isinstance(part, Tensor) and part.dtype == torch.bool else None
            if mask is None:
                places.append(part)
                continue
            with without_modes():
                places += [slice(None)] * mask.dim() if mask.all() else mask.nonzero(as_tuple=True)
        return tuple(places) if isinstance(index, tuple) or len(places) > 1 else places[0]

    def as_constant(self, x: Tensor) -> Tensor:
        """Return a real tensor as a constant of the graph; other tensors unchanged."""
        if not is_real(x):
            return x
        if id(x) not in self.constants:
            with without_modes():
                content = x.tolist()
            self.constants[id(x)] = x, torch.tensor(content, dtype=x.dtype)
        return self.constants[id(x)][1]

    def with_numbers(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with numbers for known sizes: of factories, of views and in slices."""
        if func in INDEXED:
            return (args[0], tree_map_only(slice, self.numbered, args[1]), *args[2:]), kwargs
        if func in FACTORIES:
            return tree_map_only(Tensor, self.number, (args, kwargs))
        if getattr(func, "__name__", "") in SIZED:
            sizes, kwargs = tree_map_only(Tensor, self.number, (args[1:], kwargs))
            return (args[0], *sizes), kwargs
        return args, kwargs

    def number(self, x: Any) -> Any:
        """Return the value of a known tensor of one entry as a number; others unchanged."""
        value = self.value_of(x) if isinstance(x, Tensor) and x.numel() == 1 else None
        if value is None:
            return x
        with without_modes():
            return value.item()

    def numbered(self, part: slice) -> slice:
        """Return a slice with numbers for known tensors."""
        return slice(*map(self.number, (part.start, part.stop, part.step)))


def is_write(func: Any) -> bool:
    """Return True for a function that writes into its first operand."""
    name = getattr(func, "__name__", "")
    return name in WRITES or name.endswith("_") and not name.endswith("__")


WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
          "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}  # fmt: skip
INDEXED = (Tensor.__getitem__, Tensor.__setitem__)
FACTORIES = {torch.arange, torch.tensor, torch.zeros, torch.ones, torch.full, torch.linspace, torch.as_tensor}
SIZED = {"view", "reshape", "expand", "repeat", "unflatten", "split", "narrow", "new_zeros", "new_ones", "new_full"}
DECIDING = {torch.repeat_interleave, Tensor.repeat_interleave, torch.unique_consecutive, torch.nonzero, Tensor.nonzero,
            torch.masked_select, Tensor.masked_select, torch.unique, Tensor.unique}  # fmt: skip
