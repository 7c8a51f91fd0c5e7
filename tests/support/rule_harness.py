"""Run a function of a few tensors on lockstep ranks under chosen placements and compare it with one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from verified import apply

from passes.autograd.joint import Joint
from passes.check.simulate import Lockstep, coordinate
from passes.context.balance import hops_of, ranks_that_meet
from passes.context.sequence_layout import bounds_in
from passes.ir import ir
from passes.ir.mesh import HOPS, Mesh
from passes.ir.operators import name_of
from passes.ir.order import PLAIN, Order
from passes.ir.record import read_values
from passes.ir.spec import Spec, boxes, shard, unshard
from passes.ir.stages import Stage
from passes.sharding.collectives import Collectives
from passes.sharding.custom import PLACES
from passes.sharding.normalize import Normalize
from passes.sharding.shard import Shard
from passes.torch_private import FakeTensorMode, OpOverload

TOLERANCE = 1e-12  # relative to the largest entry
GARBAGE = -3.7  # the value of undefined padding: invalid for logarithms and roots, wrong for maxima


@dataclass(frozen=True)
class Function:
    """`fn(*tensors)`, captured once: the graph of its outputs and, if any is floating, of a loss over them.

    Floating tensors are parameters and get gradients; `activations` are scaled by one first, so that
    placement treats them as activations; other tensors are batch inputs.
    """

    program: ir.Program
    ctx: ir.Context
    values: tuple[Tensor, ...]  # of the program's inputs
    wanted: tuple[Tensor, ...]  # of the program's outputs, then of the gradients of its parameters
    operators: frozenset[str]  # of the table, before and after they are normalized
    order: Order = PLAIN  # in which `cp` holds what it shards


def capture(fn: Callable[..., Any], tensors: Sequence[Tensor], mesh: Mesh, weights: Sequence[int] = ()) -> Function:
    """Trace `fn` over the tensors; tensors numbered in `weights` are weights, the others activations."""
    generator = torch.Generator().manual_seed(0)
    tensors = [t.detach() for t in tensors]
    leaves = [t.clone().requires_grad_(_floating(t)) for t in tensors]
    flat = _leaves(fn(*leaves))
    smooth = [i for i, o in enumerate(flat) if o.requires_grad]
    scales = [torch.rand(flat[i].shape, generator=generator, dtype=torch.float64) + 0.5 for i in smooth]
    one = torch.ones((), dtype=torch.float64)

    def run(one: Tensor, *rest: Tensor) -> list[Tensor]:
        given = [x * one.to(x.dtype) if _floating(x) and i not in weights else x for i, x in enumerate(rest[: len(tensors)])]
        outs = _leaves(fn(*given))
        terms = [(outs[i] * s.to(outs[i].dtype)).sum() for i, s in zip(smooth, rest[len(tensors):])]
        return [torch.stack(terms).sum() if len(terms) > 1 else terms[0], *outs] if terms else outs

    values = (one, *tensors, *scales)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(v) for v in values]
    with mode, torch.no_grad():
        module = make_fx(run, pre_dispatch=True)(*fakes)
    read_values(module.graph)
    _check_plain(module.graph)
    kinds = ["batch", *("parameter" if _floating(t) else "batch" for t in tensors), *["batch"] * len(scales)]
    inputs = tuple(ir.Input(f"input{i}", kind, Spec.whole(tuple(v.shape)))  # type: ignore[arg-type]
                   for i, (kind, v) in enumerate(zip(kinds, values)))
    results = ["loss", *["metric"] * len(flat)] if scales else ["metric"] * len(flat)
    leaves = [v.clone().requires_grad_(k == "parameter") for k, v in zip(kinds, values)]
    expected = run(*leaves)
    outputs = tuple(ir.Output(f"output{i}", kind, Spec.whole(tuple(o.shape)))  # type: ignore[arg-type]
                    for i, (kind, o) in enumerate(zip(results, expected)))
    program = ir.Program(module, inputs, outputs, mesh, frozenset({"captured"}))
    ctx = ir.Context(mode)
    before = _operators(program)
    program, _ = Normalize()(program, ctx)
    _check_certain(program)
    return Function(program, ctx, values, (*(o.detach() for o in expected), *_gradients(leaves, expected, bool(scales))),
                    before | _operators(program))


def on(mesh: Mesh, function: Function, order: Order = PLAIN) -> Function:
    """Return the function on another mesh, with its order of sequences; the capture does not depend on it."""
    return replace(function, program=replace(function.program, mesh=mesh), order=order)


def _leaves(outputs: Any) -> list[Tensor]:
    return [o for o in pytree.tree_leaves(outputs) if isinstance(o, Tensor)]


class NotPlain(Exception):
    """The error for a function that the harness cannot trace into a functional graph of its arguments."""


def _check_certain(program: ir.Program) -> None:
    if any(given.kind == "scalar" for given in program.inputs):
        raise NotPlain("draws random numbers")


def _check_plain(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "get_attr":
            raise NotPlain("holds a constant tensor")
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            raise NotPlain(f"writes in place ({node.target})")
        if node.op == "call_function" and not isinstance(node.target, OpOverload) and node.target.__name__ != "getitem":
            raise NotPlain(f"calls {node.target.__name__}")


def _operators(program: ir.Program) -> frozenset[str]:
    return frozenset(name_of(n) for n in program.calls() if isinstance(n.target, OpOverload))


def _floating(x: Tensor) -> bool:
    return x.is_floating_point()


def _gradients(leaves: Sequence[Tensor], expected: Sequence[Tensor], has_loss: bool) -> tuple[Tensor, ...]:
    wanted = [v for v in leaves if v.requires_grad]
    if not has_loss or not wanted or not expected[0].requires_grad:
        return tuple(torch.zeros_like(v) for v in wanted) if has_loss else ()
    found = torch.autograd.grad(expected[0], wanted, allow_unused=True)
    return tuple(g for g in found if g is not None)  # unused inputs have none


def check(function: Function, specs: Mapping[int, Spec], tolerance: float = TOLERANCE,
          sequence_parallel: bool = True, context: str = "auto", gradients: bool = True) -> ir.Report:
    """Run with the numbered tensors placed as given; raise AssertionError naming a difference. Return the shard report.

    Without `gradients` each operator is as the rule placed it, and its statements on padding are checked; tracing the
    gradients replaces some operators.
    """
    program, ctx = function.program, function.ctx
    inputs = tuple(replace(given, spec=specs.get(i - 1, given.spec).ordered(function.order))
                   for i, given in enumerate(program.inputs))
    program = replace(program, inputs=inputs, stage=Stage.PLACED)
    program, report = apply([Shard(sequence_parallel, context=context)], program, ctx)
    if gradients and any(o.kind == "loss" for o in program.outputs):
        program, _ = apply([Joint()], program, ctx)
    program, _ = Collectives()(program, ctx)
    values = iter(function.values)
    full = {i.name: next(values) for i in program.inputs if i.kind not in PLACES}
    outs = Checked(program).run(_local_inputs(program, full))
    for k, (output, want) in enumerate(zip(program.outputs, function.wanted, strict=gradients)):
        locals_ = [out[k] for out in outs]
        compare(f"{output.kind} {output.name}", unshard(locals_, output.spec, program.mesh), want, tolerance)
        for place, local in zip(program.mesh, locals_):
            _check_padding(f"{output.kind} {output.name}", local, output.spec, program.mesh, place)
    return report


def compare(what: str, got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    """Assert equal shape, dtype and values up to `tolerance` of the largest entry (exactly, if not floating)."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {got.dtype}, not {want.shape} {want.dtype}"
    if not got.is_floating_point():
        assert torch.equal(got, want), f"{what}: {got.tolist()} is not {want.tolist()}"
        return
    finite = want.isfinite()
    scale = max(1.0, want[finite].abs().max().item() if finite.any() else 0.0)
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * scale, equal_nan=True, msg=lambda m: f"{what}: {m}")


