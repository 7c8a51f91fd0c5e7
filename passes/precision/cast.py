"""Mixed precision as casts in the graph, so that the graph shows every tensor's dtype.

    linear(x, w)                 bf16 graph over a bf16 parameter
    softmax(s)
becomes
    linear(x, _to_copy(w, bf16))                      over an fp32 parameter
    _to_copy(softmax(_to_copy(s, f32)), bf16)         by the table of operators

The model is captured with its parameters already in the compute dtype, so that casts by its author are in the graph.
Masters keep their own dtype; the cast is moved into the gather of a sharded weight, so that bf16 travels and the
gradient is reduced uncast. `ops` names operators with a least dtype, `modules` gives modules their own dtype, `output`
the dtype of the model's outputs to the loss. Casts inserted here are merged if equal, and dropped if one undoes
another: a value between two fp32 operators is not rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from passes.ir import ir
from passes.ir.layer import within
from passes.ir.operators import is_operator, name_of
from passes.ir.printer import format_dtype
from passes.ir.stages import Stage
from passes.precision.sensitive import OPS
from passes.rules.roles import MATMULS
from passes.trace.editor import Editor, inline

aten = torch.ops.aten
COPY = aten._to_copy.default
PRODUCTS = (*MATMULS, "addmm", "bmm", "baddbmm")


def in_dtype(op: Callable[..., Any], dtype: torch.dtype, before: Any) -> Callable[..., Any]:
    """Return the operator on operands cast to the dtype, with results cast back to the dtypes of the results `before`.

    If `before` is None, they are not cast back.
    """

    def is_floating(x: Any) -> bool:
        return isinstance(x, Tensor) and x.is_floating_point()

    def enter(x: Any) -> Any:
        return COPY(x, dtype=dtype) if is_floating(x) else x

    def leave(x: Any, old: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return tuple(map(leave, x, old))
        return COPY(x, dtype=old.dtype) if is_floating(x) else x

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_aggregate((args, kwargs), enter)  # type: ignore[misc]
        results = op(*args, **kwargs)
        return results if before is None else leave(results, before)

    return run


def terms(program: ir.Program) -> set[fx.Node]:
    """Return the nodes whose values are numbers that reach only the loss and metrics, through numbers alone."""
    result: set[fx.Node] = set()
    buffers = {node for node, output in zip(program.results(), program.outputs) if output.kind == "buffer"}
    for node in reversed(program.graph.nodes):
        value = ir.value(node)
        values = value if isinstance(value, (tuple, list)) else (value,)
        has_dims = any(isinstance(x, Tensor) and x.dim() for x in values)
        if node.op == "output" or node.users.keys() <= result and not has_dims and node not in buffers:
            result.add(node)
    return result


def is_cast(node: Any) -> bool:
    """Return True if the node changes only a floating-point dtype."""
    return (
        isinstance(node, fx.Node)
        and node.target is COPY
        and node.kwargs.keys() == {"dtype"}
        and ir.example(node.args[0]).is_floating_point()  # type: ignore[arg-type]
        and ir.example(node).is_floating_point()
    )


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return True if a floating-point dtype has every number of another; `torch.promote_types` refuses float8."""
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return a.eps <= b.eps and a.max >= b.max and a.tiny <= b.tiny


def tidy(graph: fx.Graph, inserted: set[fx.Node]) -> Counter[str]:
    """Merge equal casts and drop pairs that undo each other; casts that are not `inserted` may round on purpose."""
    counts: Counter[str] = Counter()
    existing: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        if not is_cast(node):
            continue
        source, to = node.args[0], ir.example(node).dtype
        if is_cast(source):
            first, middle = ir.example(source.args[0]).dtype, ir.example(source).dtype
            keeps_all = holds(middle, first)  # a wider dtype in between changes no number
            if keeps_all or {node, source} <= inserted and first == to:
                source = source.args[0]
                counts["removed"] += 1
        if ir.example(source).dtype == to:
            node.replace_all_uses_with(source)
        elif (source, to) in existing:
            node.replace_all_uses_with(existing[source, to])
            counts["merged"] += 1
        else:
            node.args = (source,)
            existing[source, to] = node
    graph.eliminate_dead_code()
    return counts


