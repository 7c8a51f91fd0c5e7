"""Read attention that a model writes out from the graph: softmax(masked(f(q @ k^T))) @ v.

    x = matmul(q, k.mT) * 0.125
    softmax(tanh(x / 50) * 50 + where(mask, 0, -inf)) @ v

is attention of scale 0.125 under `mask` with the score function "tanh(s / 50.0) * 50.0" (`attend.py`). A score function
takes the score, the key's position, numbers, and terms: values that do not vary along keys, such as slopes of heads
(ALiBi) or the query's own position. It is computed in fp32, or in fp64 if queries are fp64, whatever the model does.
Attention is left as it is if a term may need a gradient, if a bias varies over pairs, or if the softmax has more
columns than keys, but for one last column of sinks, which do not vary along keys (gpt-oss):

    scores = cat([x, sinks], -1); softmax(scores - max(scores))[..., :-1] @ v
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.idioms.look_through import ARANGE, CASTS, COPIES, WIDE, keeps_numbers, number_of, see_through, span
from passes.idioms.masks import KEYS, RANK, NotAnInterval, Source
from passes.ir import ir
from passes.ir.slices import cone_of

aten = torch.ops.aten
SOFTMAX = (aten.softmax.int, aten._softmax.default)
INFIX = {
    op: sign
    for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))
    for op in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)
}
RESHAPES = (aten._unsafe_view.default, aten.view.default, aten.reshape.default, aten.flatten.using_ints)
CALLED = {getattr(aten, name).default: name for name in ("tanh", "neg", "abs", "exp", "sigmoid", "relu")}
WHERE = (aten.where.ScalarOther, aten.where.Scalar, aten.where.self)
FILL = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)


@dataclass
class Attention:
    """One attention: its result, its operands, and the score function with its terms.

    A mask comes with True if it marks hidden keys. `zeroed` says that queries that see no key get zeros. Otherwise they
    would see all keys equally, or yield NaN: such a mask may be replaced only if each query sees itself.
    """

    result: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: float
    turned: bool = False  # k is [b, g, e, t]
    score: str = ""
    masks: list[tuple[fx.Node, bool]] = field(default_factory=list)
    zeroed: bool = False
    terms: list[Source] = field(default_factory=list)
    sink: Source | None = None


def written_attention(softmax: fx.Node, differentiable: frozenset[fx.Node]) -> Attention | None:
    """Return the attention around a softmax, None if there is none; raises NotAnInterval if it cannot be rewritten.

    `differentiable` are the placeholders that need gradients.
    """
    x, dim, *_ = softmax.args
    if ir.example(softmax).dim() != RANK or int(dim) % RANK != RANK - 1:  # type: ignore[arg-type]
        return None
    x, sink = without_sink(x)  # type: ignore[arg-type]
    matmul = matmul_above(x)
    result = matmul_below(softmax, sink is not None)
    if matmul is None or result is None:
        return None
    scored, scale = find_scale(matmul)
    q, k, v = matmul.args[0], matmul.args[1], result.args[1]
    check_ranks(q, k, v)  # type: ignore[arg-type]
    straight = undo_transpose(k)  # type: ignore[arg-type]
    k, v = (k, v) if straight is None else single_heads(straight, v)  # type: ignore[arg-type]
    attention = Attention(result, q, k, v, scale, turned=straight is None)  # type: ignore[arg-type]
    check_kinds(attention)
    scores = Scores(scored, differentiable)
    attention.score = bare(scores.read(as_source(x), 0))
    attention.score = "" if attention.score == "s" else attention.score
    attention.masks, attention.terms = list(dict.fromkeys(scores.masks)), scores.terms
    if sink is not None:  # a query that sees no key sees the sink, whose value is zero
        attention.sink, attention.zeroed = look_under(as_source(sink)), True
    if scores.guards:
        attention.result, attention.zeroed = result_after_guards(attention, scores.guards), True
    return attention


def check_ranks(q: fx.Node, k: fx.Node, v: fx.Node) -> None:
    """Raise NotAnInterval unless all have the dims batch, head, token and width."""
    if any(ir.example(x).dim() != RANK for x in (q, k, v)):
        shapes = [tuple(ir.example(x).shape) for x in (q, k, v)]
        raise NotAnInterval("queries are {}, keys {}, values {}, not all with four dims".format(*shapes))


def check_kinds(attention: Attention) -> None:
    """Raise NotAnInterval if the operator does not support the dtypes or shapes."""
    query, key, value = (tuple(ir.example(x).shape) for x in (attention.q, attention.k, attention.v))
    key = (*key[:2], key[3], key[2]) if attention.turned else key
    if len({ir.example(x).dtype for x in (attention.q, attention.k, attention.v)}) > 1:
        raise NotAnInterval("queries, keys and values differ in dtype")
    compatible = query[0] == key[0] == value[0] and key[1:3] == value[1:3] and query[3] == key[3]
    if not compatible or query[1] % key[1]:
        raise NotAnInterval(f"queries are {query}, keys {key}, values {value}")
    result = tuple(ir.example(attention.result).shape)
    if result != (*query[:3], value[3]):
        raise NotAnInterval(f"queries are {query}, the result {result}, because a mask or bias has more rows or heads")


# -- matmuls ----------------------------------------------------------------------------------


def matmul_above(x: fx.Node) -> fx.Node | None:
    """Return the only matmul of 4-dim values from which scores are made, None if there are none or several."""
    visited: set[fx.Node] = set()
    stack, matmuls = [x], []
    while stack:
        node = stack.pop()
        if node in visited or not ir.is_tensor(node) or ir.example(node).dim() != RANK:
            continue
        visited.add(node)
        if node.target is aten.matmul.default:
            matmuls.append(node)
        elif node.target in (*INFIX, *CALLED, *WHERE, *FILL, *CASTS, *COPIES, aten.cat.default):
            stack += node.all_input_nodes
    return matmuls[0] if len(matmuls) == 1 else None


def without_sink(x: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the scores of keys, and the sinks that were joined to them, None if there are none.

    If the largest score of each query was subtracted, they are those before it, which changes no softmax.
    """
    node = x
    while keeps_numbers(node):
        node = node.args[0]  # type: ignore[assignment]
    if node.target is aten.sub.Tensor and is_largest(node.args[1], node.args[0]):
        x = node = node.args[0]  # type: ignore[assignment]
    if node.target is not aten.cat.default or len(node.args) != 2 or int(node.args[1]) % RANK != RANK - 1:  # type: ignore[call-overload]
        return x, None
    parts: Any = node.args[0]
    if len(parts) != 2 or ir.example(parts[1]).shape[-1] != 1 or ir.example(parts[0]).shape[-1] == 1:
        return x, None
    return parts[0], parts[1]