class Checked(Lockstep):
    """The simulator, which also checks the claims of each forward node's placement about its value."""

    def step(self, node: fx.Node) -> list[Any]:
        """Run one operator on all ranks and check its results."""
        results = super().step(node)
        spec = ir.spec(node)
        if spec is None or "empty" in node.name or not isinstance(results[0], Tensor):
            return results
        values = [x.float() if x.is_floating_point() and x.itemsize == 1 else x for x in results]  # float8 does not compare
        infinite = any(_infinite(value[valid(spec, self.mesh, place)]) for place, value in zip(self.mesh, values)
                       if tuple(value.shape) == spec.local_shape(self.mesh))
        for place, value in zip(self.mesh, values):
            assert tuple(value.shape) == spec.local_shape(self.mesh), f"{node}: {tuple(value.shape)} is not {spec}"
            _check_padding(f"%{node.name}", value, spec, self.mesh, place, infinite)
        self._check_same(node, spec, values)
        return results

    def _check_same(self, node: fx.Node, spec: Spec, results: list[Any]) -> None:
        for axis in self.mesh.axes:
            if spec.state(axis) == "invariant":
                for first, *others in self.mesh.groups(axis):
                    assert all(torch.allclose(results[first], results[r], rtol=0, atol=0, equal_nan=True) for r in others), \
                        f"%{node.name} {spec}: not the same on {axis}"


