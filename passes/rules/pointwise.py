"""Elementwise operators, with broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from passes.ir import ir
from passes.ir.operators import argument, name_of
from passes.rules.base import Rule, RuleMaker, result_shapes, tensor_operands

UNARY = """abs acos asin atan bitwise_not ceil clamp clone contiguous cos cosh elu
erf exp exp2 expm1 floor gelu hardswish
lgamma
hardtanh isinf isnan leaky_relu lgamma log log10 log1p log2 logical_not mish neg nan_to_num reciprocal relu relu6 round
rsqrt sgn sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc _to_copy alias detach lift_fresh_copy
ones_like zeros_like full_like empty_like celu hardsigmoid log_sigmoid selu threshold erfc fill to isfinite
_conj acosh angle asinh atanh digamma erfinv i0 special_erfcx"""
BINARY = """add sub mul div pow maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and
bitwise_or bitwise_xor where remainder fmod atan2 floor_divide __and__ __or__ rsub lerp addcmul addcdiv masked_fill
clamp_min clamp_max fmax fmin true_divide xlogy logaddexp hypot copysign polar complex
__lshift__ __rshift__ bitwise_left_shift bitwise_right_shift gcd ldexp nextafter"""

# sets of operands that may be partial sums together: the result is then a partial sum
LINEAR = {
    "neg": [{0}],
    "clone": [{0}],
    "contiguous": [{0}],
    "alias": [{0}],
    "add": [{0, 1}],
    "sub": [{0, 1}],
    "mul": [{0}, {1}],
    "div": [{0}],
}
MOVES = {"clone", "contiguous", "alias"}
UNDEFINED = {"empty_like"}  # results are uninitialized memory
# operand -> padding value that keeps the result and its gradient finite
SAFE = {
    "log": {0: 1.0},
    "log2": {0: 1.0},
    "log10": {0: 1.0},
    "rsqrt": {0: 1.0},
    "sqrt": {0: 1.0},
    "reciprocal": {0: 1.0},
    "div": {1: 1.0},
    "true_divide": {1: 1.0},
    "log1p": {0: 0.0},
    "acos": {0: 0.0},
    "asin": {0: 0.0},
    "exp": {0: 0.0},
    "expm1": {0: 0.0},
    "exp2": {0: 0.0},
    "acosh": {0: 2.0},
    "atanh": {0: 0.0},
    "digamma": {0: 1.0},
    "erfinv": {0: 0.0},
    "i0": {0: 0.0},
    "ldexp": {1: 0.0},
    "special_erfcx": {0: 0.0},
    "lgamma": {0: 1.0},
    "sinh": {0: 0.0},
    "cosh": {0: 0.0},
    "tan": {0: 0.0},
    "remainder": {1: 1.0},
    "fmod": {1: 1.0},
    "floor_divide": {1: 1.0},
    "addcdiv": {2: 1.0},
    "atan2": {1: 1.0},
    "xlogy": {1: 1.0},
    "hypot": {0: 1.0},
}


def broadcast_dims(shapes: list[tuple[int, ...]], out: tuple[int, ...]) -> list[tuple[tuple[str, ...], ...]]:
    """Return the factors of each operand's dims under broadcasting to `out`; dims of size 1 have none."""
    return [
        tuple(
            (f"d{len(out) - len(s) + i}",) if n == out[len(out) - len(s) + i] and n != 1 else ()
            for i, n in enumerate(s)
        )
        for s in shapes
    ]


def _fills(node: fx.Node, name: str) -> Callable[[list[float | None]], float | None]:
    """Return a function that applies the operator itself to the operands' padding values."""

    def apply(fills: list[float | None]) -> float | None:
        if name == "mul" and 0.0 in fills:
            return 0.0
        if any(f is None or math.isnan(f) for f in fills) or not fills or name in UNDEFINED:
            return None
        values = iter(torch.tensor(f, dtype=ir.example(n).dtype) for f, n in zip(fills, tensor_operands(node)))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: next(values) if ir.is_tensor(n) else n)
        out = complex(node.target(*args, **kwargs))  # type: ignore[operator]
        return out.real if math.isfinite(out.real) and out.imag == 0 else None

    return apply


def rule(node: fx.Node) -> Rule:
    """Make the rule of an elementwise node."""
    name = name_of(node)
    operands = tensor_operands(node)
    (out,) = result_shapes(node)
    dims = broadcast_dims([tuple(ir.example(n).shape) for n in operands], out)
    result = tuple((f"d{i}",) if n != 1 else () for i, n in enumerate(out))
    linear = [frozenset(s) for s in LINEAR.get(name, []) if max(s) < len(operands)]
    if argument(node, "rounding_mode"):
        linear = []  # a rounded sum differs from the sum of rounded terms
    return Rule(
        tuple(dims),
        (result,),
        {f"d{i}": n for i, n in enumerate(out) if n != 1},
        linear=frozenset(linear),
        pad_out=_fills(node, name),
        pad_safe={i: v for i, v in _safe(node, name).items() if i < len(operands)},
        moves=name in MOVES,
    )


def _safe(node: fx.Node, name: str) -> dict[int, float]:
    """Return operand -> padding value that keeps the result and its gradient finite."""
    if name == "pow":
        is_positive_integer = isinstance(node.args[1], int) and node.args[1] >= 1
        return {} if is_positive_integer else {0: 1.0}
    if name == "masked_fill":
        return {1: 0.0}
    if name == "where":
        infinite = [isinstance(value, float) and not math.isfinite(value) for value in node.args[1:3]]
        if infinite[0] != infinite[1]:
            return {0: float(infinite[1])}
        return {0: float(_is_single(node.args[2]))} if _is_single(node.args[1]) != _is_single(node.args[2]) else {}
    first = node.args[0]
    shift = 0 if isinstance(first, fx.Node) else 1  # `12 % x`: the divisor is the only tensor
    return {i - shift: v for i, v in SAFE.get(name, {}).items() if i >= shift}


def _is_single(value: object) -> bool:
    """Return True if an argument is a number or a tensor with one entry, such as the -inf of a mask."""
    return not isinstance(value, fx.Node) or ir.example(value).numel() == 1


RULES: dict[str, RuleMaker] = dict.fromkeys((UNARY + " " + BINARY).split(), rule)
