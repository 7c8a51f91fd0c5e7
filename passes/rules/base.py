"""Rules: the factors of an operator's dims, and the effect of sharding each factor."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.spec import REDUCTIONS, Factor, Spec
from passes.trace.builder import Builder, Emit

Names = tuple[str, ...]  # the factors of one dim, major to minor; () for a dim of size one
Held = Sequence[Mapping[str, Factor]]  # for each operand: atom -> its current factor
Place = Callable[[Held, Mesh], Mapping[str, tuple[str, ...]]]  # -> axes of factors, or of single atoms


@dataclass(frozen=True)
class Rule:
    """The dims of each tensor operand and result, as factors.

    Attributes:
        operands: the factors of the dims of each tensor operand
        results: the factors of the dims of each tensor result
        sizes: the size of each factor
        reduced: factors that vanish: if one is sharded, the result is partial in the named way (sum or max)
        whole: factors that must not be sharded
        linear: sets of operands in which, jointly, the result is linear: partial sums pass through
        pad_in: the required padding value of a reduced factor, in every operand that has it
        pad_out: maps each operand's padding value (NaN: no padding) to the result's (None: unknown)
        pad_safe: operand -> padding value that keeps the result finite
        moves: the result is the operand's own entries, rearranged: conversions may be hoisted above it
        resize: rewrites size arguments for local shapes: (args, local result shape) -> args
        emit: builds the local node if a plain call of the operator is not enough
        only: factor -> the only axes that may shard it
        exchange: factors of the only result to shard on an axis that shards a factor of operand 0 that `only` excludes:
            operands are exchanged, not gathered, and the result is exchanged back
        local: computes the results from local arguments, if a kernel demands more of them than the operator
        repeats: the result repeats entries of operand 0, which is made replicate first: its gradient is reduced
            afterwards
        place: places some factors on axes of its choice, from the operands' factors; no other factors use these axes
        uniform: without operands, all entries of the result are equal: each rank can create any share of it
    """

    operands: tuple[tuple[Names, ...], ...]
    results: tuple[tuple[Names, ...], ...]
    sizes: Mapping[str, int]
    reduced: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    linear: frozenset[frozenset[int]] = frozenset()
    pad_in: float = 0.0
    pad_out: Callable[[list[float | None]], float | None] = lambda fills: None
    pad_safe: Mapping[int, float] = field(default_factory=dict)
    moves: bool = False
    resize: Callable[[tuple, tuple[int, ...]], tuple] | None = None
    emit: Emit | None = None
    only: Mapping[str, frozenset[str]] = field(default_factory=dict)
    exchange: Names = ()
    local: Callable[..., Any] | None = None
    repeats: bool = False
    place: Place | None = None
    uniform: bool = False

    def may_shard(self, factor: str, axis: str) -> bool:
        """Return True if the operator can run with the `factor` sharded on the `axis`."""
        return factor not in self.whole and axis in self.only.get(factor, (axis,))

    def may_lie(self, factor: str, axes: tuple[str, ...]) -> bool:
        """Return True if the `only` axes of the `factor`, if any, include all of `axes`."""
        only = self.only.get(factor)
        return only is None or only.issuperset(axes)


RuleMaker = Callable[[fx.Node], Rule]
EMITTERS: dict[str, Emit] = {}  # operator -> its emitter, registered by higher packages


def emit_of(name: str) -> Emit:
    """Return an emitter that looks up `EMITTERS[name]` when it runs, because a higher package registers it."""

    def emit(
        builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
    ) -> fx.Node:
        return EMITTERS[name](builder, node, operands, specs, results)

    return emit


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Return the node's tensor operands, in argument order, with lists flattened."""
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: operands.append(n) if ir.is_tensor(n) else None)
    return operands


def result_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that the node computes."""
    val = ir.value(node)
    return [tuple(v.shape) for v in ((val,) if isinstance(val, Tensor) else val) if isinstance(v, Tensor)]


def zero_if_zero(fills: Sequence[float | None]) -> float | None:
    """Return 0 if the padding of any operand is 0, as in a multiplication; otherwise None."""
    return 0.0 if 0.0 in fills else None


def zero_if_linear(linear: Collection[frozenset[int]], fills: Sequence[float | None]) -> float | None:
    """Return 0 if all operands of a set in which the result is linear have zeros as padding; otherwise None."""
    return 0.0 if any(all(fills[i] == 0.0 for i in operands if i < len(fills)) for operands in linear) else None


def same_fill(fills: Sequence[float | None]) -> float | None:
    """Return the padding value that all operands share, as moved entries keep it; otherwise None."""
    return fills[0] if fills and all(f == fills[0] for f in fills) else None


_DIM = re.compile(r"\((\w+)\)|(\w)")


def parse_dims(text: str, lead: int) -> tuple[Names, ...]:
    """Parse `...b(gr)t` into (("...0",), ("b",), ("g", "r"), ("t",)), with `lead` leading dims for the dots."""
    text = text.strip()
    dims: list[Names] = [(f"…{i}",) for i in range(lead)] if text.startswith("...") else []
    return (*dims, *(tuple(group or letter) for group, letter in _DIM.findall(text)))


def bind_sizes(dims: Sequence[tuple[Names, ...]], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the sizes of all factors, solving single-factor dims first; raise ValueError if dims disagree."""
    sizes: dict[str, int] = {}
    pairs = [(names, n) for d, shape in zip(dims, shapes, strict=True) for names, n in zip(d, shape, strict=True)]
    for names, n in sorted(pairs, key=lambda pair: len(pair[0])):
        unknown = [name for name in names if name not in sizes]
        product = math.prod(sizes[name] for name in names if name in sizes)
        if len(unknown) > 1 or (not unknown and product != n) or (unknown and n % product):
            raise ValueError(f"dim of size {n} does not fit the factors {names} of sizes {sizes}")
        if unknown:
            sizes[unknown[0]] = n // product
    return sizes