def _check_padding(what: str, local: Tensor, spec: Spec, mesh: Mesh, place: dict[str, int],
                   infinite: bool = False) -> None:
    """Assert that padding has the value of its placement, and is finite unless the true entries are `infinite`."""
    if not spec.padded(mesh):
        return
    padding = local[~valid(spec, mesh, place)]
    if spec.fill is not None:
        assert (padding == spec.fill).all(), f"{what} {spec}: padding is {padding.tolist()}, said to be {spec.fill}"
    elif not infinite:
        assert padding.isfinite().all(), f"{what} {spec}: padding is {padding.tolist()}"


def valid(spec: Spec, mesh: Mesh, place: dict[str, int]) -> Tensor:
    """Return a mask of the entries of the rank's local tensor that are not padding."""
    mask = torch.zeros(spec.local_shape(mesh), dtype=torch.bool)
    for box in boxes(spec, mesh, place):
        box.of_local(mask).fill_(True)
    return mask


def _infinite(x: Tensor) -> bool:
    return not x.isfinite().all()


def _local_inputs(program: ir.Program, full: Mapping[str, Tensor]) -> list[list[Tensor]]:
    mesh = program.mesh
    return [[hops(program, full) if i.name == HOPS else coordinate(mesh, rank, i, program.order) if i.kind in PLACES
             else _local(full[i.name], i.spec, mesh, place) for i in program.inputs] for rank, place in enumerate(mesh)]


def hops(program: ir.Program, full: Mapping[str, Tensor]) -> Tensor:
    """Return the hops of the rings of a program."""
    return torch.cat([hops_of(ranks_that_meet(*pair, program.mesh, program.order)) for pair in bounds_in(program.bounds, full)])


def _local(full: Tensor, spec: Spec, mesh: Mesh, place: dict[str, int]) -> Tensor:
    """Return a rank's share: undefined padding has garbage, and the terms of a partial sum differ by rank."""
    terms = full
    for axis in spec.partial_axes:
        terms = terms * (place[axis] + 0.25) / sum(k + 0.25 for k in range(mesh[axis]))
    if spec.fill is not None:
        return shard(terms, spec, mesh, place)
    garbage = GARBAGE if full.is_floating_point() else 0
    local = full.new_full(spec.local_shape(mesh), garbage)
    for box in boxes(spec, mesh, place):
        box.of_local(local).copy_(box.of(terms))
    return local


def sharded(shape: Sequence[int], dim: int | None, axis: str = "tp", fill: float | None = 0.0) -> Spec:
    """Return a placement with one dim sharded on one axis (None: a full copy)."""
    spec = replace(Spec.whole(tuple(shape)), fill=fill)
    if dim is None:
        return spec
    dims = tuple((replace(d[0], axes=(axis,)),) if i == dim else d for i, d in enumerate(spec.dims))
    return replace(spec, dims=dims)