def is_largest(x: Any, scores: Any) -> bool:
    """Return True if a value is the largest of each query's scores."""
    if isinstance(x, fx.Node) and x.target is operator.getitem and x.args[1] == 0:
        x = x.args[0]
    if not isinstance(x, fx.Node) or x.target not in (aten.max.dim, aten.amax.default) or x.args[0] is not scores:
        return False
    return keeps_last_dim(x)


def keeps_last_dim(reduction: fx.Node) -> bool:
    """Return True if only the last dim is reduced, to size 1; without `keepdim` other dims would stand in its place."""
    _, dims, keepdim = (*reduction.args, *(None, (), False)[len(reduction.args) :])
    rank = ir.example(reduction.args[0]).dim()  # type: ignore[arg-type]
    dims = dims if isinstance(dims, (list, tuple)) else (dims,)
    return bool(keepdim) and [int(dim) % rank for dim in dims] == [rank - 1]  # type: ignore[call-overload]


def drops_last_column(node: fx.Node, columns: int) -> bool:
    """Return True if a slice keeps all entries of the last dim but the last one."""
    _, dim, start, end, step = (*node.args, *(None, 0, None, None, 1)[len(node.args) :])
    kept_columns = range(columns)[slice(start, end, step)]  # type: ignore[misc]
    return int(dim) % RANK == RANK - 1 and kept_columns == range(columns - 1)  # type: ignore[call-overload]


