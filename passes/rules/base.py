"""What a rule says: of which factors an operator's dims are made, and what happens when one is sharded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from passes.program import ir
from passes.program.builder import Builder, Emit
from passes.program.mesh import Mesh
from passes.program.spec import Factor, Spec

Names = tuple[str, ...]  # the factors of one dim, major to minor; () for a dim of size one
Held = Sequence[Mapping[str, Factor]]  # of each operand the atoms that shards of it are made of, as it holds them
Place = Callable[[Held, Mesh], Mapping[str, tuple[str, ...]]]  # -> axes of factors, or of single atoms


@dataclass(frozen=True)
class Rule:
    """The dims of each tensor operand and result as factors.

    reduced   factors that vanish: sharded, the result is partial in the way named (sum or max)
    whole     factors that must not be sharded
    linear    sets of operands in which, jointly, the result is linear: partial sums pass through
    pad_in    what the padding of a reduced factor must hold in every operand that has it
    pad_out   from what each operand's padding holds (NaN: it has none) to what the result's does (None: anything)
    pad_safe  operand -> value its padding must hold so that the result stays finite
    moves     the result is the operand's own entries, rearranged: conversions may hoist above it
    resize    rewrites size arguments for local shapes: (args, local result shape) -> args
    emit      builds the local node where a plain call of the operator is not enough
    only      factors that may be sharded on these axes alone
    columns   matrices that the kernel takes only if each of their columns is in one piece
    repeats   the result has entries of operand 0 several times: made replicate before, its gradient reduced after
    place     puts some factors on axes of its own choice, given how operands are held; no others are on these axes
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
    columns: frozenset[int] = frozenset()
    repeats: bool = False
    place: Place | None = None

    def may_shard(self, factor: str, axis: str) -> bool:
        """Whether the operator can run with the factor sharded on the axis."""
        return factor not in self.whole and axis in self.only.get(factor, (axis,))

    def may_lie(self, factor: str, axes: tuple[str, ...]) -> bool:
        """Whether the factor may be over axes of these names; the ranks of `cp` alone hold what is stored otherwise."""
        only = self.only.get(factor)
        return only is None or only.issuperset(axes)


RuleMaker = Callable[[fx.Node], Rule]
EMITTERS: dict[str, Emit] = {}  # operator -> its local form, where a room above the rules writes it


def emit_of(name: str) -> Emit:
    """The local form that a room above has registered in `EMITTERS`, looked up when it is needed."""

    def emit(
        builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
    ) -> fx.Node:
        return EMITTERS[name](builder, node, operands, specs, results)

    return emit


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The node's tensor operands, in argument order, lists flattened."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n) if ir.is_tensor(n) else None)
    return found


def result_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """Shapes of the tensors that the node computes."""
    val = ir.value(node)
    return [tuple(v.shape) for v in ((val,) if isinstance(val, Tensor) else val) if isinstance(v, Tensor)]


def zero_if_zero(fills: Sequence[float | None]) -> float | None:
    """A product's padding is zero where a factor's is."""
    return 0.0 if 0.0 in fills else None


def same_fill(fills: Sequence[float | None]) -> float | None:
    """Moved entries keep what they hold."""
    return fills[0] if fills and all(f == fills[0] for f in fills) else None


_DIM = re.compile(r"\((\w+)\)|(\w)")


def parse_dims(text: str, lead: int) -> tuple[Names, ...]:
    """`...b(gr)t` -> (("...0",), ("b",), ("g", "r"), ("t",)), with `lead` leading dims for the dots."""
    text = text.strip()
    dims: list[Names] = [(f"…{i}",) for i in range(lead)] if text.startswith("...") else []
    return (*dims, *(tuple(group or letter) for group, letter in _DIM.findall(text)))