def numbered(shape: Sequence[int], tag: str = "d", ones: bool = False) -> tuple[Names, ...]:
    """Return one factor for each dim, `d0`, `d1`, ...; without `ones`, dims of size 1 have none."""
    return tuple((f"{tag}{i}",) if ones or n != 1 else () for i, n in enumerate(shape))


def aligned(shape: Sequence[int], dims: Sequence[Names]) -> tuple[Names, ...]:
    """Return the factors of a tensor that is broadcast to `dims`; dims of size 1 have none."""
    return tuple(names if n != 1 else () for n, names in zip(shape, dims[len(dims) - len(shape) :], strict=True))


def of_dims(
    node: fx.Node, operands: Sequence[Sequence[Names]], results: Sequence[Sequence[Names]], **fields: Any
) -> Rule:
    """Make a rule from the dims of all tensors, whose shapes give the factors' sizes, and other fields of `Rule`."""
    shapes = [*(ir.example(n).shape for n in tensor_operands(node)), *result_shapes(node)]
    dims = [tuple(names) for names in (*operands, *results)]
    return Rule(tuple(dims[: len(operands)]), tuple(dims[len(operands) :]), bind_sizes(dims, shapes), **fields)


def from_text(text: str) -> RuleMaker:
    """Make a rule from a `text` like `mk, kn -> mn; sum k; linear 0; linear 1` (also: `whole q k`, `moves`).

    Raises:
        ValueError: the text is malformed.
    """
    signature, *clauses = (part.strip() for part in text.split(";"))
    left, right = sides(signature, text)
    words = [clause.split() for clause in clauses]
    check_clauses(words, {letter for letter in signature if letter.isalpha()}, len(left), text)
    folded = {f: w[0] for w in words if w[0] in REDUCTIONS for f in w[1:]}
    declared_whole = frozenset(f for w in words if w[0] == "whole" for f in w[1:])
    linear = frozenset(frozenset(map(int, w[1:])) for w in words if w[0] == "linear")

    def make(node: fx.Node) -> Rule:
        nodes = tensor_operands(node)
        shapes, outs = [tuple(ir.example(n).shape) for n in nodes], result_shapes(node)
        if len(shapes) > len(left) or len(outs) != len(right):
            mismatch = f"it takes {len(shapes)} tensors and gives {len(outs)}"
            raise ir.CompileError("rules", node, f"its rule {text!r} does not fit: {mismatch}")
        texts = left[: len(shapes)]
        # with a gradient, tied maxima on several ranks would have to share it
        tied = {f for f, how in folded.items() if how == "max" and any(map(needs_gradient, nodes))}
        reduced = {f: how for f, how in folded.items() if f not in tied}
        whole = declared_whole | tied
        lead = max((len(s) - len(parse_dims(t, 0)) for t, s in zip(texts, shapes) if "..." in t), default=0)
        operands = tuple(parse_dims(t, lead) for t in texts)
        results = tuple(parse_dims(t, lead) for t in right)
        ranks = [len(shape) for shape in (*shapes, *outs)]
        if ranks != [len(dims) for dims in (*operands, *results)]:
            mismatch = f"its tensors have {', '.join(map(str, ranks))} dims"
            raise ir.CompileError("rules", node, f"its rule {text!r} does not fit: {mismatch}")
        sizes = bind_sizes([*operands, *results], [*shapes, *outs])
        return Rule(
            operands,
            results,
            sizes,
            reduced,
            whole,
            linear,
            pad_in=-math.inf if "max" in reduced.values() else 0.0,
            pad_out=partial(zero_if_linear, linear),
            moves=["moves"] in words,
        )

    return make


def needs_gradient(x: fx.Node) -> bool:
    """Return True if a gradient may flow to a value: it has a floating-point dtype and is not detached."""
    return x.target is not torch.ops.aten.detach.default and ir.example(x).is_floating_point()


def sides(signature: str, text: str) -> tuple[list[str], list[str]]:
    """Split a signature into the dims of operands and of results, as text; raise ValueError if malformed."""
    left, arrow, right = signature.partition("->")
    if not arrow or "->" in right:
        raise ValueError(f"rule {text!r} is malformed; write dims of operands, one ->, dims of results")
    return left.split(","), right.split(",")


def check_clauses(clauses: Sequence[Sequence[str]], letters: Collection[str], operands: int, text: str) -> None:
    """Raise ValueError naming an unknown clause, or a letter or operand that the rule lacks."""
    for word, *names in clauses:
        if word not in (*REDUCTIONS, "whole", "linear", "moves"):
            raise ValueError(f"rule {text!r}: {word!r} is not a clause; use sum, max, whole, linear or moves")
        allowed = [str(i) for i in range(operands)] if word == "linear" else letters
        if unknown := [name for name in names if name not in allowed]:
            raise ValueError(f"rule {text!r}: {word} {unknown[0]}, but the rule has no {unknown[0]}")


def opaque(node: fx.Node) -> Rule:
    """Return the rule of an operator without a rule: every operand is needed in full."""
    operands = [numbered(ir.example(n).shape, f"i{k}.", ones=True) for k, n in enumerate(tensor_operands(node))]
    results = [numbered(shape, f"o{k}.", ones=True) for k, shape in enumerate(result_shapes(node))]
    rule = of_dims(node, operands, results)
    return replace(rule, whole=frozenset(rule.sizes))