def matmul_below(softmax: fx.Node, has_sink: bool) -> fx.Node | None:
    """Return the matmul of the softmax, or of its columns but that of a sink, with values; None if there is none."""
    node, columns = softmax, ir.example(softmax).shape[-1]
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.matmul.default and user.args[0] is node:
            return user
        if user.target in (aten.native_dropout.default, aten.dropout.default) and user.args[1]:
            raise NotAnInterval("dropout draws a random number for each pair")
        if user.target is aten.slice.Tensor and has_sink and drops_last_column(user, columns):
            node = user
            continue
        if user.target is aten.slice.Tensor:
            raise NotAnInterval("its softmax has columns that are not keys")
        if user.target is not aten.dropout.default and not keeps_numbers(user):
            return None
        node = user
    return None


def find_scale(matmul: fx.Node) -> tuple[fx.Node, float]:
    """Return the matmul after its multiplication by a number, and the number; 1.0 if there is none."""
    node = matmul
    while len(node.users) == 1:
        (user,) = node.users
        number = user.args[1] if len(user.args) == 2 and user.args[0] is node else None
        if user.target in INFIX and INFIX[user.target] in "*/" and isinstance(number, (int, float)) and number:
            return user, float(number) if INFIX[user.target] == "*" else 1 / number
        if not keeps_numbers(user):
            break
        node = user
    return matmul, 1.0


def undo_transpose(x: fx.Node) -> fx.Node | None:
    """Return the operand of a transposition of the last two dims; None for another value."""
    if x.target in (aten.mT.default, aten.adjoint.default):
        return x.args[0]  # type: ignore[return-value]
    if x.target is aten.transpose.int and {int(d) % RANK for d in x.args[1:3]} == {RANK - 2, RANK - 1}:  # type: ignore
        return x.args[0]  # type: ignore[return-value]
    if x.target is aten.permute.default and [int(d) % RANK for d in x.args[1]] == [0, 1, 3, 2]:  # type: ignore
        return x.args[0]  # type: ignore[return-value]
    return None