def bind_sizes(dims: Sequence[tuple[Names, ...]], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Sizes of all factors, solved from the dims of one factor first; raises ValueError where they disagree."""
    sizes: dict[str, int] = {}
    pairs = [(names, n) for d, shape in zip(dims, shapes, strict=True) for names, n in zip(d, shape, strict=True)]
    for names, n in sorted(pairs, key=lambda pair: len(pair[0])):
        unknown = [name for name in names if name not in sizes]
        known = math.prod(sizes[name] for name in names if name in sizes)
        if len(unknown) > 1 or (not unknown and known != n) or (unknown and n % known):
            raise ValueError(f"dim of size {n} does not fit the factors {names} of sizes {sizes}")
        if unknown:
            sizes[unknown[0]] = n // known
    return sizes


def from_text(text: str) -> RuleMaker:
    """The rule of a line like `mk, kn -> mn; sum k; linear 0; linear 1` (also: `whole q k`, `moves`)."""
    signature, *clauses = (part.strip() for part in text.split(";"))
    left, right = sides(signature, text)
    words = [clause.split() for clause in clauses]
    check_clauses(words, {letter for letter in signature if letter.isalpha()}, len(left), text)
    folded = {f: w[0] for w in words if w[0] in ("sum", "max") for f in w[1:]}
    named = frozenset(f for w in words if w[0] == "whole" for f in w[1:])
    linear = frozenset(frozenset(map(int, w[1:])) for w in words if w[0] == "linear")

    def make(node: fx.Node) -> Rule:
        given = tensor_operands(node)
        shapes, outs = [tuple(ir.example(n).shape) for n in given], result_shapes(node)
        if len(shapes) > len(left) or len(outs) != len(right):
            fits = f"it takes {len(shapes)} tensors and gives {len(outs)}"
            raise ir.CompileError("rules", node, f"its rule {text!r} does not fit: {fits}")
        texts = left[: len(shapes)]
        # tied maxima on several ranks would share a gradient
        alone = {f for f, how in folded.items() if how == "max" and any(map(needs_gradient, given))}
        reduced = {f: how for f, how in folded.items() if f not in alone}
        whole = named | alone
        lead = max((len(s) - len(parse_dims(t, 0)) for t, s in zip(texts, shapes) if "..." in t), default=0)
        operands = tuple(parse_dims(t, lead) for t in texts)
        results = tuple(parse_dims(t, lead) for t in right)
        ranks = [len(shape) for shape in (*shapes, *outs)]
        if ranks != [len(dims) for dims in (*operands, *results)]:
            fits = f"its tensors have {', '.join(map(str, ranks))} dims"
            raise ir.CompileError("rules", node, f"its rule {text!r} does not fit: {fits}")
        sizes = bind_sizes([*operands, *results], [*shapes, *outs])
        return Rule(
            operands,
            results,
            sizes,
            reduced,
            whole,
            linear,
            pad_in=-math.inf if "max" in reduced.values() else 0.0,
            pad_out=zero_if_zero if linear else lambda f: None,
            moves=["moves"] in words,
        )

    return make


def needs_gradient(x: fx.Node) -> bool:
    """Whether a gradient may flow to a value: it computes real numbers, and is not detached."""
    return x.target is not torch.ops.aten.detach.default and ir.example(x).is_floating_point()


def sides(signature: str, text: str) -> tuple[list[str], list[str]]:
    """The dims of operands and those of results, as they are written; raises ValueError."""
    left, arrow, right = signature.partition("->")
    if not arrow or "->" in right:
        raise ValueError(f"rule {text!r}: dims of operands, one ->, dims of results")
    return left.split(","), right.split(",")


def check_clauses(clauses: Sequence[Sequence[str]], letters: Collection[str], operands: int, text: str) -> None:
    """Raise ValueError naming a clause that is none, or a letter or operand that the rule does not have."""
    for word, *names in clauses:
        if word not in ("sum", "max", "whole", "linear", "moves"):
            raise ValueError(f"rule {text!r}: {word!r} is none of sum, max, whole, linear, moves")
        known = [str(i) for i in range(operands)] if word == "linear" else letters
        if strange := [name for name in names if name not in known]:
            raise ValueError(f"rule {text!r}: {word} {strange[0]}, but there is no {strange[0]} in it")


def opaque(node: fx.Node) -> Rule:
    """The rule of an operator nobody has a rule for: every operand is needed whole."""
    shapes = [tuple(ir.example(n).shape) for n in tensor_operands(node)]
    outs = result_shapes(node)
    operands, results = (
        tuple(tuple((f"{kind}{i}.{j}",) for j in range(len(s))) for i, s in enumerate(group))
        for kind, group in (("i", shapes), ("o", outs))
    )
    sizes = bind_sizes([*operands, *results], [*shapes, *outs])
    return Rule(operands, results, sizes, whole=frozenset(sizes))