@dataclass(frozen=True)
class Cast(ir.Pass):
    """Insert casts.

    `masters` is the dtype in which each parameter is stored, by name; patterns of `modules` override `ops`.
    """

    masters: Mapping[str, torch.dtype] = field(default_factory=dict)
    ops: Mapping[str, torch.dtype] = field(default_factory=dict)
    modules: Mapping[str, torch.dtype] = field(default_factory=dict)
    output: torch.dtype | None = None
    name = "cast"
    takes = (Stage.CAPTURED,)

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        by_option: Counter[str] = Counter()
        casts = self.cast_masters(program, ctx) | self.cast_operators(program, ctx, by_option)
        inserted = Counter(f"{_dtype(n.args[0])} -> {_dtype(n)}" for n in casts)
        counts = {**inserted, **tidy(program.graph, casts)}
        program.module.recompile()
        return program, ir.Report(counts, dtype_table(program), effects=tuple(self.effects(program, by_option)))

    def effects(self, program: ir.Program, by_option: Counter[str]) -> Iterator[ir.Effect]:
        """Yield the matmuls in a narrow dtype, and the operators that each option casts."""
        matmuls = [n for n in program.calls() if name_of(n) in PRODUCTS and ir.example(n).is_floating_point()]
        narrow = [n for n in matmuls if ir.example(n).itemsize < 4]
        if narrow:
            things = f"matmuls in {_dtype(narrow[0])}"
            yield ir.Effect("passes.cast.param_dtype", program.count(narrow), things, program.count(matmuls))
        for option, count in by_option.items():
            yield ir.Effect(f"passes.cast.{option}", count, "operators cast")

    def cast_masters(self, program: ir.Program, ctx: ir.Context) -> set[fx.Node]:
        """Give parameters their stored dtype; return the casts to the dtype of their uses, next to the first use."""
        casts = set()
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        output = program.graph.output_node()
        for node, item in zip(program.placeholders(), program.inputs):
            stored, used = self.masters.get(item.name), ir.example(node).dtype
            if item.kind != "parameter" or stored is None or stored == used:
                continue
            first = min(node.users, key=order.__getitem__, default=output)
            cast = Editor(ctx, program.graph, first).call(COPY, (node,), {"dtype": used})
            ir.update(cast, phase="forward", layer=item.layer)
            with ctx.fake_mode:
                ir.set_value(node, torch.empty_like(ir.example(cast), dtype=stored))
            node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
            casts.add(cast)
        return casts

    def cast_operators(self, program: ir.Program, ctx: ir.Context, by_option: Counter[str]) -> set[fx.Node]:
        """Compute operators in the dtype that an option gives them, and count them; return the casts around them."""
        casts: set[fx.Node] = set()
        matched: set[str] = set()
        wide = terms(program)
        for node in list(program.calls()):
            option, dtype = self.target_dtype(node, matched)
            if dtype is None:
                continue
            by_option[option] += program.times(node)
            before = None if node in wide else ir.value(node)
            new = inline(node, in_dtype(node.target, dtype, before), ctx)  # type: ignore[arg-type]
            casts.update(n for n in new if is_cast(n))
        if casts:
            refresh(program, ctx)
        for option, patterns in (("module", self.modules), ("op", self.ops.keys() - OPS)):
            if unmatched := sorted(p for p in patterns if p not in matched):
                kind = "operator" if option == "op" else option
                raise ir.Refused("cast", None, f"passes.cast.{option}s: no {kind} is named like {unmatched[0]!r}")
        return casts

    def target_dtype(self, node: fx.Node, matched: set[str]) -> tuple[str, torch.dtype | None]:
        """Return the option and the dtype in which the node must compute, None if it already does."""
        if not is_operator(node) or node.target is COPY:
            return "", None
        dtypes = {ir.example(n).dtype for n in node.all_input_nodes if ir.is_tensor(n)}
        floating = {d for d in dtypes if d.is_floating_point}
        path = ir.module_path(node)
        by_module = next((p for p in self.modules if path and within(path, p)), None)
        if by_module is not None:
            matched.add(by_module)
        by_op = [p for p in self.ops if fnmatchcase(name_of(node), p)]
        matched.update(by_op)
        if len(floating) != 1:
            return "", None
        (now,) = floating
        if by_module is not None:
            return "modules", self.modules[by_module] if self.modules[by_module] != now else None
        widen = [("ops", self.ops[p]) for p in by_op]
        if self.output is not None and not ir.record(node).origin.modules:
            widen.append(("output_dtype", self.output))
        return widen[0] if widen and widen[0][1].itemsize > now.itemsize else ("", None)


def refresh(program: ir.Program, ctx: ir.Context) -> None:
    """Recompute the recorded values of all operators: a result that is not cast back has another dtype."""
    with ctx.fake_mode, torch.no_grad():
        for node in program.calls():
            args, kwargs = fx.map_arg((node.args, node.kwargs), ir.value)
            ir.set_value(node, node.target(*args, **kwargs))  # type: ignore[operator]


def dtype_table(program: ir.Program) -> tuple[str, ...]:
    """Return lines such as `linear computes in bf16: 29`: the dtype and number of calls of each operator."""
    counts = Counter(
        (name_of(n), _dtype(n.args[0]))
        for n in program.calls()
        if is_operator(n)
        and n.target is not COPY
        and n.args
        and ir.is_tensor(n.args[0])
        and ir.example(n.args[0]).is_floating_point()  # type: ignore[arg-type]
    )
    return tuple(f"{name} computes in {dtype}: {count}" for (name, dtype), count in sorted(counts.items()))


def _dtype(node: Any) -> str:
    return format_dtype(ir.example(node).dtype)