def single_heads(k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return keys and values before heads were repeated for the queries of a group, if both were repeated."""
    single = undo_repeat(k), undo_repeat(v)
    return single if ir.example(single[0]).shape[1] == ir.example(single[1]).shape[1] else (k, v)


def undo_repeat(x: fx.Node) -> fx.Node:
    """Return keys or values before each head was repeated for its query group; the value itself if it was not."""
    if x.target is aten.repeat_interleave.self_int and len(x.args) == 3 and int(x.args[2]) % RANK == 1:  # type: ignore
        return x.args[0]  # type: ignore[return-value]
    node = x
    while node.target in (*COPIES, *RESHAPES):
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not aten.expand.default or ir.example(node).dim() != RANK + 1:
        return x
    single: Any = node.args[0]
    b, g, r, t, e = ir.example(node).shape
    shapes = tuple(ir.example(x).shape), tuple(ir.example(single).shape)
    if shapes != ((b, g * r, t, e), (b, g, 1, t, e)) or single.target is not aten.unsqueeze.default:
        return x
    return single.args[0]


# -- scores -----------------------------------------------------------------------------------


def as_source(node: fx.Node) -> Source:
    """Return a value in its own dims."""
    shape = ir.example(node).shape
    return Source(node, tuple(d - len(shape) if n > 1 else None for d, n in enumerate(shape)))


def look_under(source: Source) -> Source:
    """Return the value under views and casts that keep its numbers, in the dims of the scores."""
    while True:
        node = source.node
        into: list[int | None]
        if node.target in CASTS and keeps_numbers(node):
            node, into = node.args[0], [d - len(source.dims) for d in range(len(source.dims))]  # type: ignore[assignment]
        elif (step := see_through(node)) is not None:
            node, into = step
        else:
            return source
        source = Source(node, tuple(None if at is None else source.dims[at] for at in into))


@dataclass
class Scores:
    """Reads the operators between scores and their softmax, and collects masks, guards and terms.

    A guard puts finite numbers into the rows of queries that see nothing.
    """

    scored: fx.Node
    differentiable: frozenset[fx.Node]
    masks: list[tuple[fx.Node, bool]] = field(default_factory=list)
    guards: list[fx.Node] = field(default_factory=list)
    terms: list[Source] = field(default_factory=list)

    def read(self, source: Source, offset: int) -> str:
        """Return an expression of the score `s`, the key's position `j` and terms.

        Entry t of `source` belongs to key t - offset.
        """
        source = source if source.node is self.scored else look_under(source)
        node = source.node
        if node is self.scored and source.in_place and offset == 0:
            return "s"
        if KEYS not in source.dims:
            return self.term(source)
        if node.target in ARANGE and source.dims == (KEYS,) and span(node)[1] == 1:
            start = span(node)[0] + offset
            return "j" if start == 0 else f"(j + {start})" if start > 0 else f"(j - {-start})"
        if node.target is aten.slice.Tensor:
            return self.slice_of_keys(source, offset)
        if node.target in WHERE and is_guard(node.args[0]) and source.in_place:
            self.guards.append(node)
            return self.read(self.operand(source, node.args[1]), offset)
        if node.target in WHERE and self.masks_by(source, offset, node.args[2]):
            return self.side(source, node.args[1], offset, keeps_masks=True)
        if node.target in FILL and self.masks_by(source, offset, node.args[2]):
            return self.read(self.operand(source, node.args[0]), offset)
        if node.target in INFIX and not node.kwargs and len(node.args) == 2 and is_unbounded(node):
            return self.binary(source, offset)
        if node.target in CALLED and is_unbounded(node):
            return f"{CALLED[node.target]}({bare(self.side(source, node.args[0], offset, keeps_masks=False))})"
        raise NotAnInterval(f"scores are computed with %{node.name} ({node.target})")

    def operand(self, source: Source, x: Any) -> Source:
        """Return an operand of an elementwise operator, in the dims of the scores."""
        shape = ir.example(x).shape
        return Source(x, tuple(source.dims[d - len(shape)] if n > 1 else None for d, n in enumerate(shape)))

    def binary(self, source: Source, offset: int) -> str:
        """Return the expression of an operator with two operands; an added mask of numbers is collected as a mask."""
        left, right = source.node.args[:2]
        sign = INFIX[source.node.target]
        for x, other in ((left, right), (right, left)):
            if sign == "+" and isinstance(x, fx.Node) and self.adds_mask(self.operand(source, x), offset):
                return self.read(self.operand(source, other), offset)
        factors = [x if isinstance(x, (int, float)) else 0 for x in (left, right)]
        factors[1] = 1 / factors[1] if sign == "/" and factors[1] else factors[1]
        still_low = [0.01 <= factor < math.inf for factor in factors]  # the lowest number times it still hides a key
        keeps = sign in "+-" or still_low[1], sign == "+" or sign == "*" and still_low[0]
        a, b = (self.side(source, x, offset, keeps_masks) for x, keeps_masks in zip((left, right), keeps))
        return f"({a} {sign} {b})"

    def side(self, source: Source, x: Any, offset: int, keeps_masks: bool) -> str:
        """Return the expression of an operand; raises NotAnInterval if it is masked and the operator unmasks it.

        `tanh(-inf)` and `-(-inf)` do not hide a key; `-inf + x` and `-inf * 2` do. The lowest number does not if it is
        multiplied by almost zero.
        """
        if not isinstance(x, fx.Node):
            return repr(float(x))
        masks = len(self.masks)
        text = self.read(self.operand(source, x), offset)
        if len(self.masks) > masks and not keeps_masks:
            raise NotAnInterval(f"%{source.node.name} changes scores that are already masked")
        return text

    def slice_of_keys(self, source: Source, offset: int) -> str:
        """Return the expression of a slice of keys."""
        x, dim, start, _, step = (*source.node.args, *(None, 0, 0, None, 1)[len(source.node.args) :])
        rank = len(source.dims)
        if int(dim) % rank != rank - 1 or source.dims[-1] != KEYS or step != 1:  # type: ignore[call-overload]
            raise NotAnInterval(f"scores are computed with %{source.node.name}, a slice of other dims than keys")
        size = ir.example(x).shape[-1]  # type: ignore[arg-type]
        start = slice(start or 0, None).indices(size)[0]
        return self.read(Source(x, source.dims), offset + start)  # type: ignore[arg-type]

    def term(self, source: Source) -> str:
        """Return the name of a value that does not vary along keys; raises NotAnInterval if it may need a gradient."""
        if not self.differentiable.isdisjoint(cone_of(source.node, frozenset())):
            raise NotAnInterval(f"%{source.node.name}, from which scores are computed, may need a gradient")
        if source not in self.terms:
            self.terms.append(source)
        return f"t{self.terms.index(source)}"

    # -- masks ------------------------------------------------------------------------------------

    def masks_by(self, source: Source, offset: int, low: Any) -> bool:
        """Return True if a `where` or `masked_fill` hides keys by the lowest number; its mask is collected.

        Raises NotAnInterval if the mask is transposed or cut afterwards: masks are read in the dims of the scores.
        """
        node = source.node
        if not is_lowest(low, ir.example(node).dtype):
            return False
        if offset or not source.in_place:
            raise NotAnInterval(f"%{node.name} makes a mask that is transposed or sliced afterwards")
        fills = node.target in FILL
        self.masks.append((node.args[1] if fills else node.args[0], fills))  # type: ignore[arg-type]
        return True

    def adds_mask(self, source: Source, offset: int = 0) -> bool:
        """Return True if a value is zero at visible keys and the lowest number elsewhere; its mask is collected."""
        node = below_views(source.node)
        if not (node.target in WHERE and is_zero(node.args[1]) or node.target in FILL and is_zero(node.args[0])):
            return False
        return self.masks_by(self.operand(source, node), offset, node.args[2])


def bare(text: str) -> str:
    """Strip brackets around a whole expression."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[1:-1] if text[0] == "(" and at == len(text) - 1 else text
    return text


def below_views(node: fx.Node) -> fx.Node:
    """Return the value under copies, casts to floating point and expansions."""
    while keeps_numbers(node) or node.target is aten.expand.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_unbounded(node: fx.Node) -> bool:
    """Return True unless a result may wrap around, as those of small integers do."""
    return ir.example(node).is_floating_point() or ir.example(node).dtype in WIDE


def is_zero(x: Any) -> bool:
    return number_of(x) == 0


def is_lowest(x: Any, dtype: torch.dtype) -> bool:
    """Return True if a value is -inf everywhere, or the lowest number of a dtype."""
    number = number_of(x) if dtype.is_floating_point else None  # a large integer would not hide a key
    return number is not None and (number == -math.inf or number <= torch.finfo(dtype).min)


def is_guard(x: Any) -> bool:
    """Return True if a value tells of each query if it sees any key."""
    return isinstance(x, fx.Node) and x.target is aten.any.dim and keeps_last_dim(x)


def result_after_guards(attention: Attention, guards: list[fx.Node]) -> fx.Node:
    """Return the result after zeros are put in for queries that see nothing; attention by interval does this itself."""
    users = list(attention.result.users)
    if (
        len(users) == 1
        and users[0].target in WHERE
        and users[0].args[1] is attention.result
        and is_zero(users[0].args[2])
    ):
        conditions: list[Any] = [node.args[0] for node in (*guards, users[0])]
        if all(is_guard(x) and [(x.args[0], False)] == attention.masks for x in conditions):
            return users[0]
    raise NotAnInterval("queries that see nothing do not get zeros")
